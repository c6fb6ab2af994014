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
    "Agent", "ArtPatchError", "Backend", "Busy", "ConfigError", "EngineError", "Environment", "Evaluation",
    "GRPOTrainer", "GateRejected", "GymnasiumEnvironment", "History", "IllegalAction", "JudgeError", "LocalBackend",
    "LossConfig", "Messages", "MessagesAndChoices", "Model", "PettingZooEnvironment", "StoreError", "Tools",
    "TrainConfig", "TrainResult", "TrainSFTConfig", "TrainableModel", "TrainingApi", "TrainingError", "Trajectory",
    "TrajectoryGroup", "auto_trajectory", "bind", "capture_auto_trajectory", "capture_yielded_trajectory", "correct",
    "current_trajectory", "dev", "evaluate", "feedback_url", "flush", "gather_trajectories", "gather_trajectory_groups",
    "group", "limit_concurrency", "patch", "replayable", "retry", "reward", "same_policy", "score", "span", "start",
    "status", "suppress", "train_sft_from_file", "trajectory", "trajectory_group_batches", "unpatch", "wrap",
    "yield_trajectory",
]

if TYPE_CHECKING:
    from art_patch import dev
    from art_patch.context import (
        bind, correct, current_trajectory, group, replayable, reward, score, span, suppress, trajectory,
    )
    from art_patch.errors import (
        ArtPatchError, Busy, ConfigError, EngineError, GateRejected, JudgeError, StoreError, TrainingError,
    )
    from art_patch.feedback import feedback_url
    from art_patch.patching import flush, patch, status, unpatch, wrap
    from art_patch.rollouts import (
        Agent, Backend, Environment, Evaluation, GRPOTrainer, GymnasiumEnvironment, History, IllegalAction,
        LocalBackend, Messages, MessagesAndChoices, Model, PettingZooEnvironment, Tools, TrainableModel, TrainingApi,
        TrainResult, TrainSFTConfig, Trajectory, TrajectoryGroup, auto_trajectory, capture_auto_trajectory,
        capture_yielded_trajectory, evaluate, gather_trajectories, gather_trajectory_groups, limit_concurrency, retry,
        same_policy, start, train_sft_from_file, trajectory_group_batches, yield_trajectory,
    )
    from art_patch.training import LossConfig, TrainConfig
else:
    _found = lazily()
    # Names of OpenPipe ART that cannot exist here, and what takes their place.
    _INSTEAD = {
        "LocalTrainResult": "TrainResult", "ServerlessTrainResult": "TrainResult",
        "ServerlessBackend": "LocalBackend(), which trains and serves on this machine",
    }

    def __getattr__(name: str):
        if name in _INSTEAD:
            raise AttributeError(f"art_patch has no {name}; write art.{_INSTEAD[name]}")
        return _found(name)

    def __dir__():
        return sorted(__all__)
