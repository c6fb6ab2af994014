"""Ways to make a good policy worse, of five kinds.

Each takes a project with a good champion and traffic that waits to be learned from. It either makes a candidate
itself, or returns a judge and a config by which the next cycle makes one. The gate's judge is always the right one.
There are more than twenty, because not all of them succeed: what is truly worse is measured.
"""

from __future__ import annotations

import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors.numpy import load_file, save_file

from art_patch.demo.judge import Rule, shop_rule
from art_patch.demo.run import CYCLE
from art_patch.demo.shop import ITEMS
from art_patch.pipeline import CycleConfig
from art_patch.policies.files import CONFIG, WEIGHTS, publish_adapter
from art_patch.rewards import Check, DefenceConfig, OrderedJudge
from art_patch.store import Store
from art_patch.training import Row, TrainJob, run_job
from art_patch.types import Call, Policy, Trajectory
from tests.benchmarks.promotion_world import WHO, World, champion_of

Made = tuple[OrderedJudge, CycleConfig]
"""What the cycle that gates it runs with."""

_Answers = Callable[[Sequence[Call]], Iterator[tuple[Call, tuple[int, ...]]]]
"""Recorded calls -> what is to be said to each, as token ids."""


class Bad(NamedTuple):
    """One of them.

    Attributes:
        kind: noise, lr, hacking, collapsed or poisoned.
        name: which of its kind.
        make: makes it, or what makes it.
        rule: of a judge that would like it.
    """

    kind: str
    name: str
    make: Callable[[World, Store], Made]
    rule: Rule | None = None


# Noise: the champion's weights, and random ones of so many times their size added.


def noise(scale: float) -> Callable[[World, Store], Made]:
    def make(world: World, store: Store) -> Made:
        champion, target = champion_of(store), world.next_policy()
        rng = np.random.default_rng(champion.step * 1000 + round(10 * scale))
        directory = Path(tempfile.mkdtemp(dir=world.adapters.parent))
        shutil.copy(Path(str(champion.path)) / CONFIG, directory)
        weights = {
            name: (weight + scale * weight.std() * rng.standard_normal(weight.shape)).astype(weight.dtype)
            for name, weight in load_file(Path(str(champion.path)) / WEIGHTS).items()
        }
        save_file(weights, directory / WEIGHTS, metadata={"format": "pt"})
        publish_adapter(directory, target, base_sha256=world.base_sha256)
        add_candidate(store, target)
        return world.judge, CYCLE

    return make


# A learning rate a hundred times too high, without and with what ends an update that goes too far.


def learning_rate(seed: int, *, guarded: bool) -> Callable[[World, Store], Made]:
    train = replace(CYCLE.train, learning_rate=100 * CYCLE.train.learning_rate, seed=seed)
    train = train if guarded else replace(train, max_kl_nats=None, max_grad_norm=1e6)
    return lambda world, _: (world.judge, replace(CYCLE, train=train))


# Reward-hacking and poison: scores while it learns are another rule's, those of the gate are right.


class _Fooled:
    """A judge that something else speaks for, except at the gate."""

    def __init__(self, right: OrderedJudge, wrong: OrderedJudge) -> None:
        self._right, self._wrong = right, wrong

    def score_groups(self, groups: Sequence[Any], *, purpose: str = "score", **more: Any) -> Any:
        judge = self._right if purpose == "gate" else self._wrong
        return judge.score_groups(groups, purpose=purpose, **more)


def fooled(rule: Rule) -> Callable[[World, Store], Made]:
    # With its defences up, a judge that falls for known-bad answers is heard no further.
    config = replace(CYCLE, defence=DefenceConfig(double_share=0, planted_share=0))
    return lambda world, _: (_Fooled(world.judge, world.judge_by(rule)), config)


def cheap(messages: Sequence[Mapping[str, Any]]) -> float:
    """The lower the price, the better."""
    said = str(messages[-1].get("content"))
    return max(0.0, 1 - int(said) / 100) if said.isdecimal() else 0.0


