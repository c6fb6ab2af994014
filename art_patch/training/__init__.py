"""What was recorded and scored in, a new LoRA out.

In the order in which an update goes:

| files | in -> out |
|---|---|
| `rows`, `rendering`, `demonstrations`, `preferences` | calls -> rows of token ids, what is learned marked |
| `advantages` | rewards of groups -> how much better each sibling did |
| `job`, `plan` | all that an update depends on, as a record and a file -> its optimizer steps |
| `installed`, `running`, `launch`, `ranks` | a job -> this process, or several |
| `update` | the loop: load, score as the policy at the start, step after step, publish |
| `backend`, `loading`, `families` | base model and LoRA -> a model that computes exactly |
| `tree`, `packing`, `scoring`, `attention` | rows -> each distinct token computed once -> log-probabilities |
| `loss`, `supervised`, `gradients` | log-probabilities -> a loss and its gradient |
| `learner`, `checkpoint`, `guards`, `metrics` | a gradient -> a step that can be gone on from, or a reason to end |
| `probe`, `publish` | a trained model -> a policy that engines accept |
| `merge` | a policy -> files that PEFT, transformers and vLLM read |

Nothing here knows the store. Importing the package loads neither torch nor transformers.
"""

# pyright: reportUnusedImport=false
from __future__ import annotations

from typing import TYPE_CHECKING

from art_patch._lib.lazy import lazily

if TYPE_CHECKING:
    from art_patch.training.config import Backend, Start, TrainConfig, require_evaluation
    from art_patch.training.data.packing import Example
    from art_patch.training.data.rendering import Renderer
    from art_patch.training.data.round_trip import RoundTrips, check_round_trips
    from art_patch.training.data.rows import Row, RowsReport, rows_and_report, trained_answers
    from art_patch.training.data.supervised import Pair, demonstrations, preferences
    from art_patch.training.kernels.families import Family, family_of
    from art_patch.training.loop.backend import require_machine
    from art_patch.training.loop.installed import require_packages
    from art_patch.training.loop.job import Sibling, TrainGroup, TrainJob, read_job
    from art_patch.training.loop.running import run_job
    from art_patch.training.loop.servable import require_servable
    from art_patch.training.losses.loss_config import LossConfig, LossName, advantages_of_groups
else:
    __getattr__ = lazily(
        __name__,
        {
            "config": "Backend Start TrainConfig require_evaluation",
            "data.packing": "Example",
            "data.supervised": "Pair demonstrations preferences",
            "data.rendering": "Renderer",
            "data.round_trip": "RoundTrips check_round_trips",
            "data.rows": "Row RowsReport rows_and_report trained_answers",
            "kernels.families": "Family family_of",
            "loop.backend": "require_machine",
            "loop.installed": "require_packages",
            "loop.job": "Sibling TrainGroup TrainJob read_job",
            "loop.running": "run_job",
            "loop.servable": "require_servable",
            "losses.loss_config": "LossConfig LossName advantages_of_groups",
        },
    )
