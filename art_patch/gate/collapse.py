"""Checks whether the candidate's answers have become worse in ways that the judge's scores do not show.

A judge that ranks siblings does not notice a policy that gives every user the same answer, or one that has learned that
long answers win. These checks compare the answers of candidate and champion themselves.

- Shares of bad answers (empty, refused, malformed tool calls, cut off, repetitive) are tested for non-inferiority to
  the champion (`not_worse`), with the user as the unit.
- Length, latency, entropy, KL divergence, identical answers to different scenarios and failed runs have fixed limits.
  The observed values are compared with them, without a confidence bound.
- If the candidate gives fewer different answers to one prompt, this is reported and has no limit, because a policy that
  learns the right answer becomes more certain.
"""

import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, median
from typing import Any, cast

from art_patch.gate.paired_test import NO_USERS, CollapseConfig, Finding, GateConfig, not_worse
from art_patch.gate.turns import Answered, Given, Repeated, Turn
from art_patch.types import JSON, Choice

# Beginnings of answers that count as refusals: English only, after the list of Zou et al. (arXiv:2307.15043).
REFUSALS = (
    "i'm sorry, but i can", "i am sorry, but i can", "sorry, but i can", "i apologize, but i", "i can't", "i cannot",
    "i'm unable to", "i am unable to", "i'm not able to", "i am not able to", "i won't", "as an ai",
)  # fmt: skip


def collapse_findings(
    answers: Sequence[Answered], config: GateConfig, *, kl_nats: float | None = None, seed: int = 0,
    user_of: Mapping[str, str | None] = NO_USERS,
) -> tuple[Finding, ...]:  # fmt: skip
    """Run every check on both policies' answers to the same turns; return one finding for each check.

    `kl_nats` is the KL divergence per token that training measured, or `None`; `seed` draws the bounds' random subsets;
    `user_of` has the users of the scenarios.
    """
    limits = config.collapse
    if limits is None or not answers:
        return ()
    rows = [_share(name, answers, of, config, seed, user_of) for name, of in _SHARES]
    rows += [_different(answers), _same(answers, limits), _length(answers, limits)]
    rows += [row for row in (_latency(answers, limits), _entropy(answers, limits)) if row is not None]
    if kl_nats is not None:
        rows.append(_at_most("kl_nats", kl_nats, None, limits.max_kl_nats))
    return tuple(rows)


def failed_runs(repeated: Sequence[Repeated], config: GateConfig) -> tuple[Finding, ...]:
    """Check that the candidate's share of runs that end in an exception exceeds the champion's by at most `max_worse`.

    There is no confidence bound: runs are few, and it would reject a candidate for a single failure by chance.
    """
    if not repeated:
        return ()
    ours = fmean(run.info.error is not None for each in repeated for run in each.candidate)
    theirs = fmean(run.info.error is not None for each in repeated for run in each.champion)
    bound = theirs + config.max_worse
    words = f"failed runs {ours:.3g} against {theirs:.3g}; at most {bound:.3g} is allowed"
    return (Finding("failed runs", ours, theirs, bound, ours <= bound, words),)


def format_error(message: JSON, tools: Sequence[JSON]) -> str | None:
    """Return why a tool call is not executable (not offered, no JSON object, argument missing); `None` if all are."""
    offered = {str(tool.get("function", {}).get("name")): tool.get("function", {}) for tool in tools}
    for function in _called(message):
        name = str(function.get("name"))
        if name not in offered:
            return f"there is no tool {name!r}"
        try:
            arguments: Any = json.loads(str(function.get("arguments") or "{}"))
        except ValueError:
            return f"the arguments of {name} are no JSON"
        if not isinstance(arguments, dict):
            return f"the arguments of {name} are no object"
        required = cast("Sequence[str]", (offered[name].get("parameters") or {}).get("required") or ())
        if missing := [key for key in required if key not in arguments]:
            return f"{name} was not given {missing[0]!r}"
    return None


def _called(message: JSON) -> list[JSON]:
    calls = cast("Sequence[JSON]", message.get("tool_calls") or ())
    return [cast("JSON", call.get("function") or {}) for call in calls]


def is_refusal(message: JSON) -> bool:
    """Whether an answer begins like a refusal (`REFUSALS`) and calls no tool."""
    text = str(message.get("content") or "").strip().lower().replace("\u2019", "'")
    return not message.get("tool_calls") and text.startswith(REFUSALS)


def repetition(choice: Choice) -> float:
    """Return the share of trigrams (tokens or characters) that occurred before: 1 - distinct-3 (arXiv:1510.03055)."""
    units: Sequence[Any] = choice.token_ids or str(choice.message.get("content") or "")
    runs = list(zip(units, units[1:], units[2:], strict=False))
    return 1 - len(set(runs)) / len(runs) if runs else 0.0


def _is_empty(turn: Turn, choice: Choice) -> float:
    return float(not (str(choice.message.get("content") or "").strip() or choice.message.get("tool_calls")))


_Of = Callable[[Turn, Choice], float]
_SHARES: tuple[tuple[str, _Of], ...] = (
    ("empty answers", _is_empty),
    ("refusals", lambda _, choice: float(is_refusal(choice.message))),
    ("format errors", lambda turn, choice: float(format_error(choice.message, turn.call.tools) is not None)),
    ("cut off", lambda _, choice: float(choice.finish_reason == "length")),
    ("repetition", lambda _, choice: repetition(choice)),
)


