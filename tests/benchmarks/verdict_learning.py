"""What updates learn from noise, and what a random gate costs: the learning part of `verdicts.py`.

- `signal_free_gradient`: upstream's answer is rewarded with 1.0 and seven of ours with .5 each. The sum of the absolute
  advantages that the whole path, from the store to the job of an update, gives these answers.
- `idle_kl_ratio`, `idle_gain_ratio`: a toy policy of 64 tasks with 12 answers each, half of them without signal: every
  answer is worth the same, and the judge adds noise of sd .02. After 12 cycles of 4 samples and upstream's answer, KL
  on tasks without signal, and gain of value on the others, each divided by that of the rule of commit a1849d9. The
  shipped loss, advantages and measured noise, the optimizer of `Learner` and the demo's learning rate, epochs and
  steps. `*_sgd_*`: plain gradient descent with 2 epochs of 8 steps, at two rates.
- `cycles_ratio` (with `--demo-seeds`): cycles until the demo's agent solves 80 % of unseen tasks, if half of all better
  candidates are rejected at random, divided by those of commit a1849d9, where their groups are lost. The demo's model,
  tasks and recipe, real engine, store and updates; the rewards are the demo's rule, and no agent program runs.
"""

from __future__ import annotations

import math
import random
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple, cast

import torch

from art_patch._lib.ids import new_id
from art_patch.demo.run import CYCLE, EVALUATION_TASKS, ROLLOUTS, SCENARIOS
from art_patch.demo.shop import TOOLS, Task, is_success, make_tasks, run_tool
from art_patch.demo.shop_model import build_model
from art_patch.pipeline import CycleConfig
from art_patch.pipeline.carry_over import marks
from art_patch.pipeline.cycle_run import Cycle
from art_patch.pipeline.score_groups import group, score
from art_patch.pipeline.train_policy import make_job, train
from art_patch.policies import base_fingerprint
from art_patch.promotion import promote, reject
from art_patch.rewards import noise_of_judges
from art_patch.rewards.defences.suspicion import noise
from art_patch.serving import EmbeddedEngine, EngineClient
from art_patch.store import Store, open_store
from art_patch.training import LossConfig, TrainConfig, advantages_of_groups
from art_patch.training.losses import LossInput, policy_loss
from art_patch.types import Call, Choice, Group, Judgement, Score, TrajectoryInfo
from tests.support.benchmark_report import Target, say
from tests.support.engines import serve
from tests.support.factory import make_call
from tests.support.tiny import make_tiny_model

TARGETS = (
    Target("signal_free_gradient", None, 0, "advantages of equal answers beside a better one of upstream, summed"),
    Target("idle_kl_ratio", None, 0.2, "drift on tasks without signal, against commit a1849d9"),
    Target("idle_gain_ratio", 1, None, "gain on tasks with signal, against commit a1849d9"),
    Target("cycles_ratio", None, 0.7, "cycles to .80 if half of the better candidates are rejected, against a1849d9"),
)

Advantages = list[tuple[float, ...] | None]


def old_rule(rewards: Sequence[Sequence[float]], upstream: Sequence[float], _noise: float) -> Advantages:
    """Advantages at commit a1849d9: upstream's answer is in the mean and in the group's standard deviation."""
    found: Advantages = []
    for ours, theirs in zip(rewards, upstream, strict=True):
        every = [*ours, theirs]
        mean = math.fsum(every) / len(every)
        spread = math.sqrt(math.fsum((one - mean) ** 2 for one in every) / (len(every) - 1))
        found.append(None if spread < 1e-6 else tuple((one - mean) / (spread + 1e-4) for one in ours))
    return found


def new_rule(rewards: Sequence[Sequence[float]], _upstream: Sequence[float], error: float) -> Advantages:
    """The shipped advantages, with the shipped defaults."""
    return list(advantages_of_groups(rewards, TrainConfig().advantage_scale, noise=[error] * len(rewards)))


# --- the whole path ---


