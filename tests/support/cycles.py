"""A project with a real engine and a real store, its recorded traffic, and cycles over it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from art_patch._lib.ids import new_id
from art_patch.gate import GateConfig
from art_patch.grouping import ResampleConfig
from art_patch.pipeline import CycleConfig, retrain
from art_patch.rewards import DefenceConfig, OrderedJudge
from art_patch.serving import EngineClient
from art_patch.store import Store, open_store
from art_patch.training import TrainConfig
from art_patch.types import Call, Choice, Score, TrajectoryInfo

WORDS = ("plum", "pear", "apple", "bread", "lemon", "onion", "grape", "honey", "soap", "mug", "kettle", "candle")

QUESTIONS = [f"how many {word}?" for word in WORDS]


CONFIG = CycleConfig(
    settle_s=0.0,
    min_group_size=2,
    holdout_share=0.5,
    min_groups=2,
    defence=DefenceConfig(planted_share=0),  # a judge that likes short answers likes empty ones, too
    # Without bounds of its distance: this rate moves a random model far in a few steps.
    train=TrainConfig(
        learning_rate=2e-2,
        epochs=2,
        minibatches=4,
        lora_rank=4,
        warmup_steps=0,
        max_kl_nats=None,
        max_clip_fraction=None,
        max_drift_nats=None,
    ),
    # A random model learns nothing here but to collapse.
    gate=GateConfig(min_scenarios=3, samples=8, turns_per_scenario=1, collapse=None, worst_share=0),
)


def is_short(messages: list[dict[str, Any]]) -> float:
    """The rule: the fewer characters the better; something that a random model can learn."""
    return 1.0 / (1.0 + len(str(messages[-1].get("content") or "")) / 20)


def is_foreign(messages: list[dict[str, Any]]) -> float:
    """The share of characters beyond ASCII; a random model learns it far above the noise of a small gate."""
    said = str(messages[-1].get("content") or "")
    return sum(not character.isascii() for character in said) / max(1, len(said))


class Place:
    """A project with an engine, as `art-patch serve` leaves it."""

    def __init__(self, directory: Path, base: Path, client: EngineClient, url: str | None = None) -> None:
        self.url = url or f"sqlite:///{directory}/store.db"
        self.store: Store = open_store(self.url)
        self.adapters = directory / "adapters"
        self.client = client
        from art_patch.policies import base_fingerprint

        self.store.ledger.add_base("agent@0", str(base), base_fingerprint(base), who="test")
        self.stages: list[str] = []

    def traffic(
        self, policy: str = "agent@0", *, seed: int = 0, siblings: int = 6, questions: Sequence[str] = QUESTIONS,
        user: str | None = None,
    ) -> None:  # fmt: skip
        """What the patch would have recorded of these questions."""
        rng = random.Random(seed)
        records: list[Any] = []
        for question in questions:
            messages = [{"role": "user", "content": question}]
            answer = self.client.chat(
                model=policy, messages=messages, max_tokens=12, logprobs=True, return_token_ids=True, n=siblings,
                seed=rng.randrange(2**31),
            )  # fmt: skip
            for choice in answer["choices"]:  # one trajectory each: siblings as they come from separate runs
                key = new_id()
                logprobs = tuple(token["logprob"] for token in choice["logprobs"]["content"])
                only = Choice(0, choice["message"], choice["finish_reason"], tuple(choice["token_ids"]), logprobs)
                call = Call(
                    id=new_id(),
                    trajectory_id=key,
                    started_at=1.0,
                    requested_model="m",
                    messages=tuple(messages),
                    choices=(only,),
                    params={"max_tokens": 12},
                    policy=policy,
                    prompt_token_ids=tuple(answer["prompt_token_ids"]),
                )
                records += [TrajectoryInfo(key, 1.0, user_id=user), call]
        self.store.write(records)

    def cycle(self, judge: Any, config: CycleConfig = CONFIG):
        return retrain(
            self.store, self.client, judge, self.adapters, config, who="test",
            progress=lambda stage, done, total, note="": self.stages.append(stage), now=100.0,
        )  # fmt: skip

    @property
    def champion(self) -> str | None:
        policy = self.store.ledger.champion()
        return policy.name if policy else None

    def states(self) -> dict[str, str]:
        return {policy.name: policy.state for policy in self.store.ledger.policies()}


def eager(config: CycleConfig = CONFIG) -> CycleConfig:
    """A gate that lets pass whatever can be scored."""
    return replace(config, gate=replace(config.gate, margin=-1.0))


TRAINING = replace(eager(CONFIG), train=replace(CONFIG.train, checkpoint_every_s=0.0))


class Dies(Exception):
    """Stands for kill -9."""


def rewarded_traffic(place: Place, policy: str = "agent@0", *, seed: int = 0) -> None:
    """Runs that users rewarded, so that no judge is asked."""
    place.traffic(policy, seed=seed)
    reward(place)


def reward(place: Place) -> None:
    runs = place.store.read.ungrouped(settled_before=100.0)
    place.store.write([Score(new_id(), run.id, "reward", n % 3 / 2, "user", 1.0) for n, run in enumerate(runs)])


def die_after(place: Place, judge: OrderedJudge, steps: int, config: CycleConfig = TRAINING) -> None:
    def die(stage: str, done: int, total: int, note: str = "") -> None:
        if stage == "train" and done == steps:
            raise Dies

    with pytest.raises(Dies):
        retrain(place.store, place.client, judge, place.adapters, config, who="test", progress=die, now=100.0)


def jobs(place: Place) -> list[Path]:
    directory = place.adapters.parent / "training"
    return sorted(directory.iterdir()) if directory.exists() else []


def trained_on(place: Place) -> set[str]:
    return set(place.store.read.group_ids(state="trained"))


RESAMPLING = replace(eager(CONFIG), resample=ResampleConfig(samples=5, concurrency=2))


def upstream_traffic(place: Place) -> None:
    """What is recorded before any policy serves: the provider's answers, without token ids."""
    records: list[Any] = []
    for number, question in enumerate(QUESTIONS):
        key = new_id()
        call = Call(
            id=new_id(),
            trajectory_id=key,
            started_at=1.0,
            requested_model="m",
            messages=({"role": "user", "content": question},),
            choices=(Choice(0, {"role": "assistant", "content": "four"}, "stop"),),
            params={"max_tokens": 12},
            untrainable="answered by upstream",
        )
        records += [TrajectoryInfo(key, 1.0, user_id=f"user-{number}"), call]
    place.store.write(records)
