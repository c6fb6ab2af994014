"""Training by hand: whoever writes rollouts themselves, in the words of OpenPipe ART.

| modules | in -> out |
|---|---|
| `client`, `capture` | a call of the SDK -> its own answer, whose choices carry the exact tokens |
| `trajectory`, `trajectory_group` | what a rollout said, and siblings; failures are kept beside them |
| `gather`, `at_once`, `decorators`, `progress` | rollouts, many at once -> groups |
| `translate` | groups -> the store's own records |
| `model`, `backend`, `session` | what a script calls |
| `model_runtime`, `child`, `serving_process` | the project's store, and its `art-patch serve`, joined or started |
| `trainer`, `trainer_process` | groups in the store -> a policy that serves, in a process of its own |
| `logs` | rewards of each step -> `history.jsonl` -> which checkpoints are kept |

A layer and no second path: trajectories go into the same store, are trained on by the same stage of the cycle, from the
same rows of recorded tokens, and the policy is promoted through the same ledger, proven by the same engine. What is
different: the caller says when and on what, and no gate is asked. Importing this package imports nothing.
"""

# pyright: reportUnusedImport=false
from __future__ import annotations

from typing import TYPE_CHECKING

from art_patch._lib.lazy import lazily

if TYPE_CHECKING:
    from art_patch.rollouts.backend import LocalBackend
    from art_patch.rollouts.capture import auto_trajectory, capture_auto_trajectory
    from art_patch.rollouts.decorators import limit_concurrency, retry
    from art_patch.rollouts.environments.agent import Agent
    from art_patch.rollouts.environments.environment import Environment, IllegalAction
    from art_patch.rollouts.environments.gymnasium_adapter import GymnasiumEnvironment
    from art_patch.rollouts.environments.pettingzoo_adapter import PettingZooEnvironment, same_policy
    from art_patch.rollouts.environments.trainer import GRPOTrainer
    from art_patch.rollouts.evaluation import Evaluation, evaluate
    from art_patch.rollouts.gather import gather_trajectories, gather_trajectory_groups
    from art_patch.rollouts.model import Model, TrainableModel, TrainResult
    from art_patch.rollouts.session import TrainingApi, start
    from art_patch.rollouts.trajectory import History, Messages, MessagesAndChoices, Tools, Trajectory
    from art_patch.rollouts.trajectory_group import TrajectoryGroup
else:
    __getattr__ = lazily(
        __name__,
        {
            "backend": "LocalBackend",
            "capture": "auto_trajectory capture_auto_trajectory",
            "decorators": "limit_concurrency retry",
            "environments.agent": "Agent",
            "environments.environment": "Environment IllegalAction",
            "environments.gymnasium_adapter": "GymnasiumEnvironment",
            "environments.pettingzoo_adapter": "PettingZooEnvironment same_policy",
            "environments.trainer": "GRPOTrainer",
            "evaluation": "Evaluation evaluate",
            "gather": "gather_trajectories gather_trajectory_groups",
            "model": "Model TrainResult TrainableModel",
            "session": "TrainingApi start",
            "trajectory": "History Messages MessagesAndChoices Tools Trajectory",
            "trajectory_group": "TrajectoryGroup",
        },
    )
