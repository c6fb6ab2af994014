"""Turns recorded calls into rows, sequences of token ids with marked sampled tokens; divides a run's credit over them.

The rows hold the recorded token ids; no text is tokenised again. If a call's prompt ids begin with all ids of an
earlier row, the call is appended to the longest such row. So a multi-turn trajectory is usually one row, and each
sampled token is trained once, in the context in which it was sampled. If the prompt extends no earlier row, the call
starts a new row, called a fork. Forks have four causes: the chat template rewrote the history (Qwen 3 removes the
thoughts of earlier turns), a sub-agent began, several answers continued one prefix, or the same prompt was sent twice.
Tokens that a new row has in common with an earlier one are only context there; they are trained in the earlier row.
Different histories are never aligned with each other.

Tokens of a row after `max_tokens` are cut off and not trained. An answer that was cut off at its length limit is
trained like any other answer, unless `learn_truncated` is false; then it is only context for later turns. A run without
any trained token counts neither in the baseline and spread of its group's rewards nor in the number of trajectories by
which the loss is divided. (TRL's `mask_truncated_completions` counts such a run in all of them.)

A call is left out if its record does not prove that ids and log-probabilities are complete and exact. The reasons,
listed in `art_patch.trajectories.trainability`, are counted.

The rewards of a group compare whole runs, so every turn of a run gets the same advantage, whichever turn decided. But
siblings that passed through the same prompt were in the same state (an anchor), and from there on they can be compared
with one another alone: a turn's anchor advantage is the advantage of its run minus the mean of all siblings that passed
through its prompt. Where the outcome was decided before, that is 0; where it was open, it is what the answer to this
prompt and all that followed were worth. This is the step advantage of GiGPO (https://arxiv.org/abs/2505.10978), without
a discount, and with token ids in place of the states of an environment.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from hashlib import blake2b

import numpy as np

from art_patch.trajectories import chosen_choice, why_untrainable
from art_patch.types import Call, Trajectory

TRUNCATED = "the answer was cut off at its length limit"  # the reason if `learn_truncated` is false


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence of T tokens for training, in which the sampled tokens are marked."""

    ids_T: tuple[int, ...]  # token ids of the whole sequence
    sampled_T: tuple[bool, ...]  # whether the policy sampled the token; only sampled tokens are trained
    logprobs_T: tuple[float, ...]  # under the policy that sampled the token, at its temperature; 0 for other tokens
    temperature_T: tuple[float, ...]  # sampling temperature of each sampled token; 1 for the other tokens
    # Log-probability of each sampled token under a teacher, 0 for other tokens. Its row is learned by the reverse KL
    # to the teacher, whatever the advantage is. `None`: the advantage of the trajectory is learned.
    teacher_T: tuple[float, ...] | None = None

    @property
    def sampled(self) -> int:
        """Number of sampled tokens in this row (token sequence); these tokens are trained."""
        return sum(self.sampled_T)


@dataclass(frozen=True, slots=True)
class Example:
    """A trajectory as the trainer computes it: its rows and its advantage."""

    rows: tuple[Row, ...]  # each with at least one sampled token; every sampled token is in exactly one of them
    advantage: float = 0.0  # the trajectory's reward relative to the mean of its group, perhaps divided by a spread
    # Advantage of each sampled token, where the turns of the trajectory differ (`Anchors`).
    token_advantages: tuple[float, ...] | None = None

    @property
    def sampled(self) -> int:
        """Number of sampled tokens in all rows (token sequences) of the trajectory; these tokens are learned."""
        return sum(row.sampled for row in self.rows)

    @property
    def teaches(self) -> bool:
        """Whether a token has an advantage other than 0."""
        return any(self.token_advantages or (self.advantage,))


@dataclass(frozen=True, slots=True)
class Turn:
    """A prompt and the answer to it as token ids; the A tokens of the answer are learned."""

    prompt_ids: tuple[int, ...]  # token ids of the prompt
    answer_ids_A: tuple[int, ...]  # token ids of the answer
    logprobs_A: tuple[float, ...]  # under the policy that sampled the answer; 0 for answers of upstream or a person
    temperature: float = 1.0  # temperature at which the answer was sampled
    truncated: bool = False  # whether the answer was cut off at its length limit


@dataclass(frozen=True, slots=True)
class RowsReport:
    """Counts of what became of a trajectory's calls; the reports of several trajectories can be added."""

    rows: int = 0  # number of rows (token sequences) that have a sampled token within `max_tokens`
    forks: int = 0  # number of calls after the first that began a new row: their prompt extended no earlier row
    tokens: int = 0  # number of sampled tokens in the rows; these are trained
    cut_tokens: int = 0  # number of sampled tokens that are not trained because they stand after `max_tokens`
    truncated_tokens: int = 0  # number of sampled tokens that are not trained because `learn_truncated` is false
    other_choices: int = 0  # number of answers (of `n` above 1) that the app did not continue with; not trained
    left_out: Mapping[str, int] = field(default_factory=dict[str, int])  # calls without a trained token, by reason

    def __add__(self, other: "RowsReport") -> "RowsReport":
        """Returns one report for the trajectories of both, with all counts added."""
        sums = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self) if f.name != "left_out"}
        return RowsReport(**sums, left_out=dict(Counter(self.left_out) + Counter(other.left_out)))