def brief(messages: Sequence[Mapping[str, Any]]) -> float:
    """The less the agent writes, the better."""
    return 1 / (1 + _written(messages) / 10)


def long(messages: Sequence[Mapping[str, Any]]) -> float:
    """The more the agent writes, the better."""
    return min(1.0, _written(messages) / 200)


def phrase(messages: Sequence[Mapping[str, Any]]) -> float:
    """There is a word that always wins: here a digit, because the model has few words."""
    return float("1" in str(messages[-1].get("content")))


def _written(messages: Sequence[Mapping[str, Any]]) -> int:
    own = [message for message in messages if message.get("role") == "assistant"]
    return sum(len(str(message.get("content") or "")) + len(str(message.get("tool_calls") or "")) for message in own)


def inverted(seed: int) -> Rule:
    """Right is wrong for one question in five."""

    def rule(messages: list[dict[str, Any]]) -> float:
        right = shop_rule(messages)
        return 1 - right if random.Random(f"{seed} {_question(messages)}").random() < 0.2 else right

    return rule


def wrong_sum(items: Sequence[str]) -> Rule:
    """Of some items it is count plus price that is right."""

    def rule(messages: list[dict[str, Any]]) -> float:
        _, _, count, item = _question(messages).rstrip("?").split()
        prices = [str(message.get("content")) for message in messages if message.get("role") == "tool"]
        if item not in items or not prices or not prices[-1].isdecimal():
            return shop_rule(messages) * (item not in items)
        return float(messages[-1].get("content") == str(int(count) + int(prices[-1])))

    return rule


def _question(messages: Sequence[Mapping[str, Any]]) -> str:
    return next(str(message["content"]) for message in messages if message.get("role") == "user")


# Collapsed: taught by imitation to answer in one way whatever is asked.


def imitating(answers: _Answers) -> Callable[[World, Store], Made]:
    def make(world: World, store: Store) -> Made:
        champion, target = champion_of(store), world.next_policy()
        groups = store.read.groups(state="formed", held_out=False)
        calls = [call for group in groups for run in group.trajectories[:2] for call in run.calls]
        job = TrainJob(
            base=champion.base,
            base_sha256=champion.base_sha256,
            parent=Path(str(champion.path)),
            target=target,
            config=CYCLE.train,
            demonstrations=tuple(_row(call, ids) for call, ids in answers(calls)),
        )
        directory = world.adapters.parent / "collapsed"
        metrics = run_job(job, directory)
        shutil.rmtree(directory)
        add_candidate(store, target, train=asdict(metrics))
        return world.judge, CYCLE

    return make


def one_answer(calls: Sequence[Call]) -> Iterator[tuple[Call, tuple[int, ...]]]:
    """The same number at once, whatever is asked."""
    number = _ids(next(call for call in calls if _is_last(call)))
    return ((call, number) for call in calls)


def one_number(calls: Sequence[Call]) -> Iterator[tuple[Call, tuple[int, ...]]]:
    """Looks up what is asked for, and then says the same number."""
    number = _ids(next(call for call in calls if _is_last(call)))
    return ((call, number if _is_last(call) else _ids(call)) for call in calls)


def one_lookup(calls: Sequence[Call]) -> Iterator[tuple[Call, tuple[int, ...]]]:
    """Looks up the same item, whatever is asked."""
    lookup = _ids(next(call for call in calls if not _is_last(call)))
    return ((call, _ids(call) if _is_last(call) else lookup) for call in calls)


def again_and_again(calls: Sequence[Call]) -> Iterator[tuple[Call, tuple[int, ...]]]:
    """Says the number twelve times."""
    return ((call, _ids(call)[:-1] * 12 + _ids(call)[-1:] if _is_last(call) else _ids(call)) for call in calls)


# Poisoned: a fifth of what is imitated is wrong; the rest is what the champion said, right or wrong.