def signal_free_gradient() -> float:
    """What an update would be given of upstream's 1.0 and seven times .5, beside a group with signal."""
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        make_tiny_model(place / "base")
        store = open_store(f"sqlite:///{place}/store.db")
        champion = store.ledger.add_base("agent@0", str(place / "base"), base_fingerprint(place / "base"), who="test")
        free: list[tuple[float, str | None]] = [(1.0, None), *[(0.5, "agent@0")] * 7]
        for name, values in (("free", free), ("signal", [(0.0, "agent@0"), (1.0, "agent@0")])):
            for n, (value, policy) in enumerate(values):
                run = f"{name}-{n}"
                call = make_call(run, trajectory_id=run, answer=(3, 4 + n), policy=policy)
                store.write([TrajectoryInfo(run, 1.0), call, Score(new_id(), run, "reward", value, "user", 1.0)])
            runs = store.read.trajectories([f"{name}-{n}" for n in range(len(values))])
            store.ledger.add_groups([Group(name, f"task:{name}", "same_task", runs)], state="scored")
        job = make_job(a_cycle(store, CycleConfig(), place), champion, store.read.groups(state="scored"), place / "a@1")
        store.close()
        assert job is not None and "signal" in job.group_ids
        return math.fsum(abs(s.example.advantage) for g in job.groups if g.id == "free" for s in g.siblings)


def a_cycle(store: Store, config: CycleConfig, place: Path, client: EngineClient | None = None) -> Cycle:
    """A cycle without a judge."""
    nobody = cast("Any", None)

    def quiet(stage: str, done: int, total: int, note: str = "") -> None:
        """Tell nothing."""

    return Cycle(store, nobody, config, quiet, 1e12, client or nobody, place / "adapters", "benchmark")


# --- the toy ---

TASKS, ANSWERS, SAMPLES, CYCLES, NOISE = 64, 12, 4, 12, 0.02


class Recipe(NamedTuple):
    """How the toy policy is optimised."""

    make: Callable[[Any], torch.optim.Optimizer]
    epochs: int
    steps: int  # of an epoch
    warm_up: int


DEMO = CYCLE.train
RECIPES = {
    "": Recipe(
        lambda weights: torch.optim.AdamW(weights, lr=DEMO.learning_rate, betas=(0.9, 0.95), weight_decay=0.0),
        DEMO.epochs, DEMO.minibatches, DEMO.warmup_steps,
    ),
    "_sgd_0.35": Recipe(lambda weights: torch.optim.SGD(weights, lr=0.35), 2, 8, 0),
    "_sgd_1.6": Recipe(lambda weights: torch.optim.SGD(weights, lr=1.6), 2, 8, 0),
}  # fmt: skip


