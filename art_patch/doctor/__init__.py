"""Doctor: says what works on this machine, what does not, and how to mend it.

`examine` returns `Finding`s in the order in which a person would look: this Python environment, the settings, the
store, the engine. Checks only read. Two things are asked over a network: the engine, for two short answers, and
PostgreSQL.
A check that fails is a finding too, so `examine` itself never fails because of what it finds.
"""

# pyright: reportUnusedImport=false
from __future__ import annotations

from typing import TYPE_CHECKING

from art_patch._lib.lazy import lazily

if TYPE_CHECKING:
    from art_patch.doctor.examination import examine
    from art_patch.doctor.finding import Finding, Level
else:
    __getattr__ = lazily(__name__, {"examination": "examine", "finding": "Finding Level"})
