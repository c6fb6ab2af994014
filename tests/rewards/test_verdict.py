from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from art_patch.rewards.judge.question import VERDICT_SCHEMA, Verdict, VerdictError, parse_verdict

IDS = ("bcdfgh", "jkmnpq")


def row(name: Any = "bcdfgh", score: Any = 0.5, explanation: Any = "why") -> dict[str, Any]:
    return {"trajectory_id": name, "explanation": explanation, "score": score}


def answer(*rows: Any) -> str:
    return json.dumps({"scores": list(rows)})


BOTH = answer(row("bcdfgh", 0), row("jkmnpq", 1))
RIGHT = {"bcdfgh": Verdict(0.0, "why"), "jkmnpq": Verdict(1.0, "why")}


@pytest.mark.parametrize(
    "text",
    [BOTH, f" \n{BOTH}\n", f"```json\n{BOTH}\n```", f"\n```\n{BOTH}\n```  \n", f"```JSON\r\n{BOTH}\r\n```"],
    ids=["plain", "white space", "json fence", "bare fence", "crlf fence"],
)
def test_reads_a_valid_verdict_with_or_without_a_code_fence(text: str) -> None:
    assert parse_verdict(text, IDS) == RIGHT


def test_order_does_not_matter_and_scores_become_floats() -> None:
    read = parse_verdict(answer(row("jkmnpq", 1), row("bcdfgh", 0)), IDS)
    assert read == RIGHT
    assert all(type(verdict.score) is float for verdict in read.values())


INVALID = {
    "empty": ("", "not a JSON object"),
    "prose": ("Both are fine.", "not a JSON object"),
    "prose before": (f"Here you are: {BOTH}", "not a JSON object"),
    "two objects": (f"{BOTH}{BOTH}", "not a JSON object"),
    "cut": (BOTH[:-3], "not a JSON object"),
    "deep": ("[" * 200_000, "not a JSON object"),
    "digits": (f'{{"scores": [{"9" * 5000}]}}', "not a JSON object"),
    "list": ("[]", 'single key "scores"'),
    "null": ("null", 'single key "scores"'),
    "other key": (json.dumps({"scores": [], "best": 1}), 'single key "scores"'),
    "object": (json.dumps({"scores": {"bcdfgh": 1, "jkmnpq": 0}}), '"scores" must be a list'),
    "numbers": (json.dumps({"scores": [1, 0]}), "exactly the keys"),
    "no explanation": (json.dumps({"scores": [{"trajectory_id": "bcdfgh", "score": 1}]}), "exactly the keys"),
    "extra": (answer({**row(), "rank": 1}), "exactly the keys"),
    "id number": (answer(row(1)), "must be strings"),
    "explanation null": (answer(row(explanation=None)), "must be strings"),
    "missing id": (answer(row("bcdfgh")), "no score: jkmnpq"),
    "no ids": (answer(), "no score: bcdfgh, jkmnpq"),
    "twice": (answer(row(), row(), row("jkmnpq")), "more than once"),
    "unknown id": (answer(row(), row("jkmnpq"), row("zzzzzz")), "no trajectory_id 'zzzzzz'"),
    "rank": (answer(row(score=7)), "from 0 to 1, not 7"),
    "negative": (answer(row(score=-0.1)), "from 0 to 1, not -0.1"),
    "string": (answer(row(score="0.8x")), "from 0 to 1, not '0.8x'"),
    "numeric string": (answer(row(score="0.8")), "from 0 to 1, not '0.8'"),
    "boolean": (answer(row(score=True)), "from 0 to 1, not True"),
    "null score": (answer(row(score=None)), "from 0 to 1, not None"),
    "NaN": (answer(row(score=math.nan)), "NaN is not a number"),
    "infinity": (answer(row(score=math.inf)), "Infinity is not a number"),
    "overflow": (answer(row(score=0)).replace(": 0}", ": 1e999}"), "from 0 to 1, not inf"),
    "list score": (answer(row(score=[0.5])), "from 0 to 1"),
    "key twice": (BOTH.replace('"score": 0}', '"score": 0, "score": 1}'), "same key twice"),
}


@pytest.mark.parametrize(("text", "says"), INVALID.values(), ids=INVALID)
def test_refuses_everything_else_and_says_why(text: str, says: str) -> None:
    with pytest.raises(VerdictError) as caught:
        parse_verdict(text, IDS)
    message = str(caught.value)
    assert says in message
    assert "\n" not in message and message.endswith(".") and len(message) < 300


def test_half_a_surrogate_pair_does_not_get_through() -> None:
    text = f'{{"scores": [{{"trajectory_id": "bcdfgh", "explanation": "a\\ud800", "score": 1}}]}}'  # noqa: F541
    explanation = parse_verdict(text, ["bcdfgh"])["bcdfgh"].explanation
    assert explanation.encode() == b"a?"


def test_the_schema_asks_for_what_the_parser_wants() -> None:
    item = VERDICT_SCHEMA["properties"]["scores"]["items"]
    assert list(item["properties"]) == item["required"] == ["trajectory_id", "explanation", "score"]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(IDS),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
rows = st.fixed_dictionaries(
    {
        "trajectory_id": st.sampled_from(IDS) | json_values,
        "explanation": st.text() | json_values,
        "score": st.floats(0, 1) | st.integers(0, 1) | json_values,
    }
)
answers = st.text() | json_values.map(json.dumps) | st.lists(rows | json_values, max_size=4).map(lambda r: answer(*r))


@given(answers, st.sampled_from(["{}", "```json\n{}\n```", "```{}```", "{} "]))
@example("\ud800", "{}")
@example('{"scores": [1e-400]}', "{}")
def test_any_text_gives_valid_scores_for_all_ids_or_its_own_error(text: str, wrapped: str) -> None:
    try:
        read = parse_verdict(wrapped.format(text), IDS)
    except VerdictError:
        return
    assert set(read) == set(IDS)
    for verdict in read.values():
        assert type(verdict.score) is float and math.isfinite(verdict.score) and 0 <= verdict.score <= 1


@given(st.dictionaries(st.text("bcdfgh", min_size=1), st.tuples(st.floats(0, 1), st.text()), min_size=1))
def test_what_a_correct_judge_says_is_read_unchanged(said: dict[str, tuple[float, str]]) -> None:
    text = answer(*(row(name, score, explanation) for name, (score, explanation) in said.items()))
    assert parse_verdict(text, list(said)) == {name: Verdict(*given) for name, given in said.items()}
