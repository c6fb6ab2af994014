"""A cycle in a process of its own that is killed just before or just after one step of its saga.

What is wrapped here is wrapped in that process alone; the product knows nothing of it. Importing this module imports
all that a cycle needs, so that a fork server does it once.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft  # noqa: F401 - for the fork server

import art_patch.gate
import art_patch.training.loop.update
from art_patch.demo.judge import STAND_IN_MODEL
from art_patch.pipeline import CycleConfig, retrain
from art_patch.rewards import Judge
from art_patch.rewards.judge.client import load_litellm
from art_patch.serving import EngineClient
from art_patch.store import Ledger, open_store
from tests.support.engines import ADMIN_KEY

load_litellm()

STEPS: dict[str, tuple[Any, str]] = {
    "scored": (Ledger, "set_groups"),
    "job kept": (art_patch.training.loop.update, "claim"),
    "checkpoint kept": (art_patch.training.loop.update.CheckpointWriter, "keep"),
    "published": (art_patch.training.loop.update, "publish_adapter"),
    "in the ledger": (Ledger, "add_candidate"),
    "job deleted": (shutil, "rmtree"),
    "loaded": (EngineClient, "load"),
    "proven": (EngineClient, "chat"),
    "gated": (art_patch.gate, "decide"),
    "moved": (Ledger, "move"),
    "unloaded": (EngineClient, "unload"),
}
"""From recorded traffic to a served champion, or a rejected candidate: each is one thing that is done or not."""


@dataclass(frozen=True)
class Death:
    """Where a cycle is killed."""

    step: str
    when: str

    def arm(self) -> None:
        """Wrap the step."""
        owner, name = STEPS[self.step]
        original: Callable[..., Any] = getattr(owner, name)

        def deadly(*args: Any, **kwargs: Any) -> Any:
            if self.step == "job deleted" and Path(args[0]).parent.name != "training":
                return original(*args, **kwargs)
            if self.when == "after":
                original(*args, **kwargs)
            os.kill(os.getpid(), signal.SIGKILL)

        setattr(owner, name, deadly)


def stand_in(url: str) -> Judge:
    """The judge at this address."""
    return Judge(STAND_IN_MODEL, base_url=url, api_key="none")


def run(directory: Path, engine: str, judge: str, config: CycleConfig, death: Death | None) -> None:
    """Run a cycle on this project."""
    if death:
        death.arm()
    store = open_store(f"sqlite:///{directory}/store.db")
    with EngineClient(engine, admin_key=ADMIN_KEY) as client:
        retrain(
            store, client, stand_in(judge), directory / "adapters", config, who="killed", progress=lambda *_: None,
            now=100.0,
        )  # fmt: skip
