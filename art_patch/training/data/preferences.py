"""Pairs of a better and a worse answer to the same prompt: from corrections, and from groups. Pure.

A pair of a correction is one answer against another. A pair of a group is one run against another: the best and the
worst of the siblings whose first prompt is the same, token for token, with everything that each answered marked. A run
that forks into several rows is in no pair.

Recorded ids are used where there are any; what upstream or a person said is rendered
(`art_patch.training.data.rendering`). In both rows `sampled_T` marks what was answered; log-probabilities are not
recorded (the reference's are computed), and the temperature is 1. Nothing is cut: half an answer would be preferred to
another half.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from art_patch.formats import Unusable, right_and_wrong
from art_patch.training.data.demonstrations import Corrected, Scored, ended, why_not_whole
from art_patch.training.data.rendering import Renderer
from art_patch.training.data.rows import Row, Turn, merge
from art_patch.trajectories import chosen_choice
from art_patch.types import Call, Choice, Correction, Trajectory


@dataclass(frozen=True, slots=True)
class Pair:
    """Two rows that begin with the same prompt.

    Attributes:
        chosen: the better one.
        rejected: the worse one.
        source: who prefers it: people by a `correction`, or the rewards of a `group`.
    """

    chosen: Row
    rejected: Row
    source: Literal["correction", "group"]


@dataclass(frozen=True, slots=True)
class Preferences:
    """What is preferred.

    Attributes:
        pairs: of corrections, then of groups.
        left_out: runs that could be in no pair, and prompts of a group that gave none, by reason.
    """

    pairs: tuple[Pair, ...]
    left_out: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class _Sibling:
    reward: float
    prompt_ids: tuple[int, ...]
    row: Row
    whole: bool


def preferences(
    scored: Iterable[Scored],
    corrections: Iterable[Corrected],
    renderer: Renderer,
    *,
    margin: float,
    max_tokens: int,
) -> Preferences:
    """Return the pairs.

    Args:
        scored: groups with rewards.
        corrections: runs that were corrected, none of them of a held-out scenario.
        renderer: of the base model.
        margin: the least that two siblings' rewards must differ by; above 0.
        max_tokens: pairs with a longer row are left out.
    """
    pairs: list[Pair] = []
    left_out: Counter[str] = Counter()
    for trajectory, said in corrections:
        try:
            pairs.append(_pair(*_right_and_wrong(trajectory, said, renderer), "correction", max_tokens))
        except Unusable as reason:
            left_out[str(reason)] += 1
    for group, rewards_G in scored:
        if group.held_out:
            left_out["held out for the gate"] += len(group.trajectories)
            continue
        siblings = list(_siblings(group.trajectories, rewards_G, renderer, left_out))
        for better, worse in _extremes(siblings, margin, left_out):
            try:
                pairs.append(_pair(better.row, worse.row, "group", max_tokens))
            except Unusable as reason:
                left_out[str(reason)] += 1
    return Preferences(tuple(pairs), dict(left_out))


def _right_and_wrong(trajectory: Trajectory, said: Sequence[Correction], renderer: Renderer) -> tuple[Row, Row]:
    right, _ = right_and_wrong(trajectory, said)
    (call,) = right.calls
    position = next(index for index, each in enumerate(trajectory.calls) if each.id == call.id)
    chosen = _rendered(call, call.choices[0], renderer)
    rejected = _turn(trajectory.calls[position], trajectory.calls[position + 1 :], renderer)
    if chosen.prompt_ids != rejected.prompt_ids:
        raise Unusable("the chat template renders another prompt than was recorded")
    return merge([chosen])[0], merge([rejected])[0]


def _siblings(
    trajectories: Sequence[Trajectory], rewards_G: Sequence[float | None], renderer: Renderer, left_out: Counter[str]
) -> Iterator[_Sibling]:
    for trajectory, reward in zip(trajectories, rewards_G, strict=True):
        try:
            if reward is None:
                raise Unusable("no reward")
            yield _sibling(trajectory, reward, renderer)
        except Unusable as reason:
            left_out[str(reason)] += 1


def _sibling(trajectory: Trajectory, reward: float, renderer: Renderer) -> _Sibling:
    answered = [index for index, call in enumerate(trajectory.calls) if call.choices]
    if not answered:
        raise Unusable("no answer")
    turns = [_turn(trajectory.calls[index], trajectory.calls[index + 1 :], renderer) for index in answered]
    rows = merge(turns)
    if len(rows) != 1:
        raise Unusable("the run forks into several rows")
    last = trajectory.calls[answered[-1]]
    choice = chosen_choice(last, ())
    return _Sibling(reward, turns[0].prompt_ids, rows[0], choice is not None and last.status == "ok" and ended(choice))


def _extremes(
    siblings: Sequence[_Sibling], margin: float, left_out: Counter[str]
) -> Iterator[tuple[_Sibling, _Sibling]]:
    """The best that came to its end, and the worst, of those that share a prompt."""
    for prompt_ids in dict.fromkeys(sibling.prompt_ids for sibling in siblings):
        same = [sibling for sibling in siblings if sibling.prompt_ids == prompt_ids]
        best = max((each for each in same if each.whole), key=lambda each: each.reward, default=None)
        worst = min(same, key=lambda each: each.reward)
        if best is None or best.reward - worst.reward < margin:
            left_out["no two siblings with this prompt differ enough"] += 1
        else:
            yield best, worst


def _pair(chosen: Row, rejected: Row, source: Literal["correction", "group"], max_tokens: int) -> Pair:
    if chosen == rejected:
        raise Unusable("both answers are the same")
    if max(len(chosen.ids_T), len(rejected.ids_T)) > max_tokens:
        raise Unusable("longer than max_tokens")
    return Pair(chosen, rejected, source)


def _turn(call: Call, later: Sequence[Call], renderer: Renderer) -> Turn:
    """A call's answer by its recorded ids, or rendered."""
    choice = chosen_choice(call, later)
    if choice is None:
        raise Unusable("no answer")
    if call.prompt_token_ids and choice.token_ids:
        return Turn(call.prompt_token_ids, choice.token_ids, (0.0,) * len(choice.token_ids))
    if call.status != "ok" or not ended(choice):
        raise Unusable("the answer was cut")
    return _rendered(call, choice, renderer)


def _rendered(call: Call, choice: Choice, renderer: Renderer) -> Turn:
    if (reason := why_not_whole(call)) is not None:
        raise Unusable(reason)
    return renderer.turn(call, choice.message)
