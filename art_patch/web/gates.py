"""What a page shows of a gate: its numbers, the ends of the pictures' scale, and the answers to held-out prompts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any

from art_patch import gate as gate_test
from art_patch import insights
from art_patch.store import GateTurn, Store
from art_patch.types import JSON
from art_patch.web.word_diff import compared

_LEAST_SCALE = 0.05
_MOST_SHOWN = 8  # held-out scenarios that were lost, and won
_MOST_TURNS = 2  # of a scenario


def gate_facts(gate: Any) -> JSON | None:
    """Return what a page shows of a gate's metrics; `None` without a gate.

    A gate that stopped early has compared nothing: its `difference` is `None`.
    """
    its: dict[str, Any] = dict(gate) if isinstance(gate, dict) else {}
    if not its:
        return None
    gains: list[JSON] = [dict(each) for each in its.get("gains") or ()]
    difference, bound = _number(its.get("difference")), _number(its.get("lower_bound"))
    low = high = None
    if difference is not None and bound is not None:
        judge = gains[0] if gains else {}
        low, high = min(judge.get("low", bound), bound), max(judge.get("high", difference), difference)
    margin = float((its.get("config") or {}).get("margin", 0.0))
    return {
        "words": insights.gate_in_words(its),
        "difference": difference if low is not None else None,
        "bound": bound,
        "low": low,
        "high": high,
        "margin": margin,
        "proven": bound is not None and bound > margin + gate_test.TIE,
        **{name: its.get(name) for name in ("candidate", "champion", "scenarios", "users", "judge", "rubric")},
        "gains": gains,
        "checks": [dict(each) for each in its.get("checks") or ()],
        "ruined": [str(key) for key in its.get("ruined") or ()],
        "results": [dict(each) for each in its["results"]] if "results" in its else None,
        "against": its.get("against"),  # a policy, or `upstream`
        "reruns": bool(its.get("reruns")),
        "more_needed": its.get("more_needed"),
        "left": dict(its.get("left") or {}),
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


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None
