"""Many rollouts at once: order, exceptions, the end of what still runs; and the decorators."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

import pytest

import art_patch as art
from tests.support.scripted import choice

USER = {"role": "user", "content": "hi"}


class Lost(Exception):
    """A rollout that went wrong."""


async def rollout(number: int, *, fails: bool = False) -> art.Trajectory:
    await asyncio.sleep(0)
    trajectory = art.Trajectory(messages_and_choices=[USER, choice()], reward=float(number))
    if fails:
        trajectory.log("about to fail")
        raise Lost(f"number {number}")
    return trajectory


def gather(groups: Any, **how: Any) -> list[art.TrajectoryGroup]:
    return asyncio.run(art.gather_trajectory_groups(groups, pbar_desc=None, **how))


def group(*numbers: int, failing: tuple[int, ...] = ()) -> Awaitable[art.TrajectoryGroup]:
    return art.TrajectoryGroup((rollout(n, fails=n in failing) for n in numbers), metadata={"first": numbers[0]})


def rewards(groups: list[art.TrajectoryGroup]) -> list[list[float]]:
    return [[trajectory.reward for trajectory in each] for each in groups]


def test_groups_come_in_their_order_with_their_tokens_counted():
    found = gather([group(1, 2), group(3, 4)])
    assert rewards(found) == [[1, 2], [3, 4]]
    assert [each.metadata for each in found] == [{"first": 1}, {"first": 3}]
    assert found[0].trajectories[0].metrics == {"completion_tokens": 2}


def test_one_that_raises_costs_nobody_else_theirs_and_keeps_its_trajectory():
    (found,) = gather([group(1, 2, 3, failing=(2,))], max_exceptions=1)
    assert rewards([found]) == [[1, 3]]
    (failure,) = found.exceptions
    assert (failure.type, failure.message) == ("Lost", "number 2")
    assert "in rollout" in failure.traceback
    assert failure.trajectory is not None
    assert failure.trajectory.logs == ["about to fail"]


@pytest.mark.parametrize(("allowed", "raises"), [(0, True), (1, True), (2, False), (0.49, True), (0.5, False)])
def test_one_exception_too_many_is_raised(allowed: float, raises: bool):
    waiting = [group(1, 2, failing=(2,)), group(3, 4, failing=(4,))]
    if raises:
        with pytest.raises(Lost):
            gather(waiting, max_exceptions=allowed)
    else:
        assert rewards(gather(waiting, max_exceptions=allowed)) == [[1], [3]]


def test_when_one_is_too_many_the_others_are_ended():
    ended: list[str] = []

    async def slow() -> art.Trajectory:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("slow")
        raise AssertionError

    with pytest.raises(Lost):
        gather([art.TrajectoryGroup([slow(), rollout(1, fails=True)])])
    assert ended == ["slow"]


def test_what_comes_after_each_takes_its_place():
    async def after(each: art.TrajectoryGroup) -> Any:
        first = each.metadata["first"]
        return None if first == 1 else [each, each] if first == 2 else each

    found = gather([group(1), group(2), group(3)], after_each=after)
    assert rewards(found) == [[2], [2], [3]]


def test_groups_of_coroutines_of_groups():
    async def whole(number: int) -> art.TrajectoryGroup:
        if number == 2:
            raise Lost
        return await group(number, number)

    assert rewards(gather([whole(1), whole(2)], max_exceptions=1)) == [[1, 1]]


def test_trajectories_alone_or_several_of_each():
    async def several() -> list[art.Trajectory]:
        return [await rollout(1), await rollout(2)]

    async def both() -> tuple[Any, Any]:
        one = [rollout(1), rollout(2, fails=True)]
        return (
            await art.gather_trajectories(one, pbar_desc=None, max_exceptions=1),
            await art.gather_trajectories([several()], pbar_desc=None),
        )

    (first, error), ((one, two),) = asyncio.run(both())
    assert (first.reward, str(error), one.reward, two.reward) == (1, "number 2", 1, 2)
    with pytest.raises(art.ConfigError, match="max_exceptions=-1"):
        asyncio.run(art.gather_trajectories([], max_exceptions=-1))


def test_a_group_may_be_awaited_by_itself():
    async def alone() -> art.TrajectoryGroup:
        return await art.TrajectoryGroup([rollout(1), rollout(2, fails=True)])

    found = asyncio.run(alone())
    assert (rewards([found]), [each.message for each in found.exceptions]) == ([[1]], ["number 2"])


def test_gatherings_at_once_share_a_display(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal

    async def both() -> None:
        await asyncio.gather(
            art.gather_trajectory_groups([group(1, 2, failing=(2,))], pbar_desc="train", max_exceptions=1),
            art.gather_trajectories([rollout(3)], pbar_desc="val"),
        )

    asyncio.run(both())
    shown = capsys.readouterr().err
    assert "train" in shown
    assert "val" in shown
    assert "exceptions=1" in shown


def test_retry_calls_again_what_raised():
    calls: list[int] = []

    def flaky(until: int) -> int:
        calls.append(until)
        if len(calls) < until:
            raise Lost(f"call {len(calls)}")
        return len(calls)

    async def flaky_too(until: int) -> int:
        return flaky(until)

    told: list[tuple[str, int]] = []
    again = art.retry(delay=0.0, on_retry=lambda error, attempt: told.append((str(error), attempt)))
    assert again(flaky)(3) == 3
    assert told == [("call 1", 1), ("call 2", 2)]
    calls.clear()
    assert asyncio.run(again(flaky_too)(2)) == 2  # type: ignore[arg-type]
    calls.clear()
    with pytest.raises(Lost, match="call 3"):
        again(flaky)(9)
    calls.clear()
    with pytest.raises(Lost, match="call 1"):
        art.retry(exceptions=(ValueError,))(flaky)(3)
    with pytest.raises(art.ConfigError, match="max_attempts=0"):
        art.retry(max_attempts=0)


def test_no_more_run_at_once_than_are_let_by_key():
    running: dict[str, int] = {}
    most: dict[str, int] = {}

    @art.limit_concurrency(2, derive_key=lambda key: key)
    async def one(key: str) -> None:
        running[key] = running.get(key, 0) + 1
        most[key] = max(most.get(key, 0), running[key])
        await asyncio.sleep(0.001)
        running[key] -= 1

    async def all_of_them() -> None:
        await asyncio.gather(*(one(key) for key in "aaaaab"))

    for _ in range(2):  # an event loop of its own each
        asyncio.run(all_of_them())
    assert most == {"a": 2, "b": 1}
    with pytest.raises(art.ConfigError, match="n=0"):
        art.limit_concurrency(0)
