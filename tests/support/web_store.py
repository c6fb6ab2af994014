"""A project that has something for every page: two weeks of a shop's agent, six policies, groups, scores and cycles.

Everything is made from a seed and a moment, and nothing was really answered or judged: it is for looking at.
"""

from __future__ import annotations

import json
import random
import struct
import time
from contextlib import closing
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as Decoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from art_patch._lib.ids import new_id
from art_patch.settings import Settings, load_settings
from art_patch.store import GateTurn, Store, open_store
from art_patch.types import (
    AppReport,
    Call,
    Choice,
    Group,
    Judgement,
    Policy,
    Score,
    SpanInfo,
    TrainedRow,
    Trajectory,
    TrajectoryInfo,
)

DAY_S = 86_400.0
ITEMS = ("plum", "pear", "melon", "grape", "lemon", "mango")
HISTORY = (  # policy, what it became, days ago, reward of its runs
    ("agent@0", "champion", 13.5, 0.35),
    ("agent@1", "champion", 11.4, 0.55),
    ("agent@2", "rejected", 9.4, 0.5),
    ("agent@3", "champion", 7.4, 0.72),
    ("agent@4", "rejected", 4.4, 0.7),
    ("agent@5", "champion", 2.4, 0.9),
    ("agent@6", "canary", 0.6, 0.93),
)
CALLED = '{{"name": "lookup", "arguments": {{"item": "{}"}}}}'
TOOL = {"type": "function", "function": {"name": "lookup", "parameters": {"type": "object"}}}


def make_project(
    home: Path,
    name: str = "shop",
    *,
    said: str = "",
    seed: int = 1,
    now: float | None = None,
    runs: int = 240,
    store: str | None = None,
) -> Settings:
    """Write the project, and return its settings. `said` stands in texts, as whoever talks to the agent may say it."""
    settings = load_settings(home=home, project=name, store=store)
    settings.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    now = time.time() if now is None else now
    base = home / "models" / "shop"
    _write_base(base)
    with closing(open_store(settings.store_url, project=name)) as opened:
        Shop(opened, random.Random(seed), now, said, base).write(runs)
        opened.search.extend(thorough=True)
    _cycles(settings.directory, now, said)
    return settings


