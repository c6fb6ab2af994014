"""What the judge may answer, and reading it: text in, one verdict for each id out. Pure.

Strict, because a judge that is misread teaches the wrong thing: every id exactly once and no other, a finite number
from 0 to 1 (no strings, no booleans, no `NaN`), no second value for a key. Only a Markdown code fence around the JSON
is forgiven. What is wrong is said in one plain sentence, which is also what the judge gets to read for its second try.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, cast

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
"""The same for every group, ids and range left out: servers compile and cache a schema, and some refuse `maximum`."""

_FENCED = re.compile(r"\s*```(?:json)?[ \t]*\r?\n(.*)\n[ \t]*```\s*", re.DOTALL | re.IGNORECASE)
_ROW_KEYS = frozenset(("trajectory_id", "explanation", "score"))
_SHOWN = 60


class VerdictError(ValueError):
    """The judge's answer is not a valid verdict. The message is one sentence that says what is wrong with it."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the judge said of one sibling: a finite score from 0 to 1, and why."""

    score: float
    explanation: str


def parse_verdict(text: str, ids: Collection[str]) -> dict[str, Verdict]:
    """Return the verdict for each of `ids`.

    Raises:
        VerdictError: the text is anything else than one valid verdict for each id.
    """
    verdicts: dict[str, Verdict] = {}
    for row in _rows(text):
        name, verdict = _read_row(row)
        if name not in ids:
            raise VerdictError(f"there is no trajectory_id {_shown(name)}; use only {', '.join(ids)}.")
        if name in verdicts:
            raise VerdictError(f"trajectory_id {name!r} is scored more than once; score each exactly once.")
        verdicts[name] = verdict
    missing = [name for name in ids if name not in verdicts]
    if missing:
        raise VerdictError(f"these trajectory_ids have no score: {', '.join(missing)}; score each exactly once.")
    return verdicts


def _rows(text: str) -> list[Any]:
    """The entries of `scores`, not yet looked at."""
    fenced = _FENCED.fullmatch(text)
    try:
        answer: Any = json.loads(
            fenced[1] if fenced else text, parse_constant=_refuse_constant, object_pairs_hook=_unique_keys
        )
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
        raise VerdictError(f'the "score" of {_shown(name)} must be a number from 0 to 1, not {_shown(score)}.')
    # JSON can spell half a surrogate pair, which no database takes.
    return name, Verdict(float(score), explanation.encode("utf-8", "replace").decode())


def _refuse_constant(name: str) -> None:
    raise VerdictError(f"{name} is not a number that JSON or this scale knows; scores go from 0 to 1.")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise VerdictError("a JSON object in the answer has the same key twice.")
    return found


def _shown(value: Any) -> str:
    """A short, printable form of anything that JSON can hold."""
    try:
        text = ascii(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits has no decimal form, by Python's limit
        text = f"that {type(value).__name__}"
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."