def toy(rule: Callable[..., Advantages], recipe: Recipe, seed: int) -> tuple[float, float]:
    """KL from the first policy on tasks without signal, and gain of value on the others."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    values = torch.rand(TASKS, ANSWERS, generator=generator)
    values[: TASKS // 2] = 0.5
    weights = torch.randn(TASKS, ANSWERS, generator=generator).requires_grad_()
    first = weights.detach().log_softmax(-1)
    judged: list[Judgement] = []
    for _ in range(CYCLES):
        sampled = torch.multinomial(weights.detach().softmax(-1), SAMPLES, replacement=True, generator=generator)
        old = weights.detach().log_softmax(-1).gather(1, sampled)

        def judge(truth: list[float]) -> list[float]:
            return [value + rng.gauss(0, NOISE) for value in truth]

        truths = [[*values[task, sampled[task]].tolist(), 1.0] for task in range(TASKS)]  # the last one is upstream's
        rewards = [judge(truth) for truth in truths]
        for task in rng.sample(range(TASKS), math.ceil(CYCLE.defence.double_share * TASKS)):
            again = judge(truths[task])
            facts = {"noise": noise(rewards[task], again), "siblings": len(again)}
            judged.append(Judgement(new_id(), str(task), 1.0, "judge", "rubric", "second pass", "ok", facts=facts))
            rewards[task] = [(one + other) / 2 for one, other in zip(rewards[task], again, strict=True)]
        error = noise_of_judges(judged)["judge", "rubric"]
        advantages = rule([each[:-1] for each in rewards], [each[-1] for each in rewards], error)
        taught = [task for task in range(TASKS) if advantages[task] is not None]
        learn(weights, recipe, taught, sampled, old, advantages, rng)
    last, idle = weights.detach().log_softmax(-1), TASKS // 2
    kl = (first.exp() * (first - last)).sum(-1)[:idle].mean()
    gain = ((last.exp() - first.exp()) * values).sum(-1)[idle:].mean()
    return float(kl), float(gain)


def learn(
    weights: torch.Tensor, recipe: Recipe, taught: Sequence[int], sampled: torch.Tensor, old: torch.Tensor,
    advantages: Advantages, rng: random.Random,
) -> None:  # fmt: skip
    """One update with the shipped loss."""
    optimizer, done = recipe.make([weights]), 0
    steps = min(recipe.steps, len(taught))
    for _ in range(recipe.epochs):
        order = rng.sample(taught, len(taught))
        for step in range(steps):
            items = order[step * len(order) // steps : (step + 1) * len(order) // steps]
            old_N, tokens = old[items].flatten(), len(items) * SAMPLES
            loss, _ = policy_loss(
                LossInput(
                    logprob_N=weights[items].log_softmax(-1).gather(1, sampled[items]).flatten(),
                    old_N=old_N,
                    recorded_N=old_N,
                    advantage_N=torch.tensor([one for item in items for one in advantages[item] or ()]),
                    trajectory_N=torch.arange(tokens),
                    tokens_in_step=tokens,
                    trajectories_in_step=tokens,
                ),
                LossConfig(),
            )
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_([weights], 1.0)
            done += 1
            rate = min(1.0, done / (recipe.warm_up + 1))
            for each in optimizer.param_groups:
                each["lr"] = each.setdefault("peak", each["lr"]) * rate
            optimizer.step()


def idle(seeds: int) -> dict[str, float]:
    """Both rules under each recipe, on the same seeds."""
    metrics = dict[str, float]()
    for name, recipe in RECIPES.items():
        found = {rule: [toy(rule, recipe, seed) for seed in range(seeds)] for rule in (old_rule, new_rule)}
        kl, gain = ({rule: fmean(each[n] for each in found[rule]) for rule in found} for n in (0, 1))
        say(
            f"toy{name}: KL {kl[old_rule]:.5f} -> {kl[new_rule]:.5f}, gain {gain[old_rule]:.4f} -> {gain[new_rule]:.4f}"
        )
        metrics[f"idle_kl_ratio{name}"] = kl[new_rule] / kl[old_rule]
        metrics[f"idle_gain_ratio{name}"] = gain[new_rule] / gain[old_rule]
    return metrics


# --- the demo's world ---

ENOUGH, MOST_CYCLES = 0.8, 12


class World:
    """The demo's model behind a real engine, and a store; the agent's loop runs here, and each run has its reward."""

    def __init__(self, place: Path, client: EngineClient, base: Path, seed: int, config: CycleConfig) -> None:
        self.store, self.client, self.seed, self.config, self.place = (
            open_store(f"sqlite:///{place}/store.db"), client, seed, config, place,
        )  # fmt: skip
        self.store.ledger.add_base("agent@0", str(base), base_fingerprint(base), who="test")

    def play(self, policy: str, task: Task, times: int) -> list[list[Any]]:
        """Ask one question; return the records of each run, the last one its reward."""
        asked = {"model": policy, "tools": TOOLS, "max_tokens": 64, "logprobs": True, "return_token_ids": True}
        first = self.client.chat(messages=task.messages, n=times, **asked)
        runs: list[list[Any]] = []
        for choice in first["choices"]:
            key, answer = new_id(), choice["message"]
            calls, said = [self.call(key, policy, task.messages, first, choice)], [*task.messages, answer]
            if tools := answer.get("tool_calls"):
                result = run_tool(task, tools[0]["function"]["name"], tools[0]["function"]["arguments"])
                said.append({"role": "tool", "tool_call_id": tools[0]["id"], "content": result})
                second = self.client.chat(messages=said, **asked)
                calls.append(self.call(key, policy, said, second, second["choices"][0]))
                said = [*said, second["choices"][0]["message"]]
            value = float(is_success(task, said))
            runs.append([TrajectoryInfo(key, 1.0), *calls, Score(new_id(), key, "reward", value, "code", 1.0)])
        return runs

    def call(self, run: str, policy: str, messages: Sequence[Any], answer: Any, choice: Any) -> Call:
        """One call as the patch records it."""
        logprobs = tuple(token["logprob"] for token in choice["logprobs"]["content"])
        only = Choice(0, choice["message"], choice["finish_reason"], tuple(choice["token_ids"]), logprobs)
        return Call(
            id=new_id(), trajectory_id=run, started_at=1.0, requested_model="m", messages=tuple(messages),
            choices=(only,), params={"max_tokens": 64}, tools=tuple(TOOLS), policy=policy,
            prompt_token_ids=tuple(answer["prompt_token_ids"]),
        )  # fmt: skip

    def success(self, policy: str) -> float:
        """Sampled success on questions that traffic never asks."""
        return fmean(run[-1].value for run in self.ask(policy, make_tasks("evaluation", EVALUATION_TASKS, seed=1), 2))

    def ask(self, policy: str, tasks: Sequence[Task], times: int) -> list[list[Any]]:
        """The records of all runs."""
        with ThreadPoolExecutor(8) as pool:
            return [run for runs in pool.map(lambda task: self.play(policy, task, times), tasks) for run in runs]

    def cycles(self, gives_back: bool) -> int:
        """How many cycles it takes to `ENOUGH`."""
        ledger, rng, best = self.store.ledger, random.Random(self.seed), self.success("agent@0")
        for number in range(1, MOST_CYCLES + 1):
            passes = rng.random() < 0.5
            champion = ledger.champion()
            assert champion is not None
            tasks = make_tasks("traffic", SCENARIOS, seed=self.seed * 1_000 + number)
            self.store.write([record for run in self.ask(champion.name, tasks, ROLLOUTS) for record in run])
            cycle = a_cycle(self.store, self.config, self.place, self.client)
            group(cycle)
            score(cycle)
            candidate, why = train(cycle, champion)
            assert candidate is not None, why
            self.client.load(candidate.name)
            reached = self.success(candidate.name)
            took = set(self.store.read.group_ids(state="trained"))
            if reached > best and passes:
                promote(ledger, self.client, candidate.name, who="benchmark", reason="better")
                best = reached
            else:
                # What a gate says of one that seems better.
                gate = {"gate": marks(candidate)} if gives_back and reached > best else {}
                reject(
                    ledger, self.client, candidate.name, who="benchmark", reason="chance, or not better", metrics=gate
                )
                if not gives_back:
                    lost = took - set(self.store.read.group_ids(state="trained"))
                    ledger.set_groups(sorted(lost), "trained", reason="lost", policy=candidate.name)
            say(f"  {number}: {len(took)} groups, {reached:.3f}, {'passes' if passes else 'rejected'}, best {best:.3f}")
            if best >= ENOUGH:
                return number
        return MOST_CYCLES + 1


def cycles_ratio(seeds: Sequence[int], home: Path) -> dict[str, float]:
    """Both ways on the same seeds, with the same luck."""
    # What a1849d9 shipped, but for the lost groups.
    old = replace(
        CYCLE,
        train=replace(CYCLE.train, advantage_scale="group", max_kl_nats=1.0, max_clip_fraction=None, start="champion"),
    )
    found: dict[str, list[int]] = {"old": [], "new": []}
    for seed in seeds:
        base = build_model(home / f"shop-{seed}", seed=seed)
        for name, config in (("new", CYCLE), ("old", old)):
            with tempfile.TemporaryDirectory() as directory:
                place = Path(directory)
                with serve(EmbeddedEngine.from_pretrained(base, adapters_root=place / "adapters")) as running:
                    world = World(place, running.client, base, seed, config)
                    found[name].append(world.cycles(gives_back=name == "new"))
                    world.store.close()
            say(f"seed {seed}, {name}: {found[name][-1]} cycles")
    return {
        "cycles_ratio": fmean(found["new"]) / fmean(found["old"]),
        "cycles_mean": fmean(found["new"]),
        "cycles_mean_a1849d9": fmean(found["old"]),
    }


def learning(toy_seeds: int, demo_seeds: Sequence[int], home: Path | None = None) -> dict[str, float]:
    """Everything that is asked for."""
    torch.set_num_threads(1)
    metrics = {"signal_free_gradient": signal_free_gradient(), **idle(toy_seeds)}
    if demo_seeds:
        with tempfile.TemporaryDirectory() as directory:
            metrics |= cycles_ratio(demo_seeds, home or Path(directory))
    return metrics
