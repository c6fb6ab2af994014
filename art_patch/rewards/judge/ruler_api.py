"""RULER as functions, for those who know it from OpenPipe ART: message lists or one group in, scores out.

Names and the order of arguments are ART's, so `await ruler(message_lists, "openai/o3", rubric=...)` works unchanged.
What differs, and why:

- The judge must be named: there is no default that costs money by surprise.
- A `TrajectoryGroup` comes back as one whose rewards are the judge's, as in ART. Our own `Group` comes back with a
  `ruler` score for each sibling; `rewards_G(group)` are the rewards. There is no `reward` to overwrite: scores stand
  side by side.
- Attempts reach the judge shuffled under random ids. `TrajectoryScore.trajectory_id` is the place in `message_lists`,
  counted from 1 as in ART, and the scores come back in that order.
- An answer that is no valid verdict is never filled up or cut to size: it is repaired once, or there is no score.

The functions ending in `_sync` do the same without an event loop. `Judge` does it for many groups at once.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self, TypeVar, cast

from art_patch.errors import JudgeError
from art_patch.rewards.judge.budget import Budget
from art_patch.rewards.judge.rubric import DEFAULT_RUBRIC, Rubric
from art_patch.rewards.judge.ruler import Judge
from art_patch.types import JSON, Call, Choice, Group, Trajectory, TrajectoryInfo


@dataclass(frozen=True, slots=True)
class TrajectoryScore:
    """What the judge said of one message list.

    Attributes:
        trajectory_id: its place in the list, counted from 1.
        explanation: why.
        score: 0 to 1; it means something only beside the scores of the same call.
    """

    trajectory_id: str
    explanation: str
    score: float


class Rankable(Protocol):
    """A group of another kind that can be shown to the judge, such as a `TrajectoryGroup`."""

    def as_group(self) -> Group:
        """Return its siblings as the judge takes them."""
        ...

    def ranked(self, scored: Group) -> Self:
        """Return the group with what the judge said; `scored` is that of `as_group`, each sibling with its score."""
        ...


AnyGroup = TypeVar("AnyGroup", bound="Group | Rankable")


async def ruler(
    message_lists: Sequence[Sequence[JSON]],
    judge_model: str | None,
    extra_litellm_params: Mapping[str, Any] | None = None,
    rubric: Rubric | str | None = None,
    tools: Sequence[JSON] | None = None,
    *,
    base_url: str | None = None,
    api_key: str | None = None,
    budget: Budget | None = None,
) -> list[TrajectoryScore]:
    """Score attempts at the same task against each other, in a thread of its own.

    Args:
        message_lists: one list of OpenAI messages for each attempt.
        judge_model: litellm's name of the judge, such as `openai/o3` or `hosted_vllm/NAME`.
        extra_litellm_params: further arguments of `litellm.completion`, such as `reasoning_effort`.
        rubric: what the judge should value; the default rubric unless given.
        tools: the tools that were offered, as OpenAI JSON.
        base_url: address of the judge where it is not the provider's own.
        api_key: key where litellm does not find it in the environment.
        budget: what this may cost.

    Returns:
        One score for each list, in the same order; none for no lists.

    Raises:
        JudgeError: the judge is missing or gave no valid scores, or the budget is used up.
    """
    given = (message_lists, judge_model, extra_litellm_params, rubric, tools)
    return await asyncio.to_thread(ruler_sync, *given, base_url=base_url, api_key=api_key, budget=budget)


async def ruler_score_group(
    group: AnyGroup,
    judge_model: str | None,
    extra_litellm_params: Mapping[str, Any] | None = None,
    rubric: Rubric | str | None = None,
    *,
    swallow_exceptions: bool = False,
    base_url: str | None = None,
    api_key: str | None = None,
    budget: Budget | None = None,
) -> AnyGroup | None:
    """Score the siblings of one group against each other, in a thread of its own.

    Args:
        group: the siblings.
        judge_model: litellm's name of the judge.
        extra_litellm_params: further arguments of `litellm.completion`.
        rubric: what the judge should value; the default rubric unless given.
        swallow_exceptions: return `None` where a `JudgeError` would be raised.
        base_url: address of the judge where it is not the provider's own.
        api_key: key where litellm does not find it in the environment.
        budget: what this may cost.

    Returns:
        The group, each sibling with its score added; of a `TrajectoryGroup` the score is the reward.

    Raises:
        JudgeError: the judge is missing or gave no valid scores, or the budget is used up.
    """
    given = (group, judge_model, extra_litellm_params, rubric)
    return await asyncio.to_thread(
        ruler_score_group_sync,
        *given,
        swallow_exceptions=swallow_exceptions,
        base_url=base_url,
        api_key=api_key,
        budget=budget,
    )


def ruler_sync(
    message_lists: Sequence[Sequence[JSON]],
    judge_model: str | None,
    extra_litellm_params: Mapping[str, Any] | None = None,
    rubric: Rubric | str | None = None,
    tools: Sequence[JSON] | None = None,
    **judge: Any,
) -> list[TrajectoryScore]:
    """Do what `ruler` does in this thread; further arguments are those of `Judge`."""
    if not message_lists:
        return []
    siblings = [_trajectory(str(n), messages, tools or ()) for n, messages in enumerate(message_lists, start=1)]
    # The order is shuffled by the group's id, so that must be another one each time.
    group = Group(secrets.token_hex(16), "ruler", "group_key", tuple(siblings))
    scored = ruler_score_group_sync(group, judge_model, extra_litellm_params, rubric, **judge)
    assert scored is not None  # nothing is swallowed here
    return [TrajectoryScore(t.id, t.scores[-1].comment or "", t.scores[-1].value) for t in scored.trajectories]


def ruler_score_group_sync(
    group: AnyGroup,
    judge_model: str | None,
    extra_litellm_params: Mapping[str, Any] | None = None,
    rubric: Rubric | str | None = None,
    *,
    swallow_exceptions: bool = False,
    **judge: Any,
) -> AnyGroup | None:
    """Do what `ruler_score_group` does in this thread; further arguments are those of `Judge`."""
    asked = group if isinstance(group, Group) else cast("Rankable", group).as_group()
    try:
        standard = Rubric(rubric) if isinstance(rubric, str) else rubric or DEFAULT_RUBRIC
        report = Judge(judge_model, rubric=standard, extra=extra_litellm_params, **judge).score_groups([asked])
        if report.unscored:
            raise JudgeError(f"the group has no scores: {report.unscored[asked.id]}")
    except JudgeError:
        if swallow_exceptions:
            return None
        raise
    score_of = {score.trajectory_id: score for score in report.scores}
    siblings = tuple(replace(t, scores=(*t.scores, score_of[t.id])) for t in asked.trajectories)
    scored = replace(asked, trajectories=siblings)
    return cast("AnyGroup", scored if isinstance(group, Group) else cast("Rankable", group).ranked(scored))


def _trajectory(key: str, messages: Sequence[JSON], tools: Sequence[JSON]) -> Trajectory:
    """The messages as a run of one call, whose answer is the last of them."""
    info = TrajectoryInfo(key, 0.0)
    if not messages:
        return Trajectory(info, ())
    *prompt, answer = messages
    return Trajectory(info, (Call(key, key, 0.0, "", tuple(prompt), (Choice(0, answer),), tuple(tools)),))
