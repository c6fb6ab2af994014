"""Scored groups in, a new LoRA out.

In the order in which an update goes:

| files | in -> out |
|---|---|
| `data/rows`, `rendering`, `supervised`, `round_trip` | calls -> rows of token ids, learned tokens marked |
| `losses/loss_config` | rewards of groups -> advantages; which loss is minimised with them |
| `loop/job`, `plan` | everything an update depends on, as a record and a file -> its optimizer steps |
| `loop/processes` | a job -> this process, or several |
| `loop/update` | the loop: load, score as the policy at the start, step after step, publish |
| `loop/loading`, `kernels/families`, `lora_layers` | base model and LoRA -> a model that computes exactly |
| `data/packing`, `kernels/attention`, `scoring` | rows -> each distinct token computed once -> log-probabilities |
| `losses/policy_loss`, `supervised`, `loop/gradients` | log-probabilities -> a loss and its gradient |
| `loop/learner`, `metrics` | a gradient -> a step and a checkpoint, or a reason to end |

Nothing here knows the store. Importing the package loads neither torch nor transformers.
"""

# pyright: reportUnusedImport=false
from __future__ import annotations

from typing import TYPE_CHECKING

from art_patch._lib.lazy import lazily

if TYPE_CHECKING:
    from art_patch.training.config import Backend, Start, TrainConfig, require_evaluation, require_packages
    from art_patch.training.data.packing import Example
    from art_patch.training.data.rendering import Renderer
    from art_patch.training.data.round_trip import RoundTrips, check_round_trips
    from art_patch.training.data.rows import Row, RowsReport, rows_and_report, trained_answers
    from art_patch.training.data.supervised import Pair, demonstrations, preferences
    from art_patch.training.kernels.families import Family, family_of
    from art_patch.training.loop.job import Sibling, TrainGroup, TrainJob, read_job
    from art_patch.training.loop.loading import require_machine, require_servable
    from art_patch.training.loop.update import run_job
    from art_patch.training.losses.loss_config import LossConfig, LossName, advantages_of_groups
else:
    __getattr__ = lazily(
        __name__,
        {
            "config": "Backend Start TrainConfig require_evaluation require_packages",
            "data.packing": "Example",
            "data.rendering": "Renderer",
            "data.round_trip": "RoundTrips check_round_trips",
            "data.rows": "Row RowsReport rows_and_report trained_answers",
            "data.supervised": "Pair demonstrations preferences",
            "kernels.families": "Family family_of",
            "loop.job": "Sibling TrainGroup TrainJob read_job",
            "loop.loading": "require_machine require_servable",
            "loop.update": "run_job",
            "losses.loss_config": "LossConfig LossName advantages_of_groups",
        },
    )
