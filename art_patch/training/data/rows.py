"""Recorded calls to rows of token ids in which the sampled tokens are marked. Pure.

Nothing is ever retokenised. A call whose exact prompt ids extend an earlier row continues the longest such row. So a
multi-turn trajectory is one row, and each sampled token is trained once, in the context it was sampled in. A call whose
prompt extends no row starts a row of its own, a fork: the chat template rewrote history (Qwen 3 strips the thoughts of
earlier turns), a sub-agent began, siblings branched from a common prefix, or the same was asked twice. Tokens that the
new row shares with others are context there, and trained where they were sampled. Histories are never aligned.

A row is cut after `max_tokens`, and the rest is not trained. An answer that was cut off at its length limit is trained
as any other, unless `learn_truncated` is false. Then it is context for later turns, and none of its tokens is trained.
A run without a trained token counts neither in its group's baseline and scale nor in the loss's normalisers (TRL's
`mask_truncated_completions` counts it in all of them).

A call that cannot be proven exact (`art_patch.trajectories.trainability`) is left out and counted by reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields

from art_patch.trajectories import chosen_choice, why_untrainable
from art_patch.types import Call, Trajectory

TRUNCATED = "the answer was cut off at its length limit"  # the reason if `learn_truncated` is false


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence of T tokens.

    Attributes:
        ids_T: Token ids of the whole sequence.
        sampled_T: Whether the policy sampled the token; only sampled tokens are trained.
        logprobs_T: The behaviour policy's log-probability of each sampled token, at `temperature_T`; 0 elsewhere.
        temperature_T: Sampling temperature of each sampled token; 1 elsewhere.
    """

    ids_T: tuple[int, ...]
    sampled_T: tuple[bool, ...]
    logprobs_T: tuple[float, ...]
    temperature_T: tuple[float, ...]

    @property
    def sampled(self) -> int:
        """Number of trained tokens."""
        return sum(self.sampled_T)


@dataclass(frozen=True, slots=True)
class Turn:
    """An answer of A tokens, which is learned, after the exact prompt that it was given to.

    Attributes:
        prompt_ids: Token ids of the prompt.
        answer_ids_A: Token ids of the answer.
        logprobs_A: The behaviour policy's log-probability of each; 0 if the answer was not sampled by a policy of ours.
        temperature: Temperature at which the answer was sampled.
        truncated: Whether the answer was cut off at its length limit.
    """

    prompt_ids: tuple[int, ...]
    answer_ids_A: tuple[int, ...]
    logprobs_A: tuple[float, ...]
    temperature: float = 1.0
    truncated: bool = False


@dataclass(frozen=True, slots=True)
class RowsReport:
    """Counts of how calls became rows; reports of several trajectories add up.

    Attributes:
        rows: Number of rows, after the cut.
        forks: Number of calls that began a row of their own, the first call of a trajectory not counted.
        tokens: Number of sampled tokens in the rows, which are the trained ones.
        cut_tokens: Number of sampled tokens beyond `max_tokens`.
        truncated_tokens: Number of sampled tokens in answers cut off at their length limit, if these are not learned.
        other_choices: Number of answers that the app did not go on with.
        left_out: Number of calls from which nothing is trained, by reason.
    """

    rows: int = 0
    forks: int = 0
    tokens: int = 0
    cut_tokens: int = 0
    truncated_tokens: int = 0
    other_choices: int = 0
    left_out: Mapping[str, int] = field(default_factory=dict[str, int])

    def __add__(self, other: RowsReport) -> RowsReport:
        """Returns the sum of both reports."""
        sums = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self) if f.name != "left_out"}
        return RowsReport(**sums, left_out=dict(Counter(self.left_out) + Counter(other.left_out)))


def rows_and_report(
    trajectory: Trajectory, *, max_tokens: int, learn_truncated: bool = True
) -> tuple[tuple[Row, ...], RowsReport]:
    """Returns the trajectory's rows, cut after `max_tokens`, and how they came about.

    Each sampled token of its trainable calls is in exactly one row. Calls must be in the order in which they started.
    Without `learn_truncated` no token of an answer that was cut off at its length limit is trained.
    """
    turns: list[Turn] = []
    left_out: Counter[str] = Counter()
    others = 0
    for position, call in enumerate(trajectory.calls):
        found = recorded_turn(call, trajectory.calls[position + 1 :])
        if isinstance(found, Turn):
            turns.append(found)
            others += len(call.choices) - 1
        else:
            left_out[found] += 1
    not_learned = [turn for turn in turns if turn.truncated and not learn_truncated]
    if not_learned:
        left_out[TRUNCATED] = len(not_learned)
    whole = merge(turns, learn_truncated=learn_truncated)
    rows = cut(whole, max_tokens)
    tokens = total_sampled(rows)
    return rows, RowsReport(
        rows=len(rows),
        forks=max(0, len(whole) - 1),
        tokens=tokens,
        cut_tokens=total_sampled(whole) - tokens,
        truncated_tokens=sum(len(turn.answer_ids_A) for turn in not_learned),
        other_choices=others,
        left_out=dict(left_out),
    )


