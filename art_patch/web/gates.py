"""What a page shows of a gate: its numbers, the ends of the pictures' scale, and the answers to held-out prompts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from art_patch import gate as gate_test
from art_patch import insights
from art_patch._lib.loose_json import as_object
from art_patch.store import GateTurn, Store
from art_patch.types import JSON
from art_patch.web.word_diff import compared

Number = Annotated[float, Field(allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0, lt=1 << 53)]

_M = TypeVar("_M", bound=BaseModel)

_LEAST_SCALE = 0.05
_MOST_SHOWN = 8  # held-out scenarios that were lost, and won
_MOST_TURNS = 2  # of a scenario


def readable(model: type[_M], value: Any) -> tuple[_M, list[str]]:
    """Return a model whose fields all have defaults, and the names of the fields of `value` that could not be read.

    `value` is JSON that somebody may have damaged.
    """
    # What is no finite number was not measured.
    its = {name: each for name, each in as_object(value).items() if not isinstance(each, float) or math.isfinite(each)}
    try:
        return model.model_validate(its, strict=True), []
    except ValidationError as error:
        unread = sorted({str(each["loc"][0]) for each in error.errors()})
        rest = {name: each for name, each in its.items() if name not in unread}
        return model.model_validate(rest, strict=True), unread


class _Part(BaseModel):
    model_config = ConfigDict(extra="allow")


class _Gain(_Part):
    name: str
    mean: Number
    low: Number
    high: Number
    count: Count
    unit: str = ""


class _Check(_Part):
    passed: bool
    words: str


class _Result(_Part):
    group: str
    candidate: Number
    champion: Number


class _Config(_Part):
    margin: Number = 0.0


class _Gate(BaseModel):
    """What a gate notes, as far as pages show it. A gate that stopped early has not measured all of it."""

    candidate: Number | None = None
    champion: Number | None = None
    difference: Number | None = None
    lower_bound: Number | None = None
    scenarios: Count | None = None
    users: Count | None = None
    more_needed: Count | None = None
    judge: str | None = None
    rubric: str | None = None
    against: str | None = None  # a policy, or `upstream`
    reruns: dict[str, Any] | None = None
    gains: list[_Gain] = Field(default_factory=list[_Gain])
    checks: list[_Check] = Field(default_factory=list[_Check])
    ruined: list[str] = Field(default_factory=list[str])
    results: list[_Result] | None = None
    left: dict[str, Count] = Field(default_factory=dict[str, Count])
    config: _Config = Field(default_factory=_Config)


def gate_facts(gate: Any) -> JSON | None:
    """Return what a page shows of a gate's metrics, and what of them is `unread`; `None` without a gate.

    A gate that stopped early has compared nothing: its `difference` is `None`.
    """
    if not gate:
        return None
    found, unread = readable(_Gate, gate)
    its = found.model_dump(exclude={"lower_bound", "config"})
    bound, margin = found.lower_bound, found.config.margin
    if None in (found.difference, bound, found.candidate, found.champion):
        its["difference"] = None
    low = high = its["difference"]
    if low is not None and bound is not None:
        judge = found.gains[0] if found.gains else None
        low, high = min(judge.low if judge else bound, bound), max(judge.high if judge else low, low)
    return its | {
        "words": insights.gate_in_words(found.model_dump(exclude_none=True)),
        "bound": bound,
        "low": low,
        "high": high,
        "margin": margin,
        "proven": bound is not None and bound > margin + gate_test.TIE,
        "reruns": bool(found.reruns),
        "unread": unread if isinstance(gate, dict) else ["all of it"],
    }


def prompts(policy: str, gate: JSON, opened: Store) -> JSON | None:
    """Return the held-out scenarios that a candidate lost and won most, with a run, its first words and both answers.

    `None` if the gate's release did not keep the results of single scenarios. A scenario has no `turns` if that release
    did not keep answers (`answers_kept`), if their run was erased since, or if the gate repeated whole runs of it.
    """
    if gate["results"] is None:
        return None
    by_loss = [each | {"difference": each["candidate"] - each["champion"]} for each in gate["results"]]
    lost = [each for each in by_loss if each["difference"] < -gate_test.TIE]
    won = [each for each in by_loss if each["difference"] > gate_test.TIE][::-1]
    shown = {"lost": lost[:_MOST_SHOWN], "won": won[:_MOST_SHOWN]}
    groups = [each["group"] for its in shown.values() for each in its]
    runs = {key: found[0].runs[:1] for key in groups if (found := opened.browse.groups_like(key, limit=1))}
    keys = [run for its in runs.values() for run in its]
    openings = {each.id: each.opening for each in opened.browse.summaries(keys, openings=True)}

    against = gate["against"]
    answers = {} if against is None else opened.gate_answers.of(policy, against, groups)

    def with_run(each: JSON) -> JSON:
        run = next(iter(runs.get(each["group"], ())), None)
        turns = answers.get(each["group"], [])
        return {
            **each,
            "run": run if run in openings else None,
            "opening": openings.get(run or ""),
            "turns": list(map(_turn, turns[:_MOST_TURNS])),
            "turns_cut": max(0, len(turns) - _MOST_TURNS),
        }

    counts = {"lost": len(lost), "won": len(won), "even": len(by_loss) - len(lost) - len(won)}
    about = {"counts": counts, "against": against, "answers_kept": against is not None, "reruns": gate["reruns"]}
    return {name: [with_run(each) for each in its] for name, its in shown.items()} | about


def _turn(turn: GateTurn) -> JSON:
    """Return one answer of each policy to a turn, with their words compared."""
    ours, theirs = _typical(turn.candidate), _typical(turn.champion)
    both = compared([ours["message"]] if ours else [], [theirs["message"]] if theirs else [])
    about = [
        {"of": len(its), "score": one and one["score"], "finish_reason": one and one["finish_reason"]}
        for its, one in ((turn.candidate, ours), (turn.champion, theirs))
    ]
    return {"run": turn.trajectory_id, "call": turn.call_id, "answers": about, "compared": both}


def _typical(answers: Sequence[JSON]) -> JSON | None:
    """Return the answer whose score is nearest to the mean of all; without scores the first one."""
    scores = [each["score"] for each in answers if each["score"] is not None]
    if not scores:
        return answers[0] if answers else None
    mean = fmean(scores)
    return min(answers, key=lambda each: math.inf if each["score"] is None else abs(each["score"] - mean))


def scale_of(gates: Iterable[JSON | None]) -> float:
    """Return where the scale of all these gates' pictures ends, on both sides of 0."""
    ends = [abs(gate[end]) for gate in gates if gate and gate["difference"] is not None for end in ("low", "high")]
    return max(_LEAST_SCALE, *ends) if ends else _LEAST_SCALE
