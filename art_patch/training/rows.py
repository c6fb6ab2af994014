"""Recorded calls to rows of token ids, with what was sampled marked.

Nothing is ever retokenised. A call whose exact prompt ids extend an earlier row continues that row, so that a
multi-turn trajectory is one row and each sampled token is trained once, in the context it was sampled in. If the
prompt does not extend it (a chat template that rewrites history, a sub-agent), the call starts a new row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from art_patch.records import Call, Choice, Trajectory
from art_patch.transcripts import chosen_choice


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence of T tokens.

    Attributes:
        ids_T: token ids.
        sampled_T: which of them the policy sampled; only these are trained.
        logprobs_T: the behaviour policy's log-probability of each sampled token, at `temperature_T`; 0 elsewhere.
        temperature_T: sampling temperature; 1 elsewhere.
    """

    ids_T: tuple[int, ...]
    sampled_T: tuple[bool, ...]
    logprobs_T: tuple[float, ...]
    temperature_T: tuple[float, ...]

    @property
    def sampled(self) -> int:
        """Number of trained tokens."""
        return sum(self.sampled_T)


def rows_of(trajectory: Trajectory, *, max_tokens: int) -> tuple[Row, ...]:
    """Return the trajectory's rows; each sampled token of its trainable calls is in exactly one of them.

    Args:
        trajectory: its calls in the order they started.
        max_tokens: a row is cut there. What is cut off is not trained; the trajectory still counts in its group.
    """
    rows: list[Row] = []
    for position, call in enumerate(trajectory.calls):
        choice = chosen_choice(call, trajectory.calls[position + 1 :])
        if call.untrainable is not None or call.prompt_token_ids is None or choice is None:
            continue
        _append(rows, call, call.prompt_token_ids, choice)
    return tuple(row for row in (_cut(row, max_tokens) for row in rows) if row.sampled)


def _append(rows: list[Row], call: Call, prompt: tuple[int, ...], choice: Choice) -> None:
    ids, logprobs = choice.token_ids or (), choice.logprobs or ()
    temperature = call.params.get("temperature")
    temperature = 1.0 if temperature is None else float(temperature)
    longest = -1
    for index, row in enumerate(rows):
        extends = len(row.ids_T) <= len(prompt) and prompt[: len(row.ids_T)] == row.ids_T
        if extends and (longest < 0 or len(row.ids_T) > len(rows[longest].ids_T)):
            longest = index
    start = rows.pop(longest) if longest >= 0 else Row((), (), (), ())
    given = len(prompt) - len(start.ids_T)
    rows.append(
        Row(
            ids_T=prompt + ids,
            sampled_T=start.sampled_T + (False,) * given + (True,) * len(ids),
            logprobs_T=start.logprobs_T + (0.0,) * given + logprobs,
            temperature_T=start.temperature_T + (1.0,) * given + (temperature,) * len(ids),
        )
    )


def _cut(row: Row, max_tokens: int) -> Row:
    if len(row.ids_T) <= max_tokens:
        return row
    cut = slice(0, max_tokens)
    return Row(row.ids_T[cut], row.sampled_T[cut], row.logprobs_T[cut], row.temperature_T[cut])


def total_sampled(rows: Sequence[Row]) -> int:
    """Return how many tokens of these rows are trained."""
    return sum(row.sampled for row in rows)
