"""The demo: an unchanged agent gets better from its own traffic, on a laptop, with models and a judge made here."""

# pyright: reportUnusedImport=false
from __future__ import annotations

from typing import TYPE_CHECKING

from art_patch._lib.lazy import lazily

if TYPE_CHECKING:
    from art_patch.demo.recipe import CYCLES
    from art_patch.demo.run import run_demo
else:
    __getattr__ = lazily(__name__, {"recipe": "CYCLES", "run": "run_demo"})