def _share(
    name: str, answers: Sequence[Answered], of: _Of, config: GateConfig, seed: int, user_of: Mapping[str, str | None]
) -> Finding:
    def metric(turn: Turn, given: Given) -> float:
        # A policy without any answer fails every check: NaN fails in `not_worse`.
        return fmean(of(turn, choice) for choice in given.choices) if given.choices else math.nan

    pairs = [(a.turn.scenario_key, metric(a.turn, a.candidate), metric(a.turn, a.champion)) for a in answers]
    return not_worse(
        name, pairs, allowed=config.max_worse, level=config.level, seed=seed, less_is_better=True, user_of=user_of
    )


def _words(choice: Choice) -> tuple[str, ...]:
    """Return an answer as text, without the ids of its tool calls, which differ each time."""
    made = (f"{function.get('name')}\0{function.get('arguments')}" for function in _called(choice.message))
    return (str(choice.message.get("content") or ""), *made)


def _different(answers: Sequence[Answered]) -> Finding:
    """Report the mean share of distinct answers among the answers to one turn. This check never fails."""

    def metric(of: Sequence[Given]) -> float:
        return fmean(len(set(map(_words, given.choices))) / max(1, len(given.choices)) for given in of)

    ours, theirs = metric([a.candidate for a in answers]), metric([a.champion for a in answers])
    return Finding("different answers", ours, theirs, None, True, f"different answers {ours:.3g} against {theirs:.3g}")


def _same(answers: Sequence[Answered], limits: CollapseConfig) -> Finding:
    """Check the probability that random answers to two different scenarios are identical."""
    if len({a.turn.scenario_key for a in answers}) < 2:
        return Finding("same answers", None, None, None, True, "same answers: there is one scenario only")
    ours = _collision([(a.turn.scenario_key, a.candidate) for a in answers])
    theirs = _collision([(a.turn.scenario_key, a.champion) for a in answers])
    # Short answers such as "yes" coincide by nature, so the limit follows the champion where the champion's is high.
    return _at_most("same answers", ours, theirs, max(limits.max_same, theirs + limits.max_same_rise))


def _collision(given: Sequence[tuple[str, Given]]) -> float:
    """Return the collision probability: two scenarios are drawn, then one answer of each; how often are they equal?"""
    said: dict[str, list[tuple[str, ...]]] = defaultdict(list)
    for key, of in given:
        said[key] += map(_words, of.choices)
    # sum over answers of (sum of shares) ** 2 counts all pairs of scenarios, each with itself included; `within` takes
    # the latter off again. So the time is linear in the number of answers.
    total: dict[tuple[str, ...], float] = defaultdict(float)
    within = 0.0
    for spoken in said.values():
        for answer, count in Counter(spoken).items():
            total[answer] += count / len(spoken)
            within += (count / len(spoken)) ** 2
    pairs = len(said) * (len(said) - 1)
    return (math.fsum(share**2 for share in total.values()) - within) / pairs


def _length(answers: Sequence[Answered], limits: CollapseConfig) -> Finding:
    """Check that the mean lengths are within a factor: tokens, or characters where some answer has no token ids."""
    every = [choice for a in answers for given in (a.candidate, a.champion) for choice in given.choices]
    by_ids = all(choice.token_ids for choice in every)

    def size(choice: Choice) -> int:
        return len(choice.token_ids or ()) if by_ids else sum(map(len, _words(choice)))

    ours = fmean([size(choice) for a in answers for choice in a.candidate.choices] or [0])
    theirs = fmean([size(choice) for a in answers for choice in a.champion.choices] or [0])
    limit, unit = limits.max_length_ratio, "tokens" if by_ids else "characters"
    words = f"length {ours:.3g} against {theirs:.3g} {unit}; a factor of {limit:g} is allowed"
    return Finding("length", ours, theirs, limit, theirs <= ours * limit and ours <= theirs * limit, words)


def _latency(answers: Sequence[Answered], limits: CollapseConfig) -> Finding | None:
    sides = [(a.candidate.duration_ms, a.champion.duration_ms) for a in answers]
    timed = [(ours, theirs) for ours, theirs in sides if ours is not None and theirs is not None]
    if not timed:
        return None
    # The median: one slow answer, as by a cold cache, is no slow policy.
    ours, theirs = (median(times) for times in zip(*timed, strict=True))
    return _at_most("latency_ms", ours, theirs, theirs * limits.max_latency_ratio)


def _entropy(answers: Sequence[Answered], limits: CollapseConfig) -> Finding | None:
    """Check the entropy of sampling: the mean of -log p of sampled tokens estimates the entropy for each token."""
    ours = _surprise([a.candidate for a in answers])
    theirs = _surprise([a.champion for a in answers])
    if theirs is None:
        return None
    # Log-probabilities of the champion alone mean that the candidate's went missing: NaN fails.
    return _at_most("entropy_nats", math.nan if ours is None else ours, theirs, theirs + limits.max_entropy_rise_nats)


def _surprise(of: Sequence[Given]) -> float | None:
    logprobs = [logprob for given in of for choice in given.choices for logprob in choice.logprobs or ()]
    return -fmean(logprobs) if logprobs else None


def _at_most(name: str, ours: float, theirs: float | None, bound: float) -> Finding:
    if not (math.isfinite(ours) and math.isfinite(bound)):
        return Finding(name, None, None, None, False, f"{name} is not finite")
    against = "" if theirs is None else f" against {theirs:.3g}"
    words = f"{name} {ours:.3g}{against}; at most {bound:.3g} is allowed"
    return Finding(name, ours, theirs, bound, ours <= bound, words)
