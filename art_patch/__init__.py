"""Agents that learn from their own traffic, with one line.

::

    import art_patch as art
    art.patch()

The flow, in the words of the folders: `patching` routes each call of the OpenAI SDK to `serving` or upstream, under
the identity that `context` gives it; `recording` keeps it in the `store`; then `art-patch retrain` does
`grouping` -> `rewards` -> `training` -> `gate` -> `promotion`, as `cycle.py` reads from top to bottom. Whoever writes
rollouts themselves does so with `explicit`; whoever has a game or a simulator, with `environments` on top of it.

Importing this package loads the standard library only: every public name below is imported when first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__version__ = "0.1.0"

__all__ = [
    "Agent",
    "ArtPatchError",
    "Busy",
    "ConfigError",
    "EngineError",
    "Environment",
    "Evaluation",
    "GRPOTrainer",
    "GateRejected",
    "GymnasiumEnvironment",
    "History",
    "IllegalAction",
    "JudgeError",
    "LocalBackend",
    "LossConfig",
    "Messages",
    "MessagesAndChoices",
    "Model",
    "PettingZooEnvironment",
    "StoreError",
    "Tools",
    "TrainConfig",
    "TrainResult",
    "TrainableModel",
    "TrainingApi",
    "TrainingError",
    "Trajectory",
    "TrajectoryGroup",
    "auto_trajectory",
    "bind",
    "capture_auto_trajectory",
    "correct",
    "current_trajectory",
    "evaluate",
    "feedback_url",
    "flush",
    "gather_trajectories",
    "gather_trajectory_groups",
    "group",
    "limit_concurrency",
    "patch",
    "replayable",
    "retry",
    "reward",
    "same_policy",
    "score",
    "span",
    "start",
    "status",
    "suppress",
    "trajectory",
    "unpatch",
    "wrap",
]

if TYPE_CHECKING:
    from art_patch.context import (
        bind,
        correct,
        group,
        replayable,
        reward,
        score,
        span,
        suppress,
        trajectory,
    )
    from art_patch.context.captured import current_trajectory
    from art_patch.environments.agent import Agent
    from art_patch.environments.environment import Environment, IllegalAction
    from art_patch.environments.gymnasium_adapter import GymnasiumEnvironment
    from art_patch.environments.pettingzoo_adapter import PettingZooEnvironment, same_policy
    from art_patch.environments.trainer import GRPOTrainer
    from art_patch.errors import (
        ArtPatchError,
        Busy,
        ConfigError,
        EngineError,
        GateRejected,
        JudgeError,
        StoreError,
        TrainingError,
    )
    from art_patch.explicit.backend import LocalBackend
    from art_patch.explicit.capture import auto_trajectory, capture_auto_trajectory
    from art_patch.explicit.evaluation import Evaluation, evaluate
    from art_patch.explicit.gather import gather_trajectories, gather_trajectory_groups
    from art_patch.explicit.helpers import limit_concurrency, retry
    from art_patch.explicit.model import Model, TrainableModel, TrainResult
    from art_patch.explicit.session import TrainingApi, start
    from art_patch.explicit.trajectory import History, Messages, MessagesAndChoices, Tools, Trajectory
    from art_patch.explicit.trajectory_group import TrajectoryGroup
    from art_patch.feedback import feedback_url
    from art_patch.patching import flush, patch, status, unpatch, wrap
    from art_patch.training.config import TrainConfig
    from art_patch.training.loss_config import LossConfig
else:
    _CONTEXT = ("bind", "correct", "group", "replayable", "reward", "score", "span", "suppress", "trajectory")
    _HOME = dict.fromkeys(_CONTEXT, "context") | {"feedback_url": "feedback"}
    _HOME |= {"current_trajectory": "context.captured"}  # or what is being captured
    _HOME |= dict.fromkeys(("flush", "patch", "status", "unpatch", "wrap"), "patching")
    _HOME |= {"TrainConfig": "training.config", "LossConfig": "training.loss_config"}
    _EXPLICIT = {
        "backend": ("LocalBackend",),
        "capture": ("auto_trajectory", "capture_auto_trajectory"),
        "evaluation": ("Evaluation", "evaluate"),
        "gather": ("gather_trajectories", "gather_trajectory_groups"),
        "model": ("Model", "TrainResult", "TrainableModel"),
        "session": ("TrainingApi", "start"),
        "helpers": ("limit_concurrency", "retry"),
        "trajectory": ("History", "Messages", "MessagesAndChoices", "Tools", "Trajectory"),
        "trajectory_group": ("TrajectoryGroup",),
    }
    _HOME |= {name: f"explicit.{module}" for module, names in _EXPLICIT.items() for name in names}
    _ENVIRONMENTS = {
        "agent": ("Agent",),
        "environment": ("Environment", "IllegalAction"),
        "gymnasium_adapter": ("GymnasiumEnvironment",),
        "pettingzoo_adapter": ("PettingZooEnvironment", "same_policy"),
        "trainer": ("GRPOTrainer",),
    }
    _HOME |= {name: f"environments.{module}" for module, names in _ENVIRONMENTS.items() for name in names}

    def __getattr__(name):
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        from art_patch.garbage import uncollected

        with uncollected():
            value = getattr(import_module(f"{__name__}.{_HOME.get(name, 'errors')}"), name)
        globals()[name] = value
        return value

    def __dir__():
        return sorted(__all__)
