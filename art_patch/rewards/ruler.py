"""RULER as functions, for users of OpenPipe ART: they take message lists or one group, and return scores.

Names and the order of arguments are ART's, so `await ruler(message_lists, "openai/o3", rubric=...)` works unchanged.
These functions differ from ART's in four ways:

- The caller must name the judge, because a default judge would cost money by surprise.
- A `TrajectoryGroup` is returned with the judge's scores as rewards, as in ART. In a `Group` of art_patch each sibling
  gets a score named `ruler`; `rewards_G(group)` computes rewards from these scores.
- The judge sees the attempts shuffled, under random ids. `TrajectoryScore.trajectory_id` is the attempt's place in
  `message_lists`, counted from 1 as in ART, and the scores are returned in the order of `message_lists`.
- After an invalid answer the judge is asked once more; if that answer is invalid too, `JudgeError` is raised. An answer
  with too few or too many scores is never padded or cut to size.
"""

import asyncio
import secrets
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, ParamSpec, Protocol, Self, TypeVar, cast

from art_patch.errors import JudgeError
from art_patch.rewards.combine import with_scores
from art_patch.rewards.judge.prompt import DEFAULT_RUBRIC, Rubric
from art_patch.rewards.judge.ruler import Judge
from art_patch.trajectories import as_run
from art_patch.types import JSON, Group


@dataclass(frozen=True, slots=True)
class TrajectoryScore:
    """The judge's score of one message list, and the judge's reason for it."""

    trajectory_id: str  # the place in the list, counted from 1
    explanation: str
    score: float  # 0 to 1; comparable with scores of the same call only


class Rankable(Protocol):
    """Protocol of a group of another type that the judge can rank, such as a `TrajectoryGroup`."""

    def as_group(self) -> Group:
        """Return the siblings as a `Group` of art_patch, which the judge can read."""
        ...

    def ranked(self, scored: Group) -> Self:
        """Return the group with the judge's scores; `scored` is the result of `as_group` with its scores."""
        ...


AnyGroup = TypeVar("AnyGroup", bound="Group | Rankable")
P = ParamSpec("P")
T = TypeVar("T")


def ruler_sync(
    message_lists: Sequence[Sequence[JSON]],
    judge_model: str | None,
    extra_litellm_params: Mapping[str, Any] | None = None,
    rubric: Rubric | str | None = None,
    tools: Sequence[JSON] | None = None,
    *,
    debug: bool = False,
    **judge: Any,
) -> list[TrajectoryScore]:
    """Score attempts at one task against each other; an empty list for no attempts. `ruler` is the async version.

    Args:
        message_lists: one list of OpenAI messages for each attempt; the last message is the answer.
        judge_model: litellm's name of the judge, such as `openai/o3` or `hosted_vllm/NAME`.
        extra_litellm_params: further arguments of `litellm.completion`, such as `reasoning_effort`.
        rubric: what makes an attempt good, in words; the default rubric if omitted.
        tools: the tools that the attempts could call, as OpenAI JSON.
        debug: true prints each score and the judge's reason for it.
        judge: further arguments of `Judge`, such as `base_url`, `api_key` and `budget`.

    Raises:
        JudgeError: no judge is named, it gave no valid scores, or the budget is used up.
    """
    if not message_lists:
        return []
    siblings = [as_run(str(n), said, tools or (), what="ruler") for n, said in enumerate(message_lists, start=1)]
    # The order is shuffled by the group's id. With a fixed id, the first attempt would always stand in the same place.
    group = Group(secrets.token_hex(16), "ruler", "group_key", tuple(siblings))
    scored = ruler_score_group_sync(group, judge_model, extra_litellm_params, rubric, debug=debug, **judge)
    assert scored is not None  # nothing is swallowed here
    return [TrajectoryScore(t.id, t.scores[-1].comment or "", t.scores[-1].value) for t in scored.trajectories]


def ruler_score_group_sync(
    group: AnyGroup,
    judge_model: str | None,
    extra_litellm_params: Mapping[str, Any] | None = None,
    rubric: Rubric | str | None = None,
    *,
    swallow_exceptions: bool = False,
    debug: bool = False,
    **judge: Any,
) -> AnyGroup | None:
    """Score the siblings of one group against each other. `ruler_score_group` is the async version.

    The returned group has a score for each sibling; in a `TrajectoryGroup` the score is the reward. The arguments about
    the judge are those of `ruler_sync`, and so are the errors. With `swallow_exceptions` the result is `None` instead
    of a `JudgeError`.
    """
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
    scored = with_scores(asked, report.scores)
    if debug:
        for number, sibling in enumerate(scored.trajectories, start=1):
            print(f"[RULER] {number}: {sibling.scores[-1].value:g}: {sibling.scores[-1].comment}")
    return cast("AnyGroup", scored if isinstance(group, Group) else cast("Rankable", group).ranked(scored))


def _in_thread(blocking: Callable[P, T]) -> Callable[P, Coroutine[Any, Any, T]]:
    """Return a coroutine function that runs the blocking function in a thread, so the event loop goes on."""

    @wraps(blocking)
    async def awaitable(*args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.to_thread(blocking, *args, **kwargs)

    awaitable.__name__ = blocking.__name__.removesuffix("_sync")
    return awaitable


# Names and order of arguments are those of OpenPipe ART.
ruler = _in_thread(ruler_sync)
ruler_score_group = _in_thread(ruler_score_group_sync)