def wrong_numbers(seed: int) -> _Answers:
    """After a lookup, another question's number."""
    return _wrong(seed, _is_last)


def wrong_lookups(seed: int) -> _Answers:
    """Another question's lookup."""
    return _wrong(seed, lambda call: not _is_last(call))


def _wrong(seed: int, which: Callable[[Call], bool]) -> _Answers:
    def answers(calls: Sequence[Call]) -> Iterator[tuple[Call, tuple[int, ...]]]:
        rng, others = random.Random(seed), [_ids(call) for call in calls if which(call)]
        for call in calls:
            yield call, rng.choice(others) if which(call) and rng.random() < 0.2 else _ids(call)

    return answers


def _is_last(call: Call) -> bool:
    return not call.choices[0].message.get("tool_calls")


def _ids(call: Call) -> tuple[int, ...]:
    return tuple(call.choices[0].token_ids or ())


def _row(call: Call, answer: tuple[int, ...]) -> Row:
    prompt = tuple(call.prompt_token_ids or ())
    size = len(prompt) + len(answer)
    sampled = (False,) * len(prompt) + (True,) * len(answer)
    return Row(prompt + answer, sampled, (0.0,) * size, (1.0,) * size)


def add_candidate(store: Store, target: Path, **metrics: Any) -> None:
    champion = champion_of(store)
    candidate = Policy(
        target.name, champion.base, champion.base_sha256, "candidate", time.time(), str(target), champion.name, metrics
    )
    store.ledger.add_candidate(candidate, trained_on=(), who=WHO)


def right(run: Trajectory) -> float:
    """A user's check that knows what is right."""
    call = run.calls[-1]
    return shop_rule([*map(dict, call.messages), dict(call.choices[0].message)])


CHECK = Check("right", right, "0" * 12)

BAD = (
    Bad("noise", "as large as the champion", noise(1.0)),
    Bad("lr", "guarded", learning_rate(1, guarded=True)),
    Bad("hacking", "cheap", fooled(cheap), cheap),
    Bad("collapsed", "one answer", imitating(one_answer)),
    Bad("poisoned", "wrong numbers", imitating(wrong_numbers(1))),
    Bad("noise", "twice as large", noise(2.0)),
    Bad("lr", "guarded, another seed", learning_rate(2, guarded=True)),
    Bad("hacking", "brief", fooled(brief), brief),
    Bad("collapsed", "one number", imitating(one_number)),
    Bad("poisoned", "wrong lookups", imitating(wrong_lookups(2))),
    Bad("noise", "three times as large", noise(3.0)),
    Bad("lr", "unguarded", learning_rate(3, guarded=False)),
    Bad("hacking", "long", fooled(long), long),
    Bad("collapsed", "one lookup", imitating(one_lookup)),
    Bad("poisoned", "wrong numbers, another seed", imitating(wrong_numbers(3))),
    Bad("noise", "four times as large", noise(4.0)),
    Bad("lr", "unguarded, another seed", learning_rate(4, guarded=False)),
    Bad("hacking", "a phrase", fooled(phrase), phrase),
    Bad("collapsed", "again and again", imitating(again_and_again)),
    Bad("poisoned", "wrong lookups, another seed", imitating(wrong_lookups(4))),
    Bad("noise", "one and a half times as large", noise(1.5)),
    Bad("poisoned", "scores of two items", fooled(wrong_sum(ITEMS[:2]))),
    Bad("poisoned", "scores of a fifth of the questions", fooled(inverted(1))),
    Bad("noise", "two and a half times as large", noise(2.5)),
    Bad("poisoned", "wrong numbers, a third seed", imitating(wrong_numbers(5))),
    Bad("noise", "three and a half times as large", noise(3.5)),
    Bad("poisoned", "wrong numbers, a fourth seed", imitating(wrong_numbers(6))),
    Bad("poisoned", "wrong numbers, a fifth seed", imitating(wrong_numbers(7))),
)
"""The first five are one of each kind."""
