"""Two policies before the gate: an engine that answers by rule, and a judge that scores by rule, in any order."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from art_patch._lib.ids import new_id
from art_patch.rewards import JudgeReport
from art_patch.rewards.judge.question import make_question
from art_patch.store import Store
from art_patch.types import Call, Choice, Group, Judgement, Policy, Score, Trajectory, TrajectoryInfo

CHAMPION = Policy("agent@0", "base", "0" * 64, "champion", 1.0)

CANDIDATE = Policy("agent@1", "base", "0" * 64, "candidate", 2.0, path="/none", parent="agent@0")

COUNT = 10

Says = Callable[[str, str, int], str]
"""Policy, question, number of the answer -> the answer."""

Rates = Callable[[str, int], float]
"""Answer, its place in the question -> score."""


class RuledEngine:
    """Answers by a rule; every policy is loaded."""

    def __init__(self, says: Says) -> None:
        self.says = says

    def models(self) -> list[str]:
        return ["agent@0", "agent@1"]

    def chat(self, **body: Any) -> dict[str, Any]:
        question = body["messages"][-1]["content"]
        choices = [self._choice(n, self.says(body["model"], question, n)) for n in range(body.get("n", 1))]
        return {"model": body["model"], "prompt_token_ids": [1], "choices": choices, "usage": {}}

    @staticmethod
    def _choice(index: int, text: str) -> dict[str, Any]:
        message = {"role": "assistant", "content": text}
        tokens = [{"logprob": -0.5}, {"logprob": -0.5}]
        return {
            "index": index, "message": message, "finish_reason": "stop", "token_ids": [1, 2],
            "logprobs": {"content": tokens},
        }  # fmt: skip


class RuledJudge:
    """Scores by a rule that may look at the place; leaves groups out that it is told to."""

    def __init__(self, rates: Rates, *, skips: Callable[[Group, str], bool] = lambda group, order: False) -> None:
        self.rates, self.skips, self.asked = rates, skips, list[tuple[str, str]]()

    def score_groups(self, groups: Sequence[Group], *, order: str = "shuffled", **how: Any) -> JudgeReport:
        scores: list[Score] = []
        judgements: list[Judgement] = []
        unscored: dict[str, str] = {}
        for group in groups:
            self.asked.append((order, how["purpose"]))
            if self.skips(group, order):
                unscored[group.id] = "left out"
                continue
            question = make_question(group).turned(order)  # type: ignore[arg-type]
            for place, attempt in enumerate(question.attempts):
                value = self.rates(json.loads(attempt.lines[-1])["content"], place)
                members = attempt.members
                scores += [Score(new_id(), key, "ruler", value, "ruler", 1.0, group_id=group.id) for key in members]
            judgements.append(Judgement(new_id(), group.id, 1.0, "ruled", "r1", "gate", "ok", calls=1))
        return JudgeReport(tuple(scores), unscored, tuple(judgements), calls=len(groups), cost_usd=None)


def traffic(store: Store, n: int, *, user: str | None = None, at: float = 1.0) -> None:
    key = new_id()
    message = {"role": "assistant", "content": "recorded"}
    call = Call(
        new_id(), key, at, "m", ({"role": "user", "content": f"q{n}"},), (Choice(0, message, "stop", (1,), (-0.1,)),),
        policy="agent@0", prompt_token_ids=(1,),
    )  # fmt: skip
    info = TrajectoryInfo(key, at, "explicit", user_id=user, metadata={"n": n})
    store.write([info, call])
    store.ledger.add_groups([Group(new_id(), f"task:q{n}", "single", (Trajectory(info, (call,)),), held_out=True)])


def says(policy: str, question: str, number: int) -> str:
    return f"{'good' if policy == 'agent@1' else 'fair'} answer {number} to {question}"


def rates(answer: str, place: int) -> float:
    return 0.8 if answer.startswith("good") else 0.5


def failed(metrics: dict[str, Any]) -> list[str]:
    return [row["name"] for row in metrics["checks"] if not row["passed"]]
