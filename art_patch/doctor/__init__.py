"""Doctor: what works, what does not, and what to do about it, before anybody has to ask.

In: settings, and what this machine says about packages, files, GPUs, the store's route and the engine. Out: `Finding`s,
in the order in which one would look. Every check only reads; the engine, which is asked for two short answers, and a
store on a server are the only things that are asked over a network.
A check that cannot be made is a finding too, so `examine` never fails because of what it finds.
"""

# pyright: reportUnusedImport=false
from __future__ import annotations

from typing import TYPE_CHECKING

from art_patch._lib.lazy import lazily

if TYPE_CHECKING:
    from art_patch.doctor.examination import examine
    from art_patch.doctor.finding import Finding, Level
else:
    __getattr__ = lazily(
        __name__,
        {
            "examination": "examine",
            "finding": "Finding Level",
        },
    )
