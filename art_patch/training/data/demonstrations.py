"""Answers worth imitating to rows for supervised learning: upstream's good ones, and corrections. Pure.

They have no token ids, so prompts and answers are rendered (`art_patch.training.data.rendering`); what cannot be
rendered exactly is left out and counted. Each answer is learned once, however often its run was grouped or copied.
Turns that extend each other share a row, as recorded ones do. Of a run that was corrected only the corrected answer is
learned (`art_patch.formats.conversation`). Held-out groups teach nothing.

In the rows `sampled_T` marks what is learned; there are no log-probabilities to record, and the temperature is 1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from art_patch.formats import Unusable, corrected
from art_patch.training.data.rendering import Renderer
from art_patch.training.data.rows import Row, Turn, cut, merge
from art_patch.trajectories import KEPT_BY_PROVIDER, chosen_choice
from art_patch.types import UPSTREAM, Call, Choice, Correction, Group, Trajectory

Scored = tuple[Group, Sequence[float | None]]
"""A group and the reward of each sibling, in their order."""
Corrected = tuple[Trajectory, Sequence[Correction]]
"""A run and what was said of it; at least one correction."""

PROMPT_REASONS: tuple[tuple[str, Callable[[Call], bool]], ...] = (
    ("a completion is not a chat", lambda call: call.api == "completions"),
    ("the provider holds a part of the prompt", lambda call: any(name in call.params for name in KEPT_BY_PROVIDER)),
)
"""Why a call's prompt is not wholly known."""

_REASONS: tuple[tuple[str, Callable[[Call], bool]], ...] = (
    *PROMPT_REASONS,
    ("answered by a policy", lambda call: call.policy is not UPSTREAM),
    ("the call did not end well", lambda call: call.status != "ok"),
)


@dataclass(frozen=True, slots=True)
class Demonstrations:
    """What is imitated.

    Attributes:
        rows: what is learned is marked as sampled.
        left_out: calls of which nothing is learned, by reason.
    """

    rows: tuple[Row, ...]
    left_out: Mapping[str, int]


def demonstrations(
    scored: Iterable[Scored],
    corrections: Iterable[Corrected],
    renderer: Renderer,
    *,
    least_reward: float,
    max_tokens: int,
) -> Demonstrations:
    """Return rows of answers that upstream gave in good runs, and of those that people gave instead.

    Args:
        scored: groups with rewards; of a run in several, its best counts.
        corrections: runs that were corrected, none of them of a held-out scenario.
        renderer: of the base model.
        least_reward: runs with less are not imitated.
        max_tokens: a row is cut there, as recorded ones are.
    """
    rows: list[Row] = []
    left_out: Counter[str] = Counter()
    learned: set[str] = set()
    put_right: set[str] = set()
    for trajectory, said in corrections:
        put_right.add(trajectory.id)
        learned |= {_origin(call) for call in trajectory.calls}  # nor from copies
        rows += merge(_put_right(trajectory, said, renderer, left_out))
    for trajectory in _good(scored, least_reward, put_right, left_out):
        rows += merge(_imitated(trajectory, renderer, learned, left_out))
    return Demonstrations(cut(rows, max_tokens), dict(left_out))


def why_not_whole(call: Call) -> str | None:
    """Return why a call's prompt is not wholly known, `None` if it is."""
    return next((reason for reason, holds in PROMPT_REASONS if holds(call)), None)


def ended(choice: Choice) -> bool:
    """Whether an answer came to its end by itself."""
    return choice.finish_reason in ("stop", "tool_calls", "function_call")


def _good(
    scored: Iterable[Scored], least_reward: float, put_right: set[str], left_out: Counter[str]
) -> Iterator[Trajectory]:
    """Each run with reward enough, once; the calls of others are counted, and those of corrected runs passed over."""
    best: dict[str, tuple[Trajectory, float | None]] = {}
    for group, rewards_G in scored:
        for trajectory, reward in zip(group.trajectories, rewards_G, strict=True):
            if group.held_out:
                left_out["held out for the gate"] += len(trajectory.calls)
            elif trajectory.id not in put_right:
                _, known = best.get(trajectory.id, (trajectory, None))
                both = [each for each in (known, reward) if each is not None]
                best[trajectory.id] = trajectory, max(both, default=None)
    for trajectory, reward in best.values():
        if reward is not None and reward >= least_reward:
            yield trajectory
        else:
            left_out["no reward" if reward is None else "reward too low"] += len(trajectory.calls)


def _imitated(trajectory: Trajectory, renderer: Renderer, learned: set[str], left_out: Counter[str]) -> Iterator[Turn]:
    for position, call in enumerate(trajectory.calls):
        try:
            if _origin(call) in learned:
                raise Unusable("learned from another copy")
            yield renderer.turn(call, _upstreams(call, trajectory.calls[position + 1 :]).message)
            learned.add(_origin(call))
        except Unusable as reason:
            left_out[str(reason)] += 1


def _origin(call: Call) -> str:
    return call.shadow_of or call.id


def _upstreams(call: Call, later: Sequence[Call]) -> Choice:
    """Return upstream's whole answer, or say why there is none."""
    reason = next((reason for reason, holds in _REASONS if holds(call)), None)
    choice = chosen_choice(call, later)
    if reason is not None or choice is None:
        raise Unusable(reason or "no answer")
    if not ended(choice):
        raise Unusable("the answer was cut")
    return choice


def _put_right(
    trajectory: Trajectory, said: Sequence[Correction], renderer: Renderer, left_out: Counter[str]
) -> Iterator[Turn]:
    try:
        (call,) = corrected(trajectory, said).calls
        if (reason := why_not_whole(call)) is not None:
            raise Unusable(reason)
        yield renderer.turn(call, call.choices[0].message)
    except Unusable as reason:
        left_out[str(reason)] += 1
