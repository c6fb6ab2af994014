"""Agents that learn from their own traffic, with one line.

::

    import art_patch as art
    art.patch()

The flow, by the names of the folders: `patching` routes each call of the OpenAI SDK to `serving` or upstream, and
`context` says which trajectory the call belongs to; `recording` writes it to the `store`. Then `art-patch retrain` runs
`grouping` -> `rewards` -> `training` -> `gate` -> `promotion`, in the order of `pipeline/cycle.py`. Scripts that run
agents for training themselves, in games and simulators too, use `rollouts`.

Importing this package loads the standard library only: each public name below is imported when it is first used.
"""

from art_patch._lib.lazy import TYPE_CHECKING, lazily
from art_patch._lib.version import __version__ as __version__

__all__ = [
    "Agent", "ArtPatchError", "Busy", "ConfigError", "EngineError", "Environment", "Evaluation", "GRPOTrainer",
    "GateRejected", "GymnasiumEnvironment", "History", "IllegalAction", "JudgeError", "LocalBackend", "LossConfig",
    "Messages", "MessagesAndChoices", "Model", "PettingZooEnvironment", "StoreError", "Tools", "TrainConfig",
    "TrainResult", "TrainableModel", "TrainingApi", "TrainingError", "Trajectory", "TrajectoryGroup",
    "auto_trajectory", "bind", "capture_auto_trajectory", "correct", "current_trajectory", "evaluate", "feedback_url",
    "flush", "gather_trajectories", "gather_trajectory_groups", "group", "limit_concurrency", "patch", "replayable",
    "retry", "reward", "same_policy", "score", "span", "start", "status", "suppress", "trajectory", "unpatch", "wrap",
]

if TYPE_CHECKING:
    from art_patch.context import (
        bind, correct, current_trajectory, group, replayable, reward, score, span, suppress, trajectory,
    )
    from art_patch.errors import (
        ArtPatchError, Busy, ConfigError, EngineError, GateRejected, JudgeError, StoreError, TrainingError,
    )
    from art_patch.feedback import feedback_url
    from art_patch.patching import flush, patch, status, unpatch, wrap
    from art_patch.rollouts import (
        Agent, Environment, Evaluation, GRPOTrainer, GymnasiumEnvironment, History, IllegalAction, LocalBackend,
        Messages, MessagesAndChoices, Model, PettingZooEnvironment, Tools, TrainableModel, TrainingApi, TrainResult,
        Trajectory, TrajectoryGroup, auto_trajectory, capture_auto_trajectory, evaluate, gather_trajectories,
        gather_trajectory_groups, limit_concurrency, retry, same_policy, start,
    )
    from art_patch.training import LossConfig, TrainConfig
else:
    __getattr__ = lazily()

    def __dir__():
        return sorted(__all__)
