"""The stages of a cycle as they meet the store: each reads records, calls its pure package, writes what came of it.

`cycle.py` puts them in order. A stage's result is in the store before the next begins, so a cycle that was killed goes
on where it stopped.
"""

# pyright: reportUnusedImport=false
from __future__ import annotations

from typing import TYPE_CHECKING

from art_patch._lib.lazy import lazily

if TYPE_CHECKING:
    from art_patch.pipeline.challenger_watch import WatchReport, watch, watch_once
    from art_patch.pipeline.comparison import evaluate
    from art_patch.pipeline.cycle import CycleConfig, CycleReport, only_one, retrain
    from art_patch.pipeline.cycle_run import Run
    from art_patch.pipeline.explicit_update import UpdateByHand, run_explicit_update
    from art_patch.pipeline.form_groups import form, group
    from art_patch.pipeline.report import LONG, metrics_line
    from art_patch.pipeline.retention import prune
    from art_patch.pipeline.score_groups import score, to_judge
    from art_patch.pipeline.serving_upkeep import ServingUpkeep
    from art_patch.pipeline.unfinished import forget_unfinished
else:
    __getattr__ = lazily(
        __name__,
        {
            "challenger_watch": "WatchReport watch watch_once",
            "comparison": "evaluate",
            "cycle": "CycleConfig CycleReport only_one retrain",
            "cycle_run": "Run",
            "explicit_update": "UpdateByHand run_explicit_update",
            "form_groups": "form group",
            "report": "LONG metrics_line",
            "retention": "prune",
            "score_groups": "score to_judge",
            "serving_upkeep": "ServingUpkeep",
            "unfinished": "forget_unfinished",
        },
    )
