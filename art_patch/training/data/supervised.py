"""Makes rows (token sequences) for supervised learning: answers to imitate, and pairs of a better and a worse answer.

The answers to imitate are upstream's answers in runs of high reward, and the answers that people wrote as corrections.
No answer of upstream's is learned, as the better or the worse one, unless its model is allowed by name: the terms of
many providers forbid it.
Pairs come from corrections (the corrected answer against the recorded one) and from groups (the best sibling against
the worst). Recorded token ids are used where they exist. Answers of upstream or of a person have none, so their prompt
and answer are rendered with the chat template (`art_patch.training.data.rendering`). Runs and calls that give no row or
pair are counted by reason; the reasons are texts of `Unusable`. Held-out groups are never used.

`rows_of_file` does the same for a training file: its user chose what is learned, so all of it is.

In all rows `sampled_T` marks the tokens that are learned. `logprobs_T` is 0 and the temperature is 1 at every token,
because supervised losses need neither.
"""

from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from art_patch.errors import ConfigError
from art_patch.formats import Unusable, corrected, right_and_wrong
from art_patch.training.data.rendering import Renderer
from art_patch.training.data.rows import Row, Turn, cut, merge
from art_patch.trajectories import KEPT_BY_PROVIDER, chosen_choice
from art_patch.types import UPSTREAM, Call, Choice, Correction, Group, Trajectory

Scored = tuple[Group, Sequence[float | None]]  # a group, and the reward of each sibling in their order
Corrected = tuple[Trajectory, Sequence[Correction]]  # a run and its corrections, at least one

PairSource = Literal["correction", "group", "file"]

MayImitate = Callable[[str], bool]  # whether answers of a model that the app requested may be learned

Reasons = tuple[tuple[str, Callable[[Call], bool]], ...]
_PROMPT_IS_NOT_WHOLE: Reasons = (
    ("a completion is not a chat", lambda call: call.api == "completions"),
    ("the provider holds a part of the prompt", lambda call: any(name in call.params for name in KEPT_BY_PROVIDER)),
)


_NOT_IMITATED: Reasons = (
    *_PROMPT_IS_NOT_WHOLE,
    ("answered by a policy", lambda call: call.policy is not UPSTREAM),
    ("the call did not end well", lambda call: call.status != "ok"),
)


@dataclass(frozen=True, slots=True)
class Demonstrations:
    """Result of `demonstrations`: the answers that the policy will imitate."""

    rows: tuple[Row, ...]  # token sequences in which the tokens of the answers are marked as sampled
    left_out: Mapping[str, int]  # number of calls whose answers are not imitated, by reason


def demonstrations(
    scored: Iterable[Scored], corrections: Iterable[Corrected], renderer: Renderer, *, least_reward: float,
    max_tokens: int, may_imitate: MayImitate,
) -> Demonstrations:  # fmt: skip
    """Returns rows of the answers to imitate: upstream's answers in runs of high reward, and people's corrections.

    An answer is learned only once, even if its run is in several groups or its call was copied by a shadow. A corrected
    run gives its corrected answer and nothing else.

    Args:
        scored: Groups with the reward of each sibling. For a run in several groups, the highest reward counts.
        corrections: Runs that people corrected; none of them may belong to a held-out scenario.
        least_reward: Lowest reward at which a run is imitated.
        max_tokens: Tokens of a row after this number are cut off and not learned.
        may_imitate: Whether answers of a requested model may be learned, by its name; by default none may.
    """
    rows: list[Row] = []
    left_out: Counter[str] = Counter()
    learned: set[str] = set()
    put_right: set[str] = set()
    for trajectory, said in corrections:
        # Of a corrected run only the corrected answer is learned, and nothing from copies of its calls either.
        put_right.add(trajectory.id)
        learned |= {_origin(call) for call in trajectory.calls}
        rows += merge(_put_right(trajectory, said, renderer, left_out))
    # After the corrections: `learned` must know their calls before copies of them are met.
    for trajectory in _good(scored, least_reward, put_right, left_out):
        rows += merge(_imitated(trajectory, renderer, learned, left_out, may_imitate))
    return Demonstrations(cut(rows, max_tokens), dict(left_out))


