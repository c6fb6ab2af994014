"""Groups that are too large for one question: parts, anchors, one scale, and what is left out of a long transcript."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from art_patch.errors import ConfigError
from art_patch.rewards import DEFAULT_RUBRIC, Judge, read_prompt
from art_patch.rewards.judge.prompt import write_prompt
from art_patch.rewards.judge.question import (
    Question,
    TooLongError,
    Verdict,
    make_question,
    merge,
    shorten,
    split,
    to_line,
)
from art_patch.types import Group

GroupOf = Callable[..., Group]
QUESTION = {"role": "user", "content": "q"}


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def size(question: Question) -> int:
    return len(write_prompt(question, DEFAULT_RUBRIC, rng=random.Random(0)).text)


def parts_of(group: Group, *, max_tokens: int = 10**9, max_siblings: int = 8) -> tuple[Question, ...]:
    return split(make_question(group), size, max_tokens=max_tokens, max_siblings=max_siblings, rng=random.Random(0))


def members_of(part: Question) -> set[str]:
    return {key for attempt in part.attempts for key in attempt.members}


@pytest.mark.parametrize(("siblings", "parts"), [(1, 1), (8, 1), (9, 2), (14, 2), (15, 3), (40, 7)])
def test_parts_share_two_anchors_and_hold_every_sibling(group_of: GroupOf, siblings: int, parts: int) -> None:
    group = group_of([[QUESTION, said(str(i))] for i in range(siblings)])
    found = parts_of(group)
    assert len(found) == parts
    assert all(len(part.attempts) <= 8 for part in found)
    counts = Counter(key for part in found for key in members_of(part))
    assert set(counts) == {t.id for t in group.trajectories}
    if parts > 1:
        assert sorted(counts.values()) == [1] * (siblings - 2) + [parts] * 2
        sizes = [len(part.attempts) for part in found]
        assert max(sizes) - min(sizes) <= parts  # none is left with a rest of one where the others could share


def test_siblings_with_the_same_transcript_count_once(group_of: GroupOf) -> None:
    group = group_of([[QUESTION, said(str(i % 4))] for i in range(32)])
    assert len(parts_of(group)) == 1


def test_a_prompt_that_is_too_long_is_split_until_each_fits(group_of: GroupOf) -> None:
    group = group_of([[QUESTION, said(f"{i} " + "long " * 400)] for i in range(6)])
    limit = 10_000
    found = parts_of(group, max_tokens=limit)
    assert 1 < len(found) < 6 and all(size(part) <= limit for part in found)
    assert {key for part in found for key in members_of(part)} == {f"g-{i}" for i in range(6)}
    assert not any("left out" in line for part in found for a in part.attempts for line in a.lines)


def test_a_sibling_too_long_for_any_part_keeps_both_ends_and_says_what_is_missing(group_of: GroupOf) -> None:
    long = [QUESTION, *(said(f"step {i} " + "x" * 300) for i in range(200)), said("the end")]
    group = group_of([long, [QUESTION, said("short")], [QUESTION, said("other")]])
    limit = 12_000
    (part,) = parts_of(group, max_tokens=limit)
    assert size(part) <= limit
    content = read_prompt(write_prompt(part, DEFAULT_RUBRIC, rng=random.Random(0)).messages)
    shown = max(content.transcripts.values(), key=len)
    assert (shown[0], shown[-1]) == (QUESTION, said("the end"))
    (note,) = [message for message in shown if message["role"] == "left out"]
    assert note["content"].startswith(f"{len(long) - len(shown) + 1} messages, ")
    assert sorted(len(t) for t in content.transcripts.values())[:2] == [2, 2]


def test_tools_that_leave_no_room_are_an_error_that_says_so(group_of: GroupOf) -> None:
    tool = {"type": "function", "function": {"name": "f", "description": "x" * 20_000}}
    with pytest.raises(TooLongError, match="leaves no room"):
        parts_of(group_of([[QUESTION, said("a")], [QUESTION, said("b")]], [tool]), max_tokens=10_000)


def test_both_orders_have_the_same_parts(group_of: GroupOf) -> None:
    judge = Judge("openai/some-judge", max_siblings=4)
    group = group_of([[QUESTION, said(str(i))] for i in range(11)])
    there, back = (judge.plan(group, order=order).requests for order in ("shuffled", "reversed"))
    assert len(there) == 5
    for one, other in zip(there, back, strict=True):
        assert list(one.prompt.siblings.values()) == list(other.prompt.siblings.values())[::-1]


def test_parts_need_room_for_more_than_their_anchors() -> None:
    with pytest.raises(ConfigError, match="give 3 or more"):
        Judge("openai/x", max_siblings=2)


def verdicts(**scores: float) -> dict[str, Verdict]:
    return {key: Verdict(score, f"why {key}") for key, score in scores.items()}


def merged(*parts: dict[str, Verdict]) -> dict[str, float]:
    return {key: round(verdict.score, 9) for key, verdict in merge(parts).items()}


def test_scores_of_later_parts_are_read_on_the_scale_of_the_first() -> None:
    first = verdicts(low=0.2, high=0.6, x=0.9)
    generous = verdicts(low=0.4, high=0.8, below=0.2, between=0.6, above=0.9)
    assert merged(first, generous) == {
        "low": 0.2, "high": 0.6, "x": 0.9, "below": 0.1, "between": 0.4, "above": 0.8,
    }  # fmt: skip


@pytest.mark.parametrize(
    "anchors",
    [{"low": 0.5, "high": 0.5}, {"low": 0.8, "high": 0.4}, {"low": 0.2, "high": 0.6}],
    ids=["alike", "turned round", "the same scale"],
)
def test_where_the_anchors_tell_nothing_scores_stay(anchors: dict[str, float]) -> None:
    assert merged(verdicts(low=0.2, high=0.6), verdicts(**anchors, other=0.7))["other"] == 0.7


def test_one_part_is_what_the_judge_said() -> None:
    only = verdicts(a=0.1, b=0.9)
    assert merge([only]) == only


unit = st.floats(0, 1)


@given(unit, unit, st.lists(unit, min_size=4, max_size=8))
def test_a_part_keeps_its_order_and_its_range(low: float, high: float, scores: list[float]) -> None:
    part = {str(i): Verdict(score, "") for i, score in enumerate(scores)}
    result = merge([{"0": Verdict(low, ""), "1": Verdict(high, "")}, part])
    assert all(0 <= verdict.score <= 1 for verdict in result.values())
    others = [key for key in part if key not in ("0", "1")]
    for one in others:
        for other in others:
            if part[one].score < part[other].score:
                assert result[one].score <= result[other].score


@given(st.lists(st.text(max_size=400), min_size=1, max_size=40), st.integers(800, 4_000))
def test_a_shortened_transcript_fits_and_begins_and_ends_as_it_did(texts: list[str], limit: int) -> None:
    lines = tuple(to_line(said(text)) for text in texts)
    short = shorten(lines, limit)
    assert sum(map(len, short)) <= max(limit, 0)
    if sum(map(len, lines)) <= limit:
        assert short == lines
    else:
        assert any("left out" in line for line in short)
        assert json.loads(short[0])["role"] == json.loads(short[-1])["role"] == "assistant"


def test_a_message_that_is_too_long_is_cut_in_its_middle() -> None:
    call = {
        "role": "assistant",
        "content": "ok",
        "tool_calls": [{"function": {"arguments": "a" * 5_000 + "z" * 5_000}}],
    }
    (line,) = shorten([to_line(call)], 2_000)
    cut = json.loads(line)["tool_calls"][0]["function"]["arguments"]
    assert cut.startswith("aaa") and cut.endswith("zzz") and "characters left out" in cut
    assert 1_000 < len(line) <= 2_000
    many = {"role": "user", "content": ["short text"] * 2_000}
    (note,) = shorten([to_line(many)], 2_000)
    assert json.loads(note)["role"] == "left out"
