"""Attempts within one run become siblings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from art_patch.types import SpanInfo, Trajectory
from tests.support.factory import make_call, make_trajectory
from tests.support.groupings import asked, form

SYSTEM = {"role": "system", "content": "be brief"}


def best_of(
    prompts: Sequence[str], *, names: Sequence[str] = (), parents: Sequence[str | None] = (), **about: Any
) -> Trajectory:
    """A run with one span for each prompt; the first call of a span says the prompt, a second one goes on."""
    calls, spans = [], []
    for number, prompt in enumerate(prompts):
        parent = parents[number] if parents else "root"
        spans.append(
            SpanInfo(f"s{number}", "run", names[number] if names else "try", float(number), parent, number + 0.5)
        )
        spans.append(SpanInfo(f"inner{number}", "run", "write", float(number), f"s{number}"))
        said = (SYSTEM, {"role": "user", "content": prompt})
        more = (*said, {"role": "assistant", "content": "hm"}, {"role": "user", "content": f"go on {number}"})
        calls.append(make_call(f"c{number}a", trajectory_id="run", messages=said, span_id=f"s{number}"))
        calls.append(make_call(f"c{number}b", trajectory_id="run", messages=more, span_id=f"inner{number}"))
    spans.append(SpanInfo("root", "run", "best of n", 0.0))
    return replace(make_trajectory("run", *calls, **about), spans=tuple(spans))


def test_attempts_at_one_task_are_siblings():
    run = best_of(["fix ORD-12345", "fix ORD-67890", "Fix ORD-12345"], user_id="u", session_id="s", name="agent")
    grouping = form(run)
    (group,) = grouping.groups
    assert (group.how, len(group.trajectories), grouping.derived) == ("sibling_spans", 3, group.trajectories)
    assert (grouping.waiting, grouping.left) == ((), {"its spans are siblings": 1})
    made = [*grouping.derived, *(call for t in grouping.derived for call in t.calls)]
    assert len({one.id for one in made} - {call.id for call in run.calls}) == len(made)
    for number, attempt in enumerate(grouping.derived):
        about = attempt.info
        assert (about.origin, about.name, about.user_id, about.session_id) == ("span", "try", "u", "s")
        assert (about.started_at, about.ended_at) == (number, number + 0.5)
        assert [call.shadow_of for call in attempt.calls] == [f"c{number}a", f"c{number}b"]
        assert {call.trajectory_id for call in attempt.calls} == {attempt.id}
        assert [c.messages for c in attempt.calls] == [c.messages for c in run.calls[2 * number : 2 * number + 2]]


def test_parallel_work_on_other_tasks_is_not_grouped():
    grouping = form(best_of(["look up plums", "look up pears"]))
    assert (grouping.groups, grouping.derived, len(grouping.waiting)) == ((), (), 1)


def test_attempts_need_one_name_and_one_parent():
    assert form(best_of(["x", "x"], names=["draft", "check"])).groups == ()
    assert form(best_of(["x", "x"], parents=["p", "q"])).groups == ()
    assert len(form(best_of(["x", "x"], parents=[None, None])).groups) == 1


def test_attempts_that_know_of_earlier_ones_are_not_siblings():
    run = best_of(["x", "x"])
    later = ({"role": "assistant", "content": "the first attempt"}, *run.calls[2].messages)
    calls = (*run.calls[:2], replace(run.calls[2], messages=later), run.calls[3])
    assert form(replace(run, calls=calls)).groups == ()


def test_inner_attempts_do_not_teach_what_outer_ones_do():
    run = best_of(["x", "x"])
    more = tuple(SpanInfo(f"again{n}", "run", "write", 9.0, "s0") for n in range(2))
    calls = tuple(make_call(f"m{n}", trajectory_id="run", span_id=f"again{n}") for n in range(2))
    (group,) = form(replace(run, calls=(*run.calls, *calls), spans=(*more, *run.spans))).groups
    assert [t.info.name for t in group.trajectories] == ["try", "try"]


def test_what_cannot_be_trained_is_no_attempt():
    run = best_of(["x", "x", "x"])
    calls = tuple(replace(c, untrainable="no answer") if c.id.startswith("c1") else c for c in run.calls)
    assert len(form(replace(run, calls=calls)).derived) == 2


def test_a_run_with_siblings_is_compared_as_a_whole():
    other = asked("other", "x", scenario_key="k")
    grouping = form(best_of(["x", "x"], scenario_key="k"), other)
    assert ([g.how for g in grouping.groups], grouping.derived) == (["scenario_key"], ())


def test_attempts_are_on_the_side_of_their_run():
    for number in range(20):
        run = best_of([f"task {number}"] * 2)
        (whole,) = form(replace(run, spans=()), replace(run, spans=()), holdout_share=0.5).groups
        (attempts,) = form(run, holdout_share=0.5).groups
        assert attempts.held_out == whole.held_out
        assert attempts.scenario_key.startswith(whole.scenario_key)


def test_spans_in_a_loop_end():
    run = best_of(["x", "x"])
    loop = tuple(replace(span, parent_id="s0") if span.id == "root" else span for span in run.spans)
    assert form(replace(run, spans=loop)).left