def _good(
    scored: Iterable[Scored], least_reward: float, put_right: set[str], left_out: Counter[str]
) -> Iterator[Trajectory]:
    """Yields each run of sufficient reward once, counts the calls of other runs, and skips corrected runs."""
    best: dict[str, tuple[Trajectory, float | None]] = {}
    for group, rewards_G in scored:  # G siblings of a group
        for trajectory, reward in zip(group.trajectories, rewards_G, strict=True):
            if group.held_out:
                left_out["held out for the gate"] += len(trajectory.calls)
            elif trajectory.id not in put_right:
                # Each group is judged by itself, so a run in several groups has several rewards.
                _, known = best.get(trajectory.id, (trajectory, None))
                best[trajectory.id] = trajectory, max((r for r in (known, reward) if r is not None), default=None)
    for trajectory, reward in best.values():
        if reward is not None and reward >= least_reward:
            yield trajectory
        else:
            left_out["no reward" if reward is None else "reward too low"] += len(trajectory.calls)


def _imitated(
    trajectory: Trajectory, renderer: Renderer, learned: set[str], left_out: Counter[str], may_imitate: MayImitate
) -> Iterator[Turn]:
    for position, call in enumerate(trajectory.calls):
        with _counting(left_out):
            if _origin(call) in learned:
                raise Unusable("learned from another copy")
            answer = _upstreams(call, trajectory.calls[position + 1 :])
            _require_allowed(call, may_imitate)
            yield renderer.turn(call, answer.message)
            learned.add(_origin(call))


def _require_allowed(call: Call, may_imitate: MayImitate) -> None:
    """Raises `Unusable` if upstream gave the answer and it may not be learned."""
    if call.policy is UPSTREAM and not may_imitate(call.requested_model):
        raise Unusable(f"training on answers of {call.requested_model or 'an unknown model'} is not allowed")


def _origin(call: Call) -> str:
    return call.shadow_of or call.id  # a shadow answers the same request as the call that it copies


def _upstreams(call: Call, later: Sequence[Call]) -> Choice:
    """Returns upstream's whole answer to a call; `later` are the calls after it, which tell the chosen answer."""
    _require_none(_NOT_IMITATED, call)
    if (choice := chosen_choice(call, later)) is None:
        raise Unusable("no answer")
    if not _ended(choice):
        raise Unusable("the answer was cut")
    return choice


def _put_right(
    trajectory: Trajectory, said: Sequence[Correction], renderer: Renderer, left_out: Counter[str]
) -> Iterator[Turn]:
    with _counting(left_out):
        (call,) = corrected(trajectory, said).calls
        yield _rendered(call, call.choices[0], renderer)


@contextmanager
def _counting(left_out: Counter[str]) -> Generator[None]:
    """Counts what the block finds `Unusable`, by its reason."""
    try:
        yield
    except Unusable as reason:
        left_out[str(reason)] += 1


@dataclass(frozen=True, slots=True)
class Pair:
    """A better and a worse row (token sequence) that begin with the same prompt, for preference learning."""

    chosen: Row  # the row with the better answer or run
    rejected: Row  # the row with the worse answer or run
    source: PairSource  # what decided which is better: a person, the rewards of a group, or a training file


@dataclass(frozen=True, slots=True)
class Preferences:
    """Result of `preferences`: the pairs to learn from."""

    pairs: tuple[Pair, ...]  # first the pairs made from corrections, then the pairs made from groups
    left_out: Mapping[str, int]  # number of runs that cannot be in a pair and of prompts that gave none, by reason


@dataclass(frozen=True, slots=True)
class _Sibling:
    reward: float
    prompt_ids: tuple[int, ...]
    row: Row
    whole: bool  # whether its last answer came to its end by itself