class Shop:
    """Writes what happened."""

    def __init__(self, store: Store, rng: random.Random, now: float, said: str, base: Path) -> None:
        self.store, self.rng, self.now, self.said, self.base = store, rng, now, said, str(base)
        self.tokenizer = _tokenizer(base / "tokenizer.json")
        self.task = ("plum", 3, 4)
        self.worth: dict[str, float] = {}  # reward of a run
        self.canary: str | None = None

    def write(self, runs: int) -> None:
        """Write policies and runs in the order in which they came."""
        moments = sorted(self.now - 600 - self.rng.random() * 13.4 * DAY_S for _ in range(runs // 4))
        moments = [moment + 40.0 * number for moment in moments for number in range(4)]  # four users with one question
        policies = list(HISTORY)
        serving, groups = "agent@0", list[Group]()
        members: list[Trajectory] = []
        for moment in moments:
            while policies and self.now - policies[0][2] * DAY_S <= moment:
                serving = self._policy(*policies.pop(0), groups) or serving
                groups = []
            if not members:
                self.task = self.rng.choice(ITEMS), self.rng.randint(2, 9), self.rng.randint(2, 9)
            tested = self.canary is not None and self.rng.random() < 0.2
            members.append(self._run(moment, self.canary if tested and self.canary else serving))
            if len(members) == 4:
                groups.append(self._group(members, moment))
                members = []
        for left in policies:
            self._policy(*left, groups)
        told = {"art_patch": "0.1.0", "mode": "route", "queued": 0, "recorded": 2 * runs, "dropped": 0}
        self.store.write([AppReport("api-1:812", self.now - 4, told), AppReport("api-2:340", self.now - 9, told)])

    def _policy(self, name: str, state: str, days: float, worth: float, groups: list[Group]) -> str | None:
        """Enter a policy and its verdict; return it if it serves from now on."""
        ledger, at = self.store.ledger, self.now - days * DAY_S
        if name == "agent@0":
            ledger.add_base(name, self.base, "ab" * 32, who="serve", now=at)
            return name
        scored = [each for each in groups if not each.held_out]
        candidate = Policy(
            name,
            self.base,
            "ab" * 32,
            "candidate",
            at,
            path=f"/adapters/{name}",
            parent=_champion(ledger),
            metrics={"train": _train(self.rng, len(scored))},
        )
        rows = [
            TrainedRow(call.id, 0, run.id, group.id, self._advantage(run, group))
            for group in scored
            for run in group.trajectories
            for call in run.calls
        ]
        ledger.add_candidate(
            candidate, trained_on=[each.id for each in scored], rows=rows, who="cron (art-patch retrain)"
        )
        gain = 0.12 if state != "rejected" else -0.04
        gate = {
            "scenarios": 34,
            "turns": 34,
            "candidate": worth,
            "champion": worth - gain,
            "difference": gain,
            "lower_bound": gain - 0.05,
            "judge": "openai/gpt-5-mini",
            "rubric": "7f90c71e39ee",
            "judge_calls": 68,
            "against": candidate.parent,
            "results": self._held_out(candidate, [each for each in groups if each.held_out], gain),
        }
        words = (
            f"scores {worth:.3f} against {worth - gain:.3f} on 34 held-out scenarios, a difference of {gain:+.3f}; "
            + ("proven better" if gain > 0 else "not proven better")
            + ": if both were equal, a result like this comes up "
            + ("at most once in twenty times" if gain > 0 else "more than once in twenty times")
            + (f"; {self.said}" if self.said else "")
        )
        percent = 20.0 if state == "canary" else None
        became: Any = state
        ledger.move(
            name,
            became,
            who="cron (art-patch retrain)",
            reason=words,
            metrics={"gate": gate},
            percent=percent,
            now=at + 600,
        )
        self.canary = name if state == "canary" else None
        return name if state == "champion" else None

    def _held_out(self, candidate: Policy, groups: list[Group], gain: float) -> list[dict[str, Any]]:
        """Keep what both policies answered in the gate, and return their scores by scenario, the worst first."""
        rng = random.Random(candidate.name)
        turns, results = list[GateTurn](), list[dict[str, Any]]()
        for group in groups:
            theirs = round(rng.random(), 2)
            ours = round(min(1.0, max(0.0, theirs + gain + rng.gauss(0, 0.2))), 2)
            results.append({"group": group.id, "candidate": ours, "champion": theirs})
            (first, last) = group.trajectories[0].calls
            said = last.choices[0].message["content"]
            sides = [
                ({"message": {"role": "assistant", "content": text}, "finish_reason": "stop", "score": score},)
                for text, score in ((f"{said} Can I help you further? {self.said}".strip(), ours), (said, theirs))
            ]
            turns.append(GateTurn(last.id, first.trajectory_id, group.id, *sides))
        self.store.gate_answers.keep(candidate.name, candidate.parent or "upstream", turns)
        return sorted(results, key=lambda each: each["candidate"] - each["champion"])

    def _advantage(self, run: Trajectory, group: Group) -> float:
        values = [self.worth[each.id] for each in group.trajectories]
        return round((self.worth[run.id] - fmean(values)) / (pstdev(values) or 1.0), 3)

    def _run(self, at: float, serving: str) -> Trajectory:
        """One run: the model looks a price up, a sub-agent checks stock, and the model answers."""
        rng, key = self.rng, new_id()
        item, count, price = self.task
        by = None if rng.random() < 0.08 else serving
        worth = next(each[3] for each in HISTORY if each[0] == serving)
        right, failed = rng.random() < worth, rng.random() < 0.03
        question = {"role": "user", "content": f"What do {count} {item}s cost? {self.said}".strip()}
        system = {"role": "system", "content": "You are the assistant of a fruit shop. Look prices up."}
        asks = {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "call_1",
                    "type": "function",
                    "function": {"name": "lookup", "arguments": json.dumps({"item": item})},
                }
            ],
        }
        told = {"role": "tool", "tool_call_id": "call_1", "content": str(price)}
        answer = {"role": "assistant", "content": f"{count} {item}s cost {count * price + (0 if right else 1)}."}
        info = TrajectoryInfo(
            key,
            at,
            "explicit",
            name="shop",
            session_id=f"visit-{rng.randint(1, 90)}",
            user_id=f"user-{rng.randint(1, 40)}",
            scenario_key=f"{count} {item}s",
            tags=("shop", "eu") if rng.random() < 0.5 else ("shop",),
            error="the warehouse did not answer" if failed else None,
            ended_at=at + 1.6,
        )
        common: dict[str, Any] = {"trajectory_id": key, "requested_model": "gpt-5", "policy": by, "tools": (TOOL,)}
        if by is None:
            common |= {"untrainable": "answered by upstream", "answered_by": "gpt-5-2026-08-01"}

        def tokens(words: str) -> dict[str, Any]:
            if by is None:
                return {}
            ids = tuple(self.tokenizer.encode(words).ids)
            return {"token_ids": ids, "logprobs": tuple(-round(rng.expovariate(2), 4) for _ in ids)}

        span = SpanInfo(
            new_id(),
            key,
            "check stock",
            at + 0.4,
            ended_at=at + 0.8,
            kind="agent",
            attributes={"input": item, "output": "in stock"},
        )
        calls = [
            Call(
                id=new_id(),
                started_at=at,
                messages=(system, question),
                choices=(Choice(0, asks, "tool_calls", **tokens(CALLED.format(item))),),
                duration_ms=300 + rng.random() * 200,
                prompt_tokens=60,
                completion_tokens=12,
                **common,
            ),
            Call(
                id=new_id(),
                started_at=at + 0.9,
                messages=(system, question, asks, told),
                choices=(Choice(0, answer, "stop", **tokens(answer["content"])),),
                duration_ms=400 + rng.random() * 300,
                prompt_tokens=80,
                completion_tokens=15,
                **common,
            ),
        ]
        scores: list[Score] = []
        if rng.random() < 0.6:
            scores.append(Score(new_id(), key, "reward", float(right), "code", at + 5, comment=self.said or None))
            self.worth[key] = float(right)
        if rng.random() < 0.2:
            scores.append(
                Score(
                    new_id(),
                    key,
                    "thumbs",
                    float(right),
                    "user",
                    at + 60,
                    comment=self.said or ("that helped" if right else "the sum is wrong"),
                )
            )
        self.store.write([info, span, *calls, *scores])
        return Trajectory(info, tuple(calls), tuple(scores), (span,))

    def _group(self, members: list[Trajectory], at: float) -> Group:
        number = self.rng.random()
        judged = {run.id: round(self.rng.random(), 2) for run in members}
        self.worth = judged | self.worth
        group = Group(new_id(), members[0].info.scenario_key or "", "same_task", tuple(members), held_out=number < 0.15)
        self.store.ledger.add_groups([group], now=at)
        if group.held_out or number > 0.92:
            return group
        scores = [
            Score(
                new_id(),
                run.id,
                "ruler",
                judged[run.id],
                "ruler",
                at + 900,
                group_id=group.id,
                rubric="7f90c71e39ee",
                judge="openai/gpt-5-mini",
                comment=f"Looks the price up and multiplies. {self.said}".strip(),
            )
            for run in members
        ]
        self.store.write(scores)
        facts = {"noise": 0.04, "siblings": 4} if number < 0.3 else {}
        self.store.ledger.add_judgement(
            Judgement(
                new_id(),
                group.id,
                at + 900,
                "openai/gpt-5-mini",
                "7f90c71e39ee",
                "score",
                "ok",
                calls=2,
                prompt_tokens=900,
                completion_tokens=120,
                cost_usd=0.0021,
                facts=facts,
            )
        )
        state, why = ("scored", None)
        if len({self.worth[run.id] for run in members}) == 1:
            state, why = "dead", "all siblings that are trained were scored alike"
        elif number > 0.8:
            state, why = "quarantined", "the judge's order flips when the siblings are shown in another one"
        self.store.ledger.set_groups([group.id], state, reason=why)
        return group


