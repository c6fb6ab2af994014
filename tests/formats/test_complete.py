"""Whole trajectories: nothing is lost on the way through a file, nothing wrong comes in."""

from __future__ import annotations

import io
import math
import tempfile
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from art_patch.cli.commands.files import export, import_file
from art_patch.errors import MalformedFile
from art_patch.formats import Bundle, encode
from art_patch.formats.complete import FORMAT, decode
from art_patch.store import Filter, open_store
from art_patch.types import Call, Choice, Score, SpanInfo, Trajectory, TrajectoryInfo
from tests.support.run_samples import tool_run

# What a database cannot hold is the recorder's to replace, before anything is kept.
texts = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), max_size=12)
names = st.none() | texts
times = st.floats(0, 4e9, allow_nan=False)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
objects = st.dictionaries(texts, values, max_size=3)
messages = st.builds(lambda role, more: {"role": role, **more}, st.sampled_from(["user", "assistant", "tool"]), objects)
token_ids = st.lists(st.integers(0, 2**32 - 1), max_size=5)


@st.composite
def choices(draw: st.DrawFn, index: int) -> Choice:
    ids = draw(st.none() | token_ids)
    floats = st.floats(width=32, allow_nan=False)
    logprobs = None if ids is None else draw(st.none() | st.lists(floats, min_size=len(ids), max_size=len(ids)))
    finish = draw(st.sampled_from([None, "stop", "length", "tool_calls"]))
    return Choice(
        index,
        draw(messages),
        finish,
        None if ids is None else tuple(ids),
        None if logprobs is None else tuple(logprobs),
    )


@st.composite
def bundles(draw: st.DrawFn, key: str) -> Bundle:
    """A trajectory as a store may hold it; ids are distinct, lists in the order in which they are read."""
    calls: list[Call] = []
    for number in range(draw(st.integers(0, 3))):
        prompt_ids = draw(st.none() | token_ids)
        answers = tuple(draw(choices(index)) for index in range(draw(st.integers(0, 2))))
        exact = bool(prompt_ids) and bool(answers) and all(c.token_ids and c.logprobs is not None for c in answers)
        calls.append(
            Call(
                id=f"{key}-call-{number}",
                trajectory_id=key,
                started_at=draw(times),
                requested_model=draw(texts),
                messages=tuple(draw(st.lists(messages, max_size=3))),
                choices=answers,
                tools=tuple(draw(st.lists(objects, max_size=2))),
                params=draw(objects),
                span_id=draw(names),
                duration_ms=draw(times),
                ttft_ms=draw(st.none() | times),
                policy="agent@3" if exact else draw(st.sampled_from([None, "agent@3"])),
                prompt_token_ids=None if prompt_ids is None else tuple(prompt_ids),
                prompt_tokens=draw(st.integers(0, 2**31 - 1)),
                completion_tokens=draw(st.integers(0, 2**31 - 1)),
                status=draw(st.sampled_from(["ok", "error", "cancelled", "abandoned"])),
                error=draw(names),
                fallback=draw(names),
                untrainable=draw(names) if exact else draw(texts),
                api=draw(st.sampled_from(["chat", "completions", "responses"])),
                shadow_of=draw(names),
                in_control_group=draw(st.booleans()),
                answered_by=draw(names),
            )
        )
    info = TrajectoryInfo(
        id=key,
        started_at=draw(times),
        origin=draw(st.sampled_from(["explicit", "otel", "stitched", "single", "shadow", "imported"])),
        ended_at=draw(st.none() | times),
        name=draw(names),
        scenario_key=draw(names),
        group_key=draw(names),
        session_id=draw(names),
        user_id=draw(names),
        tags=tuple(draw(st.lists(texts, max_size=2))),
        metadata=draw(objects),
        error=draw(names),
        learn=draw(st.booleans()),
    )
    scores = tuple(
        Score(
            f"{key}-score-{n}",
            key,
            draw(texts),
            draw(st.floats(allow_nan=False, allow_infinity=False)),
            "user",
            n * 1.0,
        )
        for n in range(draw(st.integers(0, 2)))
    )
    spans = tuple(SpanInfo(f"{key}-span-{n}", key, draw(texts), n * 1.0, ended_at=draw(st.none() | times)) for n in range(draw(st.integers(0, 2))))  # fmt: skip  # noqa: E501
    calls.sort(key=lambda call: (call.started_at, call.id))
    return Bundle(Trajectory(info, tuple(calls), scores), spans)


@given(bundles("t"))
@settings(max_examples=100, deadline=None)
def test_decode_undoes_encode(bundle: Bundle):
    assert decode(encode(bundle)) == bundle


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@given(
    st.lists(st.integers(), max_size=3).flatmap(lambda keys: st.tuples(*(bundles(f"t{n}") for n in range(len(keys)))))
)
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_a_store_comes_back_equal(suffix: str, given_bundles: tuple[Bundle, ...]):
    """Into a store, out to a file, into another store: equal to what the first store gives."""
    ids = [bundle.trajectory.id for bundle in given_bundles]
    with tempfile.TemporaryDirectory() as directory, redirect_stdout(io.StringIO()):
        file = f"{directory}/all.{suffix}"
        read: list[Any] = []
        for name in ("one", "other"):
            url = f"sqlite:///{directory}/{name}.db"
            store = open_store(url)
            if name == "one":
                for bundle in given_bundles:
                    store.write(bundle.records)
                export(file, format="trajectories", store=url, as_json=True)
            elif ids:
                import_file(file, store=url, as_json=True)
            read.append(store.read.trajectories(ids))
            assert store.verify() == []
            store.close()
        assert read[0] == read[1]
        assert len(read[0]) == len(ids)