def preferences(
    scored: Iterable[Scored], corrections: Iterable[Corrected], renderer: Renderer, *, margin: float, max_tokens: int,
    may_imitate: MayImitate,
) -> Preferences:  # fmt: skip
    """Returns pairs of a better and a worse answer from corrections, and of a better and a worse run from groups.

    In a group, the siblings whose first prompt has the same token ids are compared: the one with the highest reward
    (among those whose last answer was not cut off) and the one with the lowest reward form a pair. All answers of both
    runs are learned. A run that becomes several rows (token sequences) is in no pair.

    The first three arguments and `may_imitate` are those of `demonstrations`. `margin` is the smallest difference
    between two siblings' rewards that makes them a pair; above 0. A pair with a row of more than `max_tokens` is left
    out. It is not cut, because then halves of answers would be compared.
    """
    pairs: list[Pair] = []
    left_out: Counter[str] = Counter()
    for trajectory, said in corrections:
        with _counting(left_out):
            pairs.append(_pair(*_right_and_wrong(trajectory, said, renderer, may_imitate), "correction", max_tokens))
    for group, rewards_G in scored:
        if group.held_out:
            left_out["held out for the gate"] += len(group.trajectories)
            continue
        siblings: list[_Sibling] = []
        for trajectory, reward in zip(group.trajectories, rewards_G, strict=True):
            with _counting(left_out):
                siblings.append(_sibling(trajectory, reward, renderer, may_imitate))
        for better, worse in _extremes(siblings, margin, left_out):
            with _counting(left_out):
                pairs.append(_pair(better.row, worse.row, "group", max_tokens))
    return Preferences(tuple(pairs), dict(left_out))


def _right_and_wrong(
    trajectory: Trajectory, said: Sequence[Correction], renderer: Renderer, may_imitate: MayImitate
) -> tuple[Row, Row]:
    right, _ = right_and_wrong(trajectory, said)
    (call,) = right.calls
    position = next(index for index, each in enumerate(trajectory.calls) if each.id == call.id)
    chosen = _rendered(call, call.choices[0], renderer)
    rejected = _turn(trajectory.calls[position], trajectory.calls[position + 1 :], renderer, may_imitate)
    # The recorded prompt and the rendered one: if they differ, the two answers were given in different contexts.
    if chosen.prompt_ids != rejected.prompt_ids:
        raise Unusable("the chat template renders another prompt than was recorded")
    return merge([chosen])[0], merge([rejected])[0]


def _sibling(trajectory: Trajectory, reward: float | None, renderer: Renderer, may_imitate: MayImitate) -> _Sibling:
    if reward is None:
        raise Unusable("no reward")
    answered = [index for index, call in enumerate(trajectory.calls) if call.choices]
    if not answered:
        raise Unusable("no answer")
    turns = [_turn(trajectory.calls[index], trajectory.calls[index + 1 :], renderer, may_imitate) for index in answered]
    rows = merge(turns)
    # A pair compares two sequences. Of several rows only one could be in it, and the reward is of all of them.
    if len(rows) != 1:
        raise Unusable("the run forks into several rows")
    last = trajectory.calls[answered[-1]]
    choice = chosen_choice(last, ())
    return _Sibling(reward, turns[0].prompt_ids, rows[0], choice is not None and last.status == "ok" and _ended(choice))


def _extremes(
    siblings: Sequence[_Sibling], margin: float, left_out: Counter[str]
) -> Iterator[tuple[_Sibling, _Sibling]]:
    """Yields for each prompt the best sibling that came to its end, and the worst sibling."""
    # A dict keeps the order of the siblings, where a set would not: the same job must have the same pairs.
    for prompt_ids in dict.fromkeys(sibling.prompt_ids for sibling in siblings):
        same = [sibling for sibling in siblings if sibling.prompt_ids == prompt_ids]
        best = max((each for each in same if each.whole), key=lambda each: each.reward, default=None)
        worst = min(same, key=lambda each: each.reward)
        if best is None or best.reward - worst.reward < margin:
            left_out["no two siblings with this prompt differ enough"] += 1
        else:
            yield best, worst


def _pair(chosen: Row, rejected: Row, source: PairSource, max_tokens: int) -> Pair:
    if chosen == rejected:
        raise Unusable("both answers are the same")
    if max(len(chosen.ids_T), len(rejected.ids_T)) > max_tokens:
        raise Unusable("longer than max_tokens")
    return Pair(chosen, rejected, source)


