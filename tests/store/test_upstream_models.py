"""Which models upstream's names meant, and since when today's answer, over both databases."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import Engine, event

from art_patch._lib.ids import new_id
from art_patch.store import Store, open_store
from art_patch.store.upstream_models import MOST_ANSWERED, MOST_FINGERPRINTS, MOST_MODELS
from art_patch.types import UpstreamChange
from tests.support.postgres import Execute
from tests.support.store_samples import call, info

OLD, NEW = "gpt-x-2026-01-01", "gpt-x-2026-06-01"


def answered(answered_by: str | None, at: float, **changes: Any) -> Any:
    given = {"policy": None, "requested_model": "gpt-x", "answered_by": answered_by} | changes
    return call(new_id(), "t1", at, **given)


def see(store: Store, *names: str, requested_model: str = "gpt-x", since: float = 1.0) -> None:
    """One answer a second, in batches of one."""
    for second, name in enumerate(names):
        store.write([info(), answered(name, since + second, requested_model=requested_model)])


@pytest.fixture
def noted(execute: Execute) -> Any:
    query = "SELECT requested_model, answered_by, first_seen_at FROM upstream_models ORDER BY first_seen_at, 1, 2"
    return lambda: execute(query)


def test_a_call_is_read_as_it_was_written(store: Store):
    store.write([info(), answered(f"{NEW} fp_1", 1.0), answered(None, 2.0)])
    assert [each.answered_by for each in store.read.trajectories(["t1"])[0].calls] == [f"{NEW} fp_1", None]


def test_a_model_is_noted_when_it_first_answers(store: Store, noted):
    assert store.evidence.upstream_since() is None
    see(store, OLD, OLD, NEW, OLD, NEW)
    assert noted() == [("gpt-x", OLD, 1.0), ("gpt-x", NEW, 3.0)]
    assert store.evidence.upstream_since() == 3.0
    assert store.evidence.upstream_change() == UpstreamChange("gpt-x", OLD, NEW, 3.0)


def test_the_first_model_of_a_name_has_replaced_none(store: Store, noted):
    see(store, OLD)
    see(store, "gpt-y-1", requested_model="gpt-y", since=9.0)
    assert len(noted()) == 2
    assert store.evidence.upstream_since() is None
    assert store.evidence.upstream_change() is None


def test_the_newest_change_of_any_name_counts(store: Store):
    see(store, OLD, NEW)
    see(store, "gpt-y-1", "gpt-y-2", requested_model="gpt-y", since=5.0)
    see(store, "gpt-z-1", requested_model="gpt-z", since=8.0)
    assert store.evidence.upstream_change() == UpstreamChange("gpt-y", "gpt-y-1", "gpt-y-2", 6.0)
    # Nobody knows yet what a clock that runs ahead has seen.
    assert store.evidence.upstream_change(now=5.9) == UpstreamChange("gpt-x", OLD, NEW, 2.0)
    assert store.evidence.upstream_since(now=1.9) is None


@pytest.mark.parametrize(
    ("names", "since"),
    [
        ((f"{OLD} fp_1", f"{OLD} fp_2"), 2.0),
        ((f"{OLD} fp_1", f"{OLD} fp_2", f"{OLD} fp_1", f"{OLD} fp_2"), 2.0),
        # Another API names no fingerprint, or names one for the first time: this tells of no other model.
        ((f"{OLD} fp_1", OLD), None),
        ((OLD, f"{OLD} fp_1"), None),
        ((OLD, f"{OLD} fp_1", f"{OLD} fp_2"), 3.0),
        ((f"{OLD} fp_1", NEW, f"{NEW} fp_1"), 2.0),
    ],
)
def test_another_fingerprint_is_another_model(store: Store, names: tuple[str, ...], since: float | None):
    see(store, *names)
    assert store.evidence.upstream_since() == since


def test_only_answers_count_that_the_app_got_from_upstream(store: Store, noted):
    store.write([
        info(), answered(OLD, 1.0, policy="agent@0"), answered(OLD, 2.0, status="error"),
        answered(OLD, 3.0, status="abandoned"), answered(OLD, 4.0, shadow_of="c1"), answered(None, 5.0),
        answered("", 6.0),
    ])  # fmt: skip
    store.write([info(), answered(OLD, 7.0)], restores=True)  # of a file
    assert noted() == []
    store.write([info(), answered(OLD, 8.0, fallback="the engine was full", in_control_group=True)])
    assert noted() == [("gpt-x", OLD, 8.0)]


def test_the_earliest_answer_of_a_batch_and_of_a_late_process_counts(store: Store, url: str, noted):
    store.write([info(), answered(NEW, 9.0), answered(NEW, 5.0)])
    other = open_store(url)
    other.write([info(), answered(NEW, 7.0), answered(OLD, 2.0)])  # what its spool held
    other.close()
    assert noted() == [("gpt-x", OLD, 2.0), ("gpt-x", NEW, 5.0)]
    assert store.evidence.upstream_since() == 5.0


def test_a_server_with_a_new_fingerprint_for_each_answer_is_known_by_its_models_name(store: Store, noted):
    prints = [f"{OLD} fp_{number}" for number in range(40)]
    see(store, *prints)
    assert [name for _, name, _ in noted()] == prints[:MOST_FINGERPRINTS]
    assert store.evidence.upstream_since() == MOST_FINGERPRINTS
    see(store, f"{NEW} fp_1", f"{NEW} fp_2", NEW, f"{OLD} fp_99", since=100.0)
    assert noted()[MOST_FINGERPRINTS:] == [("gpt-x", NEW, 100.0)]
    assert store.evidence.upstream_change() == UpstreamChange("gpt-x", prints[MOST_FINGERPRINTS - 1], NEW, 100.0)


def test_what_is_noted_is_bounded(store: Store, noted):
    store.write([info(), *(answered(f"m{number}", float(number)) for number in range(200))])
    assert len(noted()) == MOST_ANSWERED
    many = [answered("m", 1.0, requested_model=f"n{number}") for number in range(MOST_MODELS + 50)]
    store.write([info(), *many[:600]])
    store.write([info(), *many[600:]])
    assert len({requested for requested, _, _ in noted()}) == MOST_MODELS
    # The models that are known stay known: also to a process that starts now.
    see(store, "m-2", requested_model="n7", since=50.0)
    assert store.evidence.upstream_since() == 63.0
    store.write([info(), answered("m-2", 70.0, requested_model="n8"), answered("m", 80.0, requested_model="n1049")])
    assert store.evidence.upstream_change() == UpstreamChange("n8", "m", "m-2", 70.0)


def test_whatever_a_server_says_is_stored(store: Store, noted):
    store.write([info(), answered("m\0\ud800" + "x" * 5_000, 1.0, requested_model="r\0" + "y" * 5_000)])
    ((requested, name, _),) = noted()
    assert (len(requested), len(name)) == (200, 200)
    assert (requested[:6], name[:12]) == ("r\\x00y", "m\\x00\\ud800x")


def test_known_models_cost_no_statement(store: Store):
    see(store, OLD, NEW)
    seen: list[str] = []

    def look(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        seen.append(statement)

    event.listen(Engine, "before_cursor_execute", look)
    try:
        see(store, OLD, NEW, OLD)
    finally:
        event.remove(Engine, "before_cursor_execute", look)
    assert seen and not [statement for statement in seen if "upstream_models" in statement]


def test_a_file_that_took_the_stores_place_is_noted_in(sqlite_url: str, tmp_path: Path):
    store = open_store(sqlite_url)
    see(store, OLD)
    for file in Path(sqlite_url.removeprefix("sqlite:///")).parent.glob("store.db*"):
        file.unlink()
    see(store, OLD, NEW, since=5.0)
    assert store.evidence.upstream_change() == UpstreamChange("gpt-x", OLD, NEW, 6.0)
    store.close()


def test_projects_are_kept_apart_and_an_erasure_keeps_the_names(url: str, noted):
    ours, theirs = open_store(url, project="ours"), open_store(url, project="theirs")
    see(ours, OLD)
    see(theirs, NEW, since=2.0)
    assert (ours.evidence.upstream_since(), theirs.evidence.upstream_since()) == (None, None)
    see(ours, NEW, since=3.0)
    assert (ours.evidence.upstream_since(), theirs.evidence.upstream_since()) == (3.0, None)
    ours.rights.erase(trajectory="t1", who="test")
    ours.rights.prune(keep=0, who="test")
    assert ours.evidence.upstream_since() == 3.0
    assert len(noted()) == 3
    assert ours.maintain.verify() == []
    ours.close()
    theirs.close()


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Makes an empty project of one store."""
    directory = tmp_path_factory.mktemp("store")
    opened: list[Store] = []

    def make() -> Store:
        opened.append(open_store(f"sqlite:///{directory}/store.db", project=f"p{len(opened)}"))
        return opened[-1]

    yield make
    for store in opened:
        store.close()


NAMES = st.sampled_from([f"{model}{suffix}" for model in ("a", "b", "c") for suffix in ("", " f1", " f2")])


@settings(max_examples=40, deadline=None)
@given(st.lists(NAMES, max_size=12), st.lists(st.integers(0, 11)))
def test_models_that_were_seen_before_change_nothing(fresh: Any, names: list[str], again: list[int]):
    store = fresh()
    see(store, *names)
    since = store.evidence.upstream_since()
    # By hand: a name's first sight is a change after another name, a fingerprint's after another one of this name.
    firsts = {name: 1.0 + names.index(name) for name in names}
    changes = [
        at
        for name, at in firsts.items()
        for before in [[each for each in firsts if firsts[each] < at]]
        for model, _, mark in [name.partition(" ")]
        for of_it in [[each.partition(" ")[2] for each in before if each.partition(" ")[0] == model]]
        if before and (not of_it or (mark and any(of_it)))
    ]
    assert since == max(changes, default=None)
    see(store, *(names[place] for place in again if place < len(names)), since=100.0)
    assert store.evidence.upstream_since() == since
