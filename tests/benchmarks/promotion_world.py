"""The demo's shop for many policies at once: one engine, and a project of its own for each of them.

All projects share the engine and the directory of adapters that it serves, so one model is loaded once. What is
recorded, scored and decided is in a project's own store, and copies of a store see the same traffic. Everything between
is the demo's: the agent in a process of its own, the recorder, RULER over HTTP with a stand-in for the judge's opinion.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from functools import cached_property, partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

from art_patch.demo.judge import STAND_IN_MODEL, Rule, serve_stand_in_judge, shop_rule
from art_patch.demo.processes import NO_UPSTREAM, Agent, Engine, Program, agent_source
from art_patch.demo.run import CYCLE, EVALUATION_TASKS, ROLLOUTS, SCENARIOS
from art_patch.demo.shop import TOOLS, Task, is_success, make_tasks
from art_patch.pipeline import CycleConfig, CycleReport, retrain
from art_patch.policies import read_base_model
from art_patch.promotion import ensure_loaded
from art_patch.rewards import Judge, OrderedJudge, load_rubric
from art_patch.serving import EngineClient
from art_patch.settings import Settings, load_settings
from art_patch.store import Store, open_store, sqlite_path
from art_patch.types import Policy

WHO = "benchmark"
SAMPLES = 16
"""Answers to each turn of each question that no traffic asks; `EVALUATION_TASKS` of them make errors of about .01."""

_CONCURRENCY = 16


class Success(NamedTuple):
    """How often a policy is right on questions that no traffic asks, by the shop's exact rule.

    Attributes:
        sampled: the chance to be right, for each question.
        greedy: share of the questions.
    """

    sampled: tuple[float, ...]
    greedy: float

    @property
    def mean(self) -> float:
        """Over all questions."""
        return fmean(self.sampled)

    def above(self, other: Success) -> float:
        """How much better than another, in standard errors of the difference on the same questions."""
        differences = [ours - theirs for ours, theirs in zip(self.sampled, other.sampled, strict=True)]
        error = stdev(differences) / len(differences) ** 0.5
        return fmean(differences) / error if error else 0.0


class World:
    """The engine, the judge, and projects."""

    def __init__(self, home: Path, base: Path, stack: ExitStack) -> None:
        """Start them; they end with `stack`."""
        self._home, self._stack = home, stack
        self._base = read_base_model(base)
        self.adapters = self._settings("engine").adapters
        self.adapters.mkdir(parents=True)
        engine = stack.enter_context(Engine(base, home, "engine", home / "engine.log"))
        self._url, self._first = engine.base_url, engine.champion
        self.client = stack.enter_context(EngineClient.of_project(self._settings("engine"), engine.base_url, None))

    @property
    def base_sha256(self) -> str:
        """Fingerprint of the base model."""
        return self._base.sha256

    @cached_property
    def judge(self) -> OrderedJudge:
        """The stand-in with the rule that is right."""
        return self.judge_by(shop_rule)

    def judge_by(self, rule: Rule) -> OrderedJudge:
        """A judge whose opinion is another rule's."""
        url = self._stack.enter_context(serve_stand_in_judge(rule))
        return Judge(STAND_IN_MODEL, base_url=url, api_key="none", rubric=load_rubric(None), max_siblings=64)

    def project(self, name: str) -> Store:
        """A new project that is served the base model."""
        store = self._open(name)
        store.ledger.add_base(self._first, str(self._base.directory.absolute()), self.base_sha256, who=WHO)
        store.ledger.set_engine(self._url, who=WHO)
        return store

    def copy(self, of: str, name: str) -> Store:
        """Another project with all that one has."""
        source, target = (sqlite_path(self._settings(each).store_url) for each in (of, name))
        target.parent.mkdir(parents=True)
        with closing(sqlite3.connect(source)) as old, closing(sqlite3.connect(target)) as new:
            old.backup(new)
        return self._open(name)

    def traffic(self, name: str, store: Store, *, seed: int) -> None:
        """Let the patched agent answer one cycle's questions, as the demo does."""
        tasks = [task for task in make_tasks("traffic", SCENARIOS, seed=seed) for _ in range(ROLLOUTS)]
        directory = self._settings(name).directory
        ours = {"OPENAI_BASE_URL": NO_UPSTREAM, "ART_PATCH_HOME": str(self._home), "ART_PATCH_PROJECT": name}
        before = store.read.counts()["calls"]
        with Agent(Program(agent_source()), directory / "agent.py", ours, directory / "agent.log") as agent:
            results = agent.ask({"question": task.question, "prices": dict(task.prices)} for task in tasks)
            made = sum(message["role"] == "assistant" for result in results for message in result["messages"])
            deadline = time.monotonic() + 60
            while store.read.counts()["calls"] < before + made:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"not all of {made} calls were recorded; see {directory}/agent.log")
                time.sleep(0.1)
        time.sleep(CYCLE.settle_s)

    def cycle(self, store: Store, judge: OrderedJudge, config: CycleConfig) -> CycleReport:
        """One cycle: a candidate that waits is gated, else one is trained first."""
        return retrain(store, self.client, judge, self.adapters, config, who=WHO, progress=lambda *_: None)

    def success(self, policy: str) -> Success:
        """Measure a policy, whoever serves."""
        ensure_loaded(self.client, policy)
        tasks = make_tasks("evaluation", EVALUATION_TASKS, seed=0)
        with ThreadPoolExecutor(_CONCURRENCY) as pool:
            sampled = tuple(pool.map(partial(self._chance, policy, SAMPLES, 1.0), tasks))
            greedy = fmean(pool.map(partial(self._chance, policy, 1, 0.0), tasks))
        return Success(sampled, greedy)

    def _chance(self, policy: str, samples: int, temperature: float, task: Task) -> float:
        """The chance to look up the right thing, times that to say the right thing afterwards."""
        ask: Callable[[Sequence[Any]], list[dict[str, Any]]] = lambda messages: [  # noqa: E731
            choice["message"]
            for choice in self.client.chat(
                model=policy, messages=list(messages), tools=TOOLS, n=samples, temperature=temperature,
                max_completion_tokens=64,
            )["choices"]
        ]  # fmt: skip
        price, right = str(task.prices[task.item]), {"role": "assistant", "content": task.answer}
        asked = [
            [*task.messages, called, {"role": "tool", "tool_call_id": called["tool_calls"][0]["id"], "content": price}]
            for called in ask(task.messages)
            if called.get("tool_calls")
        ]
        looked_up = [messages for messages in asked if is_success(task, [*messages, right])]
        if not looked_up:
            return 0.0
        said = ask(looked_up[0])
        chance = fmean(is_success(task, [*looked_up[0], answer]) for answer in said)
        return chance * len(looked_up) / samples

    def next_policy(self) -> Path:
        """Where a policy that no cycle makes is to be published."""
        steps = [int(path.name.rpartition("@")[2]) for path in self.adapters.glob("*@*")]
        return self.adapters / f"{self._first.rpartition('@')[0]}@{max(steps, default=0) + 1}"

    def _settings(self, name: str) -> Settings:
        return load_settings(home=self._home, project=name)

    def _open(self, name: str) -> Store:
        self._settings(name).directory.mkdir(parents=True, exist_ok=True)
        store = open_store(self._settings(name).store_url)
        self._stack.callback(store.close)
        return store


def champion_of(store: Store) -> Policy:
    """Who serves."""
    champion = store.ledger.champion()
    assert champion is not None
    return champion