def _turn(call: Call, later: Sequence[Call], renderer: Renderer, may_imitate: MayImitate) -> Turn:
    """Returns a call's answer with its recorded ids, or rendered if there are none."""
    _require_allowed(call, may_imitate)
    if (choice := chosen_choice(call, later)) is None:
        raise Unusable("no answer")
    if call.prompt_token_ids and choice.token_ids:
        return Turn(call.prompt_token_ids, choice.token_ids, (0.0,) * len(choice.token_ids))
    # A recorded answer may end anywhere: its ids are exact. A rendered one gets an end-of-turn token from the template,
    # which an answer that was cut never had.
    if call.status != "ok" or not _ended(choice):
        raise Unusable("the answer was cut")
    return _rendered(call, choice, renderer)


def _rendered(call: Call, choice: Choice, renderer: Renderer) -> Turn:
    _require_none(_PROMPT_IS_NOT_WHOLE, call)
    return renderer.turn(call, choice.message)


def _require_none(reasons: Reasons, call: Call) -> None:
    for reason, holds in reasons:
        if holds(call):
            raise Unusable(reason)


def _ended(choice: Choice) -> bool:
    return choice.finish_reason in ("stop", "tool_calls", "function_call")


# --- training files ---

MOST_TOKENS = 20_000_000  # of the rows of a file; each takes about 100 bytes


@dataclass(frozen=True, slots=True)
class FileRows:
    """Result of `rows_of_file`: what an update learns from a training file."""

    demonstrations: tuple[Row, ...]  # of conversations, to imitate
    pairs: tuple[Pair, ...]  # of preferences
    left_out: Mapping[str, tuple[int, str]]  # by reason: number of lines that are not learned, and place of the first


def rows_of_file(lines: Iterable[tuple[str, Sequence[Trajectory]]], renderer: Renderer, *, max_tokens: int) -> FileRows:
    """Returns the rows of a training file, whose lines are given as `formats.bundles_of` makes trajectories of them.

    A line is its place, such as `line 3`, with one trajectory, all of whose answers are imitated, or with two, of which
    the first is preferred. Answers of `weight: 0` are not learned. A line counts as often as it is there. Raises
    `ConfigError` if there is more to learn than an update can hold in memory.
    """
    rows: list[Row] = []
    pairs: list[Pair] = []
    left_out: dict[str, tuple[int, str]] = {}
    tokens = 0
    for place, runs in lines:
        if tokens > MOST_TOKENS:
            raise ConfigError(
                f"the lines before {place} have more than {MOST_TOKENS:,} tokens, and an update holds all in memory; "
                "cut the file into several, and train on one after the other"
            )
        try:
            found = [merge(_answers(run, renderer, max_tokens)) for run in runs]
            if len(found) == 1:
                kept = cut(found[0], max_tokens)
                if not kept:
                    raise Unusable("longer than max_tokens")
                rows += kept
                tokens += sum(len(row.ids_T) for row in kept)
            elif any(len(of_run) != 1 for of_run in found):
                raise Unusable("the run forks into several rows")
            else:
                ((chosen,), (rejected,)) = found
                pairs.append(_pair(chosen, rejected, "file", max_tokens))
                tokens += len(chosen.ids_T) + len(rejected.ids_T)
        except Unusable as reason:
            number, first = left_out.get(str(reason), (0, place))
            left_out[str(reason)] = number + 1, first
    return FileRows(tuple(rows), tuple(pairs), left_out)


def _answers(run: Trajectory, renderer: Renderer, max_tokens: int) -> list[Turn]:
    turns: list[Turn] = []
    for call in run.calls:
        # What comes after this many tokens is cut off: to render it, too, would take minutes of a long conversation.
        if turns and len(turns[-1].prompt_ids) > max_tokens:
            break
        turns += [renderer.turn(call, each.message) for each in call.choices if each.message.get("weight") != 0]
    if not turns:
        raise Unusable("no answer")
    return turns