def trained_answers(
    trajectory: Trajectory, *, max_tokens: int, learn_truncated: bool = True
) -> tuple[tuple[str, int], ...]:
    """Returns call id and choice index of each answer of which `rows_and_report` trains a token, given the same."""
    found: list[tuple[str, int]] = []
    for position, call in enumerate(trajectory.calls):
        later = trajectory.calls[position + 1 :]
        turn, choice = recorded_turn(call, later), chosen_choice(call, later)
        if not isinstance(turn, Turn) or choice is None or (turn.truncated and not learn_truncated):
            continue
        if len(turn.prompt_ids) < max_tokens:  # an answer stands in its row after its whole prompt, and rows are cut
            found.append((call.id, choice.index))
    return tuple(found)


def merge(turns: Iterable[Turn], *, learn_truncated: bool = True) -> tuple[Row, ...]:
    """Returns rows in which each turn's answer is marked once; turns that extend each other share a row.

    Without `learn_truncated` truncated answers are not marked, so a row may be left in which nothing is marked.
    """
    rows: list[Row] = []
    for turn in turns:
        # The longest, so that after a fork a turn continues the branch that it came from.
        extended = [index for index, row in enumerate(rows) if _extends(turn.prompt_ids, row.ids_T)]
        if extended:
            longest = max(extended, key=lambda index: len(rows[index].ids_T))
            rows[longest] = _continued(rows[longest], turn, learn_truncated)
        else:
            rows.append(_continued(Row((), (), (), ()), turn, learn_truncated))
    return tuple(rows)


def cut(rows: Iterable[Row], max_tokens: int) -> tuple[Row, ...]:
    """Returns the rows cut to `max_tokens` and after their last sampled token; rows without one are left out."""
    kept: list[Row] = []
    for row in rows:
        marked = row.sampled_T[:max_tokens]
        if any(marked):
            upto = slice(0, max(place for place, sampled in enumerate(marked) if sampled) + 1)
            kept.append(Row(row.ids_T[upto], row.sampled_T[upto], row.logprobs_T[upto], row.temperature_T[upto]))
    return tuple(kept)


def total_sampled(rows: Sequence[Row]) -> int:
    """Returns the number of trained tokens in these rows."""
    return sum(row.sampled for row in rows)


def recorded_turn(call: Call, later: Sequence[Call]) -> Turn | str:
    """Returns the answer of a call that is trained, or the reason why none is; `later` are the calls after it."""
    # Proven here again, whatever the record says of itself: ids and log-probabilities may differ in number.
    reason = call.untrainable or why_untrainable(call)
    if reason is not None:
        return reason
    choice = chosen_choice(call, later)  # of n > 1 answers the one the app went on with: the reward is of no other
    if choice is None or call.prompt_token_ids is None or choice.token_ids is None or choice.logprobs is None:
        return "no answer"  # proven to be there, but the type checker does not know
    temperature = call.params.get("temperature")
    return Turn(
        call.prompt_token_ids,
        choice.token_ids,
        choice.logprobs,
        1.0 if temperature is None else float(temperature),
        truncated=choice.finish_reason == "length",
    )


def _extends(prompt_ids: tuple[int, ...], ids_T: tuple[int, ...]) -> bool:
    length = len(ids_T)
    # The last token first: most rows differ there, and comparing two long histories takes its time.
    return length <= len(prompt_ids) and prompt_ids[length - 1] == ids_T[-1] and prompt_ids[:length] == ids_T


def _continued(row: Row, turn: Turn, learn_truncated: bool) -> Row:
    given, answer = len(turn.prompt_ids) - len(row.ids_T), len(turn.answer_ids_A)
    if turn.truncated and not learn_truncated:
        # The whole answer becomes prompt: it is context for the next turn.
        turn, given, answer = Turn(turn.prompt_ids + turn.answer_ids_A, (), ()), given + answer, 0
    return Row(
        ids_T=turn.prompt_ids + turn.answer_ids_A,
        sampled_T=row.sampled_T + (False,) * given + (True,) * answer,
        logprobs_T=row.logprobs_T + (0.0,) * given + turn.logprobs_A,
        temperature_T=row.temperature_T + (1.0,) * given + (turn.temperature,) * answer,
    )
