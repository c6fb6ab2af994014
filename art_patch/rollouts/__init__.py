"""Training by hand: a script writes its own rollouts, with the names and signatures of OpenPipe ART.

| modules | in -> out |
|---|---|
| `client` | a call of the SDK -> its answer, whose choices carry the exact tokens; captured as a trajectory |
| `trajectory`, `trajectory_group` | messages and choices -> rollouts and groups of siblings, with their failures |
| `at_once`, `decorators` | rollouts -> many at once, with a bar, retries and limits |
| `records` | groups -> the store's own records; metrics of each step -> `history.jsonl` |
| `model`, `backend` | the classes that a script uses |
| `model_runtime` | a model -> its store, its engine (joined or started), its trainer: the work of each verb |
| `processes` | the engine and the trainer as children of the script; groups in the store -> a policy that serves |
| `evaluation` | models, scenarios -> means, differences, a plot |
| `environments` | games and simulators -> rollouts |

Nothing here is a second way of training. Trajectories go into the same store, the same code trains on the same recorded
tokens, and the policy is promoted through the same ledger and proven by the same engine. Two things differ: the script
decides when to train and on what, and no gate tests the policy. Importing this package imports no other module.
"""

# pyright: reportUnusedImport=false
from __future__ import annotations

from typing import TYPE_CHECKING

from art_patch._lib.lazy import lazily

if TYPE_CHECKING:
    from art_patch.rollouts.backend import LocalBackend, TrainingApi, start
    from art_patch.rollouts.client import auto_trajectory, capture_auto_trajectory
    from art_patch.rollouts.decorators import limit_concurrency, retry
    from art_patch.rollouts.environments.adapters import GymnasiumEnvironment, PettingZooEnvironment, same_policy
    from art_patch.rollouts.environments.environment import Environment, IllegalAction
    from art_patch.rollouts.environments.trainer import Agent, GRPOTrainer
    from art_patch.rollouts.evaluation import Evaluation, evaluate
    from art_patch.rollouts.model import Model, TrainableModel
    from art_patch.rollouts.model_runtime import TrainResult
    from art_patch.rollouts.trajectory import History, Messages, MessagesAndChoices, Tools, Trajectory
    from art_patch.rollouts.trajectory_group import TrajectoryGroup, gather_trajectories, gather_trajectory_groups
else:
    __getattr__ = lazily(
        __name__,
        {
            "backend": "LocalBackend TrainingApi start",
            "client": "auto_trajectory capture_auto_trajectory",
            "decorators": "limit_concurrency retry",
            "environments.adapters": "GymnasiumEnvironment PettingZooEnvironment same_policy",
            "environments.environment": "Environment IllegalAction",
            "environments.trainer": "Agent GRPOTrainer",
            "evaluation": "Evaluation evaluate",
            "model": "Model TrainableModel",
            "model_runtime": "TrainResult",
            "trajectory": "History Messages MessagesAndChoices Tools Trajectory",
            "trajectory_group": "TrajectoryGroup gather_trajectories gather_trajectory_groups",
        },
    )