def _write_base(directory: Path) -> None:
    """Write the files that every base model has, with one weight."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text("{}")
    (directory / "chat_template.jinja").write_text("{{ messages[-1].content }}")
    name = "model.layers.0.self_attn.q_proj.weight"
    header = json.dumps({name: {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}}).encode()
    (directory / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(16))


def _tokenizer(path: Path) -> Tokenizer:
    """A small one of its own, for the texts of tokens."""
    made = Tokenizer(BPE())
    made.pre_tokenizer, made.decoder = ByteLevel(add_prefix_space=False), Decoder()  # type: ignore[assignment]
    texts = [f"{CALLED.format(item)} 3 {item}s cost 12." for item in ITEMS]
    made.train_from_iterator(
        texts, BpeTrainer(vocab_size=400, initial_alphabet=ByteLevel.alphabet(), show_progress=False)
    )
    made.save(str(path))
    return made


def _champion(ledger: Any) -> str | None:
    champion = ledger.champion()
    return champion.name if champion else None


def _train(rng: random.Random, groups: int) -> dict[str, Any]:
    steps = [
        {
            "phase": "groups",
            "epoch": 0,
            "loss": round(-0.1 - 0.01 * n + rng.gauss(0, 0.01), 4),
            "kl_nats": round(0.004 * n, 4),
            "entropy_nats": round(0.4 - 0.006 * n, 4),
            "clip_fraction": round(0.002 * n, 4),
            "grad_norm": round(0.2 + rng.random() * 0.05, 4),
            "tokens": 3_000,
            "tokens_per_s": 9_000 + rng.randint(-500, 500),
            "seconds": 0.3,
        }
        for n in range(24)
    ]
    return {
        "groups": groups,
        "mean_reward": 0.6,
        "trained_rows": 8 * groups,
        "tokens": 70_000,
        "steps": 24,
        "loss": -0.31,
        "kl_nats": 0.09,
        "entropy_nats": 0.26,
        "clip_fraction": 0.05,
        "grad_norm": 0.21,
        "tokens_per_s": 9_000,
        "took_s": 42.0,
        "history": steps,
        "config": {"seed": 1},
    }


def _cycles(directory: Path, now: float, said: str) -> None:
    """Write the reports that the cycles of `HISTORY` would have left."""
    folder = directory / "cycles"
    folder.mkdir(mode=0o700, exist_ok=True)
    rng = random.Random(2)
    for name, state, days, worth in HISTORY[1:]:
        began = now - days * DAY_S
        outcome = {"champion": "promoted", "rejected": "rejected", "canary": "canary"}[state]
        gain = 0.12 if state != "rejected" else -0.04
        facts = {
            "outcome": outcome,
            "champion": "agent@5",
            "candidate": name,
            "began_at": began,
            "took_s": 420.0,
            "who": "cron (art-patch retrain)",
            "reason": f"scores {worth:.3f} against {worth - gain:.3f} on 34 held-out scenarios; {said or 'by night'}",
            "stages_s": {
                "group": 3.0,
                "score": 130.0,
                "train": 80.0,
                "gate: answers": 120.0,
                "gate: judge": 85.0,
                "promote": 2.0,
            },
            "metrics": {
                "group": {"trajectories": 40, "groups": 10, "held_out": 2},
                "score": {"groups": 10, "unscored": 0, "calls": 20, "cost_usd": 0.04},
                "train": _train(rng, 10),
                "gate": {
                    "scenarios": 34,
                    "candidate": worth,
                    "champion": worth - gain,
                    "difference": gain,
                    "lower_bound": gain - 0.05,
                },
            },
        }
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(began))
        (folder / f"{stamp}-{name[-1] * 8}.json").write_text(json.dumps(facts))
        (folder / f"{stamp}-{name[-1] * 8}.md").write_text(f"# {outcome}\n")
    (directory / "retrain.log").write_text("cycle ended: promoted\n")
