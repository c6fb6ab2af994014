"""Parses the judge's answer into a verdict for each attempt, and makes scores of verdicts. Pure.

Parsing is strict, because a misread answer teaches the wrong behaviour: every id must occur exactly once and no other
id, a score must be a finite number from 0 to 1 (no string, boolean or NaN), and no key may occur twice. Around the JSON
only a Markdown code fence is accepted. An error message is one plain sentence, because the judge reads it before its
second try.
"""

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from art_patch._lib.ids import derived_id
from art_patch.rewards.combine import SCORE_NAME, SCORE_SOURCE
from art_patch.types import Group, Score

# The same for every group, without ids and range: servers compile and cache a schema, and some refuse `maximum`.
VERDICT_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "scores": {
            "type": "array",
            "items": {
                "type": "object",
                # The explanation stands before the score so that the judge has reasoned when it picks the number.
                "properties": {
                    "trajectory_id": {"type": "string"},
                    "explanation": {"type": "string"},
                    "score": {"type": "number"},
                },
                "required": ["trajectory_id", "explanation", "score"],
                "additionalProperties": False,
            },
        }
    },
    "required": ["scores"],
    "additionalProperties": False,
}

_FENCED = re.compile(r"\s*```(?:json)?[ \t]*\r?\n(.*)\n[ \t]*```\s*", re.DOTALL | re.IGNORECASE)
_ROW_KEYS = frozenset(("trajectory_id", "explanation", "score"))
_SHOWN = 60


class VerdictError(ValueError):
    """Raised if the judge's answer is not valid; the message is one sentence that says what is wrong."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The judge's score for one sibling, a finite number from 0 to 1, and the judge's reason for it."""

    score: float
    explanation: str


def parse_verdict(text: str, ids: Collection[str]) -> dict[str, Verdict]:
    """Return id -> verdict for the prompt's `ids`; `VerdictError` unless the text has exactly one valid for each."""
    verdicts: dict[str, Verdict] = {}
    for row in _rows(text):
        name, verdict = _read_row(row)
        if name not in ids:
            raise VerdictError(f"there is no trajectory_id {shown(name)}; use only {', '.join(ids)}.")
        if name in verdicts:
            raise VerdictError(f"trajectory_id {name!r} is scored more than once; score each exactly once.")
        verdicts[name] = verdict
    missing = [name for name in ids if name not in verdicts]
    if missing:
        raise VerdictError(f"these trajectory_ids have no score: {', '.join(missing)}; score each exactly once.")
    return verdicts


def _rows(text: str) -> list[Any]:
    fenced = _FENCED.fullmatch(text)
    bare = fenced[1] if fenced else text
    try:
        answer: Any = json.loads(bare, parse_constant=_refuse_constant, object_pairs_hook=_unique_keys)
    except VerdictError:
        raise
    except (ValueError, RecursionError) as error:
        why = error.msg if isinstance(error, json.JSONDecodeError) else "nested too deeply, or a number is too long"
        raise VerdictError(f"the answer is not a JSON object and nothing else ({why}).") from None
    if not isinstance(answer, dict) or list(cast("dict[str, Any]", answer)) != ["scores"]:
        raise VerdictError('the answer must be a JSON object with the single key "scores".')
    rows: Any = answer["scores"]
    if not isinstance(rows, list):
        raise VerdictError('"scores" must be a list.')
    return cast("list[Any]", rows)


def _read_row(row: Any) -> tuple[str, Verdict]:
    if not isinstance(row, dict) or cast("dict[str, Any]", row).keys() != _ROW_KEYS:
        raise VerdictError('each entry of "scores" must have exactly the keys "trajectory_id", "explanation", "score".')
    given = cast("dict[str, Any]", row)
    name, explanation, score = given["trajectory_id"], given["explanation"], given["score"]
    if not isinstance(name, str) or not isinstance(explanation, str):
        raise VerdictError('"trajectory_id" and "explanation" must be strings.')
    # A boolean is an int to Python; "not (a <= b <= c)" is also true of NaN.
    if isinstance(score, bool) or not isinstance(score, int | float) or not 0 <= score <= 1:
        raise VerdictError(f'the "score" of {shown(name)} must be a number from 0 to 1, not {shown(score)}.')
    # JSON can spell half a surrogate pair, which no database takes.
    return name, Verdict(float(score), explanation.encode("utf-8", "replace").decode())


def _refuse_constant(name: str) -> None:
    raise VerdictError(f"{name} is not a number that JSON or this scale knows; scores go from 0 to 1.")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise VerdictError("a JSON object in the answer has the same key twice.")
    return found


def shown(value: Any) -> str:
    """Return a value of JSON for an error message, in ASCII and at most 60 characters long."""
    try:
        text = ascii(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits has no decimal form, by Python's limit
        text = f"that {type(value).__name__}"
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def known_scores(
    groups: Sequence[Group], scores: Iterable[Score], *, judge: str, rubric: str
) -> dict[str, tuple[Score, ...]]:
    """Return group id -> scores, for each group whose siblings all have a score of this judge under this rubric."""
    found: dict[tuple[str | None, str], Score] = {}
    for score in scores:
        if (score.name, score.source, score.judge, score.rubric) == (SCORE_NAME, SCORE_SOURCE, judge, rubric):
            found[score.group_id, score.trajectory_id] = score
    keys_of = {group.id: [(group.id, sibling.id) for sibling in group.trajectories] for group in groups}
    return {name: tuple(found[key] for key in keys) for name, keys in keys_of.items() if found.keys() >= set(keys)}


def make_scores(
    group: Group, verdicts: Mapping[str, Verdict], *, judge: str, rubric: str, at: float
) -> tuple[Score, ...]:
    """Return a score for each verdict; a second judgement has the same ids, so it replaces the scores of the first."""
    about: dict[str, Any] = {"group_id": group.id, "rubric": rubric, "judge": judge}

    def score(key: str, verdict: Verdict) -> Score:
        name = derived_id(SCORE_NAME, group.id, key, rubric, judge)
        return Score(name, key, SCORE_NAME, verdict.score, SCORE_SOURCE, at, verdict.explanation, **about)

    return tuple(score(key, verdict) for key, verdict in verdicts.items())