def test_what_is_not_exact_is_not_trainable():
    (first, second) = tool_run("t", "plum", "x").calls
    line = encode(Bundle(Trajectory(TrajectoryInfo("t", 1.0), (first, second))))
    del line["calls"][0]["prompt_token_ids"]
    bundle = decode(line)
    assert [call.untrainable for call in bundle.trajectory.calls] == ["imported", None]
    assert [c.untrainable for c in bundle.without_tokens_of(["agent@1"]).trajectory.calls] == ["imported", "imported"]


def test_log_probabilities_that_are_not_finite_survive():
    call = Call("c", "t", 1.0, "m", (), (Choice(0, {}, "stop", (1, 2, 3), (-math.inf, -1.0, math.nan)),))
    line = encode(Bundle(Trajectory(TrajectoryInfo("t", 1.0), (call,))))
    assert line["calls"][0]["choices"][0]["logprobs"] == ["-inf", -1.0, "nan"]
    first, _, last = decode(line).trajectory.calls[0].choices[0].logprobs or ()
    assert first == -math.inf
    assert math.isnan(last)


def edited(*path: Any, value: Any) -> dict[str, Any]:
    line = encode(Bundle(tool_run("t", "plum", "x")))
    place: Any = line
    for step in path[:-1]:
        place = place[step]
    if value is ...:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return line


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (edited("format", value="art_patch.trajectory/2"), f"this release reads {FORMAT}"),
        (edited("trajectory", value=...), "trajectory is missing"),
        (edited("trajectory", value=3), "trajectory must be an object"),
        (edited("trajectory", "id", value=...), "trajectory.id is missing"),
        (edited("trajectory", "id", value=""), "trajectory.id must be a text of at least one character"),
        (edited("trajectory", "origin", value="moon"), "trajectory.origin must be one of"),
        (edited("trajectory", "started_at", value=math.inf), "trajectory.started_at must be a number"),
        (edited("trajectory", "colour", value=1), "trajectory.colour is no field"),
        (edited("extra", value=1), "extra is no field"),
        (edited("calls", value={}), "calls must be a list"),
        (edited("calls", 1, "messages", value=...), "calls[1].messages is missing"),
        (edited("calls", 0, "messages", 1, value="hi"), "calls[0].messages[1] must be an object"),
        (edited("calls", 0, "policy", value="agent"), "calls[0].policy must be NAME@STEP"),
        (edited("calls", 0, "status", value="fine"), "calls[0].status must be one of"),
        (edited("calls", 0, "prompt_token_ids", 0, value=-1), "calls[0].prompt_token_ids[0] must be a token id"),
        (edited("calls", 0, "prompt_token_ids", 0, value=2**32), "a token id, 0 to 4294967295, not 4294967296"),
        (edited("calls", 0, "choices", 0, "token_ids", value=[1]), "calls[0].choices[0]: 1 token ids and 3 log-"),
        (edited("calls", 0, "choices", 0, "logprobs", 0, value="x"), "logprobs[0] must be a number, not 'x'"),
        (edited("calls", 0, "choices", 0, "logprobs", 0, value=math.inf), "logprobs[0] must be a number, not inf"),
        (edited("calls", 0, "prompt_tokens", value=3.0), "calls[0].prompt_tokens must be a whole number"),
        (edited("calls", 0, "prompt_token_ids", value="abc"), "prompt_token_ids must be a list, not"),
        (edited("calls", 0, "trajectory_id", value="t"), "calls[0].trajectory_id is no field"),
        (edited("trajectory", "tags", value=[True]), "trajectory.tags[0] must be a text, not True"),
        (edited("calls", 1, "id", value="t-1"), "calls: id 't-1' comes twice"),
        (edited("scores", value=[{"id": "s", "name": "n", "value": None, "source": "user", "at": 1}]), "scores[0].value must be"),  # noqa: E501
        (edited("group", value={"id": "g"}), "group.scenario_key is missing"),
        (edited("bases", value={"agent@1": 3}), "bases.agent@1 must be a text"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_by_its_path(line: dict[str, Any], words: str):
    with pytest.raises(MalformedFile) as caught:
        decode(line)
    assert words in str(caught.value)


@pytest.mark.parametrize("state", ["trained", "quarantined", "in spans", "resampled", "branched"])
def test_a_run_in_a_group_of_any_state_comes_back(state: str):
    about = {"id": "g", "scenario_key": "x", "how": "single", "held_out": False, "state": state, "created_at": 1.0}
    bundle = Bundle(Trajectory(TrajectoryInfo("t", 1.0), ()), group=about)
    assert decode(encode(bundle)) == bundle


def test_groups_and_strangers(filled: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Groups come along; tokens of a base model that is another here are not trained on."""
    url = f"sqlite:///{tmp_path}/store.db"
    filled.ledger.add_base("agent@1", "one", "sha-of-one", who="test")
    export(str(tmp_path / "all.jsonl"), format="trajectories", store=url)
    lines = (tmp_path / "all.jsonl").read_text().splitlines()
    assert len(lines) == 10  # shadow calls and trajectories without calls are trajectories, too
    other = open_store(f"sqlite:///{tmp_path}/other.db")
    import_file(str(tmp_path / "all.jsonl"), store=f"sqlite:///{tmp_path}/other.db")
    ids = [key for _, key in filled.browse.ids(Filter(shadows=True))]
    assert other.read.trajectories(ids) == filled.read.trajectories(ids)
    assert other.transfers.groups_of(ids) == filled.transfers.groups_of(ids)
    assert other.read.groups(state="scored") == filled.read.groups(state="scored")
    assert other.verify() == []
    other.close()
