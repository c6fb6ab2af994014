"""Which side of the gate's split a run is on: nothing ever changes sides, over any sequence of cycles."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from art_patch._lib.ids import new_id
from art_patch.grouping import ResampleConfig, is_held_out, is_user_held_out, scenario_of
from art_patch.pipeline import CycleConfig, Run, group
from art_patch.store import Store, open_store
from art_patch.types import Call, Choice, Group, Trajectory, TrajectoryInfo

WORDINGS = tuple(
    f"{ask} {thing}" for thing in ("refund", "parcel", "invoice") for ask in ("where is my", "show me that", "I lost a")
)
TYPO = "where is my parcle"  # it is corrected where "parcel" is frequent


def means_the_same(texts: Sequence[str]) -> list[list[float]]:
    """The last word is the meaning."""
    things = ("refund", "parcel", "invoice", "parcle")
    return [[float(text.endswith(thing)) for thing in things] for text in texts]


def a_run(store: Store, now: float, **config: Any) -> Run:
    about = {"settle_s": 0.0, "min_group_size": 2, "holdout_share": 0.5, "resample": ResampleConfig()} | config
    return Run(store, cast("Any", None), CycleConfig(**about), lambda *_, **__: None, now=now)


def ask(store: Store, text: str, at: float, **about: Any) -> str:
    key = new_id()
    answer = Choice(0, {"role": "assistant", "content": "yes"}, "stop")
    call = Call(f"{key}-c", key, at, "m", ({"role": "user", "content": text},), (answer,), policy="agent@0")
    store.write([TrajectoryInfo(key, at, **about), call])
    return key


def text_of(run: Trajectory) -> str:
    return str(run.calls[0].messages[0]["content"])


asked = st.tuples(
    st.sampled_from((*WORDINGS, TYPO)), st.sampled_from((None, "ann", "bob", "cid", "dee")), st.booleans()
)


@pytest.mark.parametrize("by_user", [False, True])
def test_no_scenario_wording_or_user_is_ever_on_both_sides(tmp_path: Path, by_user: bool):
    seen = {"examples": 0, "groups": 0}

    @settings(max_examples=25, deadline=None)
    @given(
        st.lists(st.tuples(st.lists(asked, min_size=1, max_size=12), st.booleans(), st.floats(0.2, 0.8)), max_size=5)
    )
    def holds(cycles: list[tuple[list[tuple[str, str | None, bool]], bool, float]]) -> None:
        seen["examples"] += 1
        store = open_store(f"sqlite:///{tmp_path / str(seen['examples'])}.db")
        sides: dict[tuple[str, str], set[bool]] = {}
        for number, (runs, has_model, share) in enumerate(cycles):
            for text, user, own_key in runs:
                ask(store, text, 10.0 * number, user_id=user, scenario_key=text[:8] if own_key else None)
            embed = means_the_same if has_model else None
            # A person who changes the share changes it for new scenarios only.
            config = {"embed": embed, "holdout_users": by_user, "holdout_share": 0.5 if by_user else share}
            found = group(a_run(store, 10.0 * number + 5, **config))
            lone = [(run, found.keys[run.id], False) for run in (*found.waiting, *found.others)]
            for run, key, _ in lone:  # as `resample` notes that it has used them
                store.ledger.add_groups([Group(new_id(), key, "single", (run,))], state="resampled", now=10.0 * number)
            for run, key, side in [
                (t, g.scenario_key, g.held_out) for g in found.groups for t in g.trajectories
            ] + lone:
                facts = [("scenario", key)]
                facts += [] if run.info.scenario_key else [("wording", text_of(run))]
                facts += [("user", run.info.user_id)] if by_user and run.info.user_id else []
                for fact in facts:
                    sides.setdefault(fact, set()).add(side)
            seen["groups"] += len(found.groups)
        store.close()
        assert {fact: its for fact, its in sides.items() if len(its) > 1} == {}

    holds()
    assert seen["groups"] > 50


@pytest.fixture
def store(tmp_path: Path):
    opened = open_store(f"sqlite:///{tmp_path}/store.db")
    yield opened
    opened.close()


def key_of(store: Store, run: str) -> str:
    scenario = scenario_of(store.read.trajectories([run])[0])
    assert scenario is not None
    return scenario[0]


def on_both_sides(store: Store) -> tuple[str, str]:
    """Two wordings of one task whose own keys are on different sides."""
    for one in WORDINGS:
        for other in WORDINGS:
            if one.split()[-1] == other.split()[-1]:
                keys = [key_of(store, ask(store, text, 1e9)) for text in (one, other)]
                if [is_held_out(key, 0.5) for key in keys] == [True, False]:
                    return one, other
    raise AssertionError


def test_the_first_key_of_a_cluster_stays_whatever_wording_is_frequent_later(store: Store):
    one, other = on_both_sides(store)
    first = key_of(store, ask(store, one, 1e9))
    for at, texts in ((1.0, (one, one, other)), (11.0, (one, other, other, other)), (21.0, (other, other))):
        for text in texts:
            ask(store, text, at)
        (made,) = group(a_run(store, at + 1, embed=means_the_same)).groups
        assert (made.held_out, made.scenario_key, len(made.trajectories)) == (True, first, len(texts))


def test_clusters_that_merge_later_stay_on_their_sides(store: Store):
    one, other = on_both_sides(store)
    for text in (one, other, one, other):
        ask(store, text, 1.0)
    apart = {g.scenario_key: g.held_out for g in group(a_run(store, 2.0)).groups}
    assert sorted(apart.values()) == [False, True]
    for text in (one, other, one, other):
        ask(store, text, 11.0)
    assert {g.scenario_key: g.held_out for g in group(a_run(store, 12.0, embed=means_the_same)).groups} == apart


def test_clusters_of_one_side_that_merge_later_have_the_older_key(store: Store):
    one, other, third = (text for text in WORDINGS if text.endswith("parcel"))
    keys: list[str] = []
    for at, text in ((1.0, other), (11.0, one)):
        keys += [key_of(store, ask(store, text, at)) for _ in range(2)]
        group(a_run(store, at + 1, holdout_share=0.0))
    for text in (one, one, one, other, third):
        ask(store, text, 21.0)
    (made,) = group(a_run(store, 22.0, holdout_share=0.0, embed=means_the_same)).groups
    assert (made.scenario_key, len(made.trajectories)) == (keys[0], 5)


def test_a_deleted_task_keeps_its_side_and_no_words_of_it(store: Store):
    text = WORDINGS[0]
    for _ in range(2):
        ask(store, text, 1.0, user_id="u")
    (made,) = group(a_run(store, 2.0, holdout_share=1.0)).groups
    store.rights.erase(user="u", now=3.0)
    assert store.read.counts()["trajectories"] == 0
    for _ in range(2):
        ask(store, text, 11.0)
    (again,) = group(a_run(store, 12.0, holdout_share=0.0)).groups
    assert (again.held_out, again.scenario_key) == (True, made.scenario_key)


def test_a_users_runs_are_held_out_together_and_those_of_others_by_the_first(store: Store):
    users = [f"user-{number}" for number in range(40)]
    kept = [user for user in users if not is_user_held_out(user, 0.5)]
    held = [user for user in users if is_user_held_out(user, 0.5)]
    assert len(kept) > 5 and len(held) > 5
    for user in (held[0], kept[0], held[1], None):
        ask(store, WORDINGS[0], 1.0, user_id=user)
    for user in (kept[1], kept[2], held[2]):
        ask(store, WORDINGS[3], 1.0, user_id=user)
    run = a_run(store, 2.0, holdout_users=True)
    groups = group(run).groups
    assert [(g.held_out, [t.info.user_id for t in g.trajectories]) for g in groups] == [
        (True, [held[0], held[1], None]),
        (False, [kept[1], kept[2]]),
    ]
    assert run.metrics["group"]["left"] == {"its user is held out and its task is not, or the other way round": 2}
