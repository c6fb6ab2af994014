"""Trains policies: an update turns scored groups and demonstrations into a new LoRA.

The table lists the modules in the order in which an update uses them. A row is one token sequence.

| modules | what they do |
|---|---|
| `data/rows`, `rendering`, `supervised`, `round_trip` | turn recorded calls into rows, and mark the learned tokens |
| `loss_config` | compute advantages from the rewards of groups, and define the losses that use them |
| `loop/job` | keeps the input of an update as a record and a file, and plans its optimizer steps |
| `loop/processes` | run the update in this process or in several |
| `loop/unsloth` | builds the environment of Unsloth, whose interpreter then runs these processes |
| `loop/update` | runs the training loop: scores all data once under the policy at the start, and makes the steps |
| `loop/loading`, `families`, `packed` | load the base model, in fewer bits if asked, and put the LoRA on it |
| `data/packing`, `attention`, `flash`, `scoring` | compute log-probabilities, once for each distinct token |
| `loop/gradients` | scores the data under the policy at the start |
| `losses`, `loop/gradients` | compute the loss and its gradient from log-probabilities |
| `loop/metrics` | leaves out rows far from that policy, measures each step and the update, and ends it early |

No module here reads or writes the store. Importing the package loads neither torch nor transformers.
"""

from art_patch._lib.lazy import TYPE_CHECKING, lazily

if TYPE_CHECKING:
    from art_patch.training.config import (
        Backend, Start, TrainConfig, require_evaluation, require_packages, require_permission,
    )
    from art_patch.training.data.rendering import Renderer
    from art_patch.training.data.round_trip import RoundTrips, check_round_trips
    from art_patch.training.data.rows import (
        Anchors, Example, Row, RowsReport, Turn, cut, merge, rows_and_report, trained_answers,
    )
    from art_patch.training.data.supervised import FileRows, Pair, demonstrations, preferences, rows_of_file
    from art_patch.training.families import Family, family_of
    from art_patch.training.loop.job import GroupKind, Sibling, TrainGroup, TrainJob, read_job
    from art_patch.training.loop.loading import made_with, require_machine, require_servable
    from art_patch.training.loop.metrics import near_job
    from art_patch.training.loop.unsloth import unsloth_recipe, why_no_unsloth
    from art_patch.training.loop.update import run_job
    from art_patch.training.loss_config import TOLERANCE, LossConfig, LossName, Scale, advantages_of_groups
else:
    __getattr__ = lazily()
