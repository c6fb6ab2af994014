"""On-policy distillation: a teacher's log-probabilities take the place of a judge's scores.

The teacher reads the very tokens that a policy sampled. Each sampled token is learned by the reverse KL: its advantage
is the teacher's log-probability minus the policy's. So a run needs no siblings, and no judge is asked.

For rewards and for the gate, the teacher scores a whole answer or run. If m is the mean of log teacher - log policy
over its sampled tokens, the score is the logistic function of m: 0.5 if the teacher finds the tokens as likely as the
policy does, and near 0 if it would hardly say them. The mean of -m is the reverse KL a token. At temperature 0 no other
answer could be given, so the policy's log-probability counts as 0. Upstream's answers have no tokens and no score.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import compress
from statistics import fmean
from typing import Any

from art_patch import rewards, training
from art_patch._lib.ids import derived_id
from art_patch.errors import ConfigError, JudgeError
from art_patch.trajectories import chosen_choice
from art_patch.types import Group, Judgement, Score, Trajectory

RUBRIC = "reverse KL"
_NO_TOKENS = "it has no answer with token ids and log-probabilities"
_CONCURRENCY = 4  # requests at once
_PROBED = 512  # token ids, spread over the whole vocabulary
_GREEDY = 0.01  # temperature; see `trajectories.why_untrainable`


class TeacherJudge:
    """A teacher as the judge of a cycle (`rewards.OrderedJudge`). `max_tokens`: of a row, the rest is not sent."""

    def __init__(self, teacher: rewards.Teacher, *, max_tokens: int) -> None:
        self.model = teacher.model
        self._teacher, self._max_tokens = teacher, max_tokens
        self._checked: set[str] = set()

    def require_same_tokens(self, base: str) -> None:
        """Raise `ConfigError` if the base has another tokenizer than the teacher, `JudgeError` if nothing answers."""
        if base in self._checked:
            return
        from transformers import AutoTokenizer

        try:
            tokenizer: Any = AutoTokenizer.from_pretrained(base)
        except Exception as error:  # of several packages, one of which raises a bare `Exception`
            raise ConfigError(f"the base {base} has no tokenizer to compare with the teacher's: {error}") from None
        every = range(0, len(tokenizer), max(1, len(tokenizer) // _PROBED))
        ids = [*every, *sorted(set(tokenizer.added_tokens_decoder) - {*every})]
        texts = {key: str(tokenizer.decode([key])) for key in ids}
        self._teacher.require_same_tokens(texts, base, frozenset(tokenizer.all_special_ids))
        self._checked.add(base)

    def teach(self, rows: Sequence[training.Row]) -> Iterator[training.Row | str]:
        """Yield for each row the row with the teacher's log-probabilities, or why the teacher refuses it.

        Raises `JudgeError` if the teacher does not answer, or the budget is used up.
        """
        try:
            yield from self._taught(rows)
        except rewards.BudgetUsedUp as error:
            raise JudgeError(f"the teacher's budget is used up: {error}; the groups wait for the next cycle") from None

    def score_groups(
        self, groups: Iterable[Group], *, purpose: str = "score", now: float | None = None,
        on_judgement: Callable[[Judgement], None] | None = None, progress: Callable[[int, int], None] | None = None,
        **how: Any,
    ) -> rewards.JudgeReport:  # fmt: skip
        """Score the runs of each group that have tokens, as `Judge.score_groups` does; their order does not matter."""
        waiting, at = list(groups), time.time() if now is None else now
        rows = [[_rows(each, self._max_tokens) for each in group.trajectories] for group in waiting]
        new = {row.ids_T for of_group in rows for its in of_group for row in its if not self._teacher.knows(row.ids_T)}
        scores, unscored, judgements, spent_out = list[Score](), dict[str, str](), list[Judgement](), ""
        answers = self._taught([row for of_group in rows for its in of_group for row in its])
        for done, (group, of_group) in enumerate(zip(waiting, rows, strict=True), 1):
            asked = [row.ids_T for its in of_group for row in its if row.ids_T in new]
            try:
                found = [] if spent_out else [[next(answers) for _ in its] for its in of_group]
            except rewards.BudgetUsedUp as error:
                found, spent_out = [], f"budget used up: {error}"
            refused = next((row for its in found for row in its if isinstance(row, str)), _NO_TOKENS)
            given = [
                self._score(group, run.id, whole, at)
                for run, its in zip(group.trajectories, found, strict=False)
                # A part of a run says nothing of the whole.
                if (whole := [row for row in its if not isinstance(row, str)]) and len(whole) == len(its)
            ]
            scores += given
            why = None if given else spent_out or refused
            if why is not None:
                unscored[group.id] = why
            spent: dict[str, Any] = {"calls": len(asked), "prompt_tokens": sum(map(len, asked))} if found else {}
            name = derived_id("judgement", group.id, RUBRIC, self.model, purpose, repr(at))
            state: Any = "ok" if given else "failed"
            judgements.append(Judgement(name, group.id, at, self.model, RUBRIC, purpose, state, why, **spent))
            if on_judgement is not None:
                on_judgement(judgements[-1])
            if progress is not None:
                progress(done, len(waiting))
        if waiting and not scores and not spent_out:
            first = next(iter(unscored.values()))
            raise JudgeError(f"the teacher {self.model} scored none of {len(waiting)} groups; first reason: {first}")
        total = {name: sum(getattr(each, name) for each in judgements) for name in ("calls", "prompt_tokens")}
        return rewards.JudgeReport(tuple(scores), unscored, tuple(judgements), cost_usd=None, **total)

    def _taught(self, rows: Sequence[training.Row]) -> Iterator[training.Row | str]:
        pool = ThreadPoolExecutor(_CONCURRENCY, thread_name_prefix="art-patch-teacher")
        try:
            for row, found in zip(rows, pool.map(self._teacher.logprobs, [row.ids_T for row in rows]), strict=True):
                if isinstance(found, str):
                    yield f"the teacher refuses it: {found}"
                else:
                    own = zip(found, row.sampled_T, strict=True)
                    yield replace(row, teacher_T=tuple(value if sampled else 0.0 for value, sampled in own))
        finally:
            pool.shutdown(cancel_futures=True)

    def _score(self, group: Group, run: str, rows: Sequence[training.Row], at: float) -> Score:
        nearness = nearness_nats(rows)
        name, words = rewards.SCORE_NAME, f"log teacher - log policy: {nearness:.3f} a token"
        key = derived_id(name, group.id, run, RUBRIC, self.model)
        about: dict[str, Any] = {"group_id": group.id, "rubric": RUBRIC, "judge": self.model}
        return Score(key, run, name, 1 / (1 + math.exp(-nearness)), rewards.SCORE_SOURCE, at, words, **about)


def nearness_nats(rows: Sequence[training.Row]) -> float:
    """Return the mean of log teacher - log policy over the sampled tokens of rows with a teacher, within 20."""
    return fmean(
        max(-20.0, min(20.0, teacher - (0.0 if temperature < _GREEDY else logprob)))
        for row in rows
        for teacher, logprob, temperature in compress(
            zip(row.teacher_T or (), row.logprobs_T, row.temperature_T, strict=True), row.sampled_T
        )
    )


def _rows(run: Trajectory, max_tokens: int) -> tuple[training.Row, ...]:
    turns: list[training.Turn] = []
    for position, call in enumerate(run.calls):
        choice = chosen_choice(call, run.calls[position + 1 :])
        if choice is None or not call.prompt_token_ids or not choice.token_ids or not choice.logprobs:
            continue
        if len(choice.token_ids) == len(choice.logprobs):
            given = call.params.get("temperature")
            temperature = 1.0 if given is None else float(given)
            turns.append(training.Turn(call.prompt_token_ids, choice.token_ids, choice.logprobs, temperature))
    return training.cut(training.merge(turns), max_tokens)