def rows_and_report(
    trajectory: Trajectory, *, max_tokens: int, learn_truncated: bool = True
) -> tuple[tuple[Row, ...], RowsReport]:
    """Returns the rows (token sequences) of a trajectory, cut after `max_tokens`, and a report about its calls.

    Before the cut, each sampled token of the trainable calls is in exactly one row. The calls must be in the order in
    which they started.
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
    if not_learned := [turn for turn in turns if turn.truncated and not learn_truncated]:
        left_out[TRUNCATED] = len(not_learned)
    whole = merge(turns, learn_truncated=learn_truncated)
    rows = cut(whole, max_tokens)
    tokens = sum(row.sampled for row in rows)
    return rows, RowsReport(
        rows=len(rows),
        forks=max(0, len(whole) - 1),
        tokens=tokens,
        cut_tokens=sum(row.sampled for row in whole) - tokens,
        truncated_tokens=sum(len(turn.answer_ids_A) for turn in not_learned),
        other_choices=others,
        left_out=dict(left_out),
    )


def trained_answers(
    trajectory: Trajectory, *, max_tokens: int, learn_truncated: bool = True
) -> tuple[tuple[str, int], ...]:
    """Returns call id and choice index of each answer of which `rows_and_report` has a trained token in a row."""
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
    """Joins turns to rows, see the module's docstring. With `learn_truncated` false a row may have no marked token."""
    rows: list[Row] = []
    for turn in turns:
        # The longest, so that after a fork a turn continues the branch that it came from.
        if extended := [index for index, row in enumerate(rows) if _extends(turn.prompt_ids, row.ids_T)]:
            longest = max(extended, key=lambda index: len(rows[index].ids_T))
            rows[longest] = _continued(rows[longest], turn, learn_truncated)
        else:
            rows.append(_continued(Row((), (), (), ()), turn, learn_truncated))
    return tuple(rows)


def cut(rows: Iterable[Row], max_tokens: int) -> tuple[Row, ...]:
    """Cuts each row to `max_tokens` tokens, and then after its last sampled one; leaves out rows without any."""
    kept: list[Row] = []
    for row in rows:
        marked = row.sampled_T[:max_tokens]
        if any(marked):
            upto = slice(0, max(place for place, sampled in enumerate(marked) if sampled) + 1)
            kept.append(Row(row.ids_T[upto], row.sampled_T[upto], row.logprobs_T[upto], row.temperature_T[upto]))
    return tuple(kept)


def recorded_turn(call: Call, later: Sequence[Call]) -> Turn | str:
    """Returns prompt and answer of `call` as recorded ids, or the reason why the call cannot be trained.

    `later` are the trajectory's calls after `call`. They show with which of several answers the app continued.
    """
    # Proven here again, whatever the record says of itself: ids and log-probabilities may differ in number.
    if (reason := call.untrainable or why_untrainable(call)) is not None:
        return reason
    choice = chosen_choice(call, later)  # of n > 1 answers the one the app went on with: the reward is of no other
    if choice is None or call.prompt_token_ids is None or choice.token_ids is None or choice.logprobs is None:
        return "no answer"  # proven to be there, but the type checker does not know
    given = call.params.get("temperature")
    temperature, truncated = 1.0 if given is None else float(given), choice.finish_reason == "length"
    return Turn(call.prompt_token_ids, choice.token_ids, choice.logprobs, temperature, truncated)


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


# --- credit of turns ---


class Anchors:
    """The prompts that the siblings of a group passed through, each with their mean advantage."""

    def __init__(self, siblings: Sequence[Example], weight: float) -> None:
        """Takes all siblings that are trained, and the weight of a turn's anchor advantage beside its run's."""
        self._weight = weight
        passed: dict[bytes, dict[int, float]] = defaultdict(dict)
        for index, each in enumerate(siblings if weight else ()):
            for row in each.rows:
                for prompt, _ in _turns(row):
                    passed[prompt][index] = each.advantage  # once, however often a run came back to it
        self._mean_of = {prompt: sum(those.values()) / len(those) for prompt, those in passed.items()}

    def of_turn(self, run: float, prompt_ids: Sequence[int]) -> float:
        """Returns the advantage of an answer to this prompt, in a run with the advantage `run`.

        It is `(run + weight * anchor) / (1 + weight)`. The anchor advantage is 0 if no other sibling passed through the
        prompt, and for an answer that continues another one without a token between them: rows hold both as one turn.
        Answers to a prompt that all siblings share keep the advantage of the run.
        """
        return self._mixed(run, _key(prompt_ids)) if self._weight else run

    def of_tokens(self, example: Example) -> Example:
        """Returns a sibling with the advantage of each of its sampled tokens."""
        if not self._weight:
            return example
        turns = [turn for row in example.rows for turn in _turns(row)]
        mixed = (self._mixed(example.advantage, prompt) for prompt, tokens in turns for _ in range(tokens))
        return replace(example, token_advantages=tuple(mixed))

    def _mixed(self, run: float, prompt: bytes) -> float:
        return (run + self._weight * (run - self._mean_of.get(prompt, run))) / (1 + self._weight)


def _turns(row: Row) -> Iterator[tuple[bytes, int]]:
    """Yields for each answer in a row the key of the prompt before it, and its number of sampled tokens."""
    seen, done = blake2b(digest_size=16), 0
    edges = np.flatnonzero(np.diff(np.array((False, *row.sampled_T, False), dtype=np.int8)))
    for start, stop in edges.reshape(-1, 2).tolist():
        seen.update(_bytes(row.ids_T[done:start]))  # each token is hashed once, however many turns follow it
        done = start
        yield seen.copy().digest(), stop - start


def _key(prompt_ids: Sequence[int]) -> bytes:
    return blake2b(_bytes(prompt_ids), digest_size=16).digest()


def _bytes(ids: Sequence[int]) -> bytes:
    return np.array(ids, dtype=np.int64).tobytes()
