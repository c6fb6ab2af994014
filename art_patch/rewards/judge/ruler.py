"""RULER: groups in, a score for each sibling out, from an LLM that ranks the siblings of one group against each other.

- One question a group, groups side by side in threads; a group that is too large for one question is split
  (`splitting`). An answer that is not a valid verdict gets one repair try.
- A group that could not be judged is left out whole and named with the reason. It never becomes zero: a zero would be
  learned from.
- A judge that fails several groups running for no reason of theirs is given up, so that a dead judge costs a minute and
  not a night; groups judged by then keep their scores. Not one group judged is a `JudgeError`, unless the budget alone
  is the reason: a judge that was asked and failed is an error though the budget ended first.
- What is known is not asked again, and what is judged is handed over at once: with the store behind both, the store is
  the cache, and a run that was killed or ran out of budget is gone on with by the next.
- Siblings with the same transcript get the same score. A score only means something within its group.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from art_patch.errors import ConfigError, JudgeError
from art_patch.rewards.judge.budget import Budget
from art_patch.rewards.judge.client import AskError, JudgeClient, Usage, load_litellm
from art_patch.rewards.judge.plan import Plan, Request, plan_group
from art_patch.rewards.judge.prices import context_tokens, price_usd
from art_patch.rewards.judge.prompt import JudgePrompt
from art_patch.rewards.judge.question import Order
from art_patch.rewards.judge.report import SCORE_NAME as SCORE_NAME  # `combine` and others take them from here
from art_patch.rewards.judge.report import SCORE_SOURCE as SCORE_SOURCE
from art_patch.rewards.judge.report import JudgeReport, derived_id, known_scores, make_scores
from art_patch.rewards.judge.rubric import DEFAULT_RUBRIC, Rubric
from art_patch.rewards.judge.splitting import ANCHORS, merge
from art_patch.rewards.judge.verdict import Verdict, VerdictError, parse_verdict
from art_patch.types import Group, Judgement, Score

_GIVE_UP_AFTER = 3
"""So many groups in a row without an answer, after all their retries, and the judge counts as down."""
_QUOTED = 4000
"""Characters of a bad answer that the judge gets to see again; a runaway one must not fill its context."""
_SHORTEST_LIMIT = 2_000
"""Tokens; a judge that refuses this as too long is not asked with less."""
_NOT_TRIED = "not tried: the judge had failed too often by then"

_REPAIR = """\
That answer cannot be used: {error}
Answer the same question again with the JSON object alone. Score exactly these ids: {ids}."""

Progress = Callable[[int, int], None]
"""Called with (groups done, groups in all), in the thread that called `score_groups`."""
OnScored = Callable[[Group, Sequence[Score], Usage], None]
"""Called with each group as soon as it is judged, in the thread that called `score_groups`."""
OnJudgement = Callable[[Judgement], None]
"""Called with what each question took, whether it gave scores or not, in the thread that called `score_groups`."""


@dataclass(frozen=True, slots=True)
class _Outcome:
    """One group judged: `verdicts` by trajectory id, or why there are none.

    `failed`: the judge was asked and gave nothing that can be used. `judge_down`: for no reason of the group's.
    `by_budget`: no more could be asked.
    """

    usage: Usage
    verdicts: dict[str, Verdict] | None = None
    reason: str | None = None
    judge_down: bool = False
    failed: bool = False
    by_budget: bool = False
    facts: dict[str, Any] = field(default_factory=dict[str, Any])


class Judge:
    """An LLM that ranks siblings.

    Args:
        model: litellm's name of it, such as `openai/gpt-5-mini` or `hosted_vllm/NAME`.
        base_url: address where it is not the provider's own.
        api_key: key where litellm does not find it in the environment.
        rubric: what it should value.
        budget: what all its questions together may cost; judges may share one.
        max_siblings: how many attempts it ranks at once; larger groups are split. At least 3.
        max_prompt_tokens: what one prompt may have; unless given, what litellm knows of the model, else 100,000. It is
            lowered when the judge refuses a prompt as too long, and the group split once more.
        concurrency: groups judged at once.
        max_retries: how often one question is asked again after a passing failure (429, 5xx, timeout).
        timeout_s: how long one answer may take.
        pause_s: the first pause before a retry is up to this long, each further one up to twice the last.
        extra: further arguments of `litellm.completion`, such as `reasoning_effort`; they win over ours.

    Raises:
        JudgeError: no model is given.
        ConfigError: `max_siblings` is too small to split groups.
    """

    def __init__(
        self,
        model: str | None,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        rubric: Rubric = DEFAULT_RUBRIC,
        budget: Budget | None = None,
        max_siblings: int = 8,
        max_prompt_tokens: int | None = None,
        concurrency: int = 4,
        max_retries: int = 4,
        timeout_s: float = 120.0,
        pause_s: float = 1.0,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        if not model:
            raise JudgeError(
                "no judge is configured; name the model that ranks siblings with ART_PATCH_JUDGE or --judge, "
                "for example ART_PATCH_JUDGE=openai/gpt-5-mini (and ART_PATCH_JUDGE_BASE_URL for a server of your own)"
            )
        if max_siblings <= ANCHORS:
            raise ConfigError(f"max_siblings is {max_siblings}; give {ANCHORS + 1} or more, parts share {ANCHORS}")
        self.model = model
        self.rubric = rubric
        self.budget = budget or Budget()
        self.max_siblings = max_siblings
        self.max_prompt_tokens = max_prompt_tokens
        self.concurrency = concurrency
        self._client = JudgeClient(
            model,
            base_url=base_url,
            api_key=api_key,
            max_retries=max_retries,
            timeout_s=timeout_s,
            pause_s=pause_s,
            budget=self.budget,
            extra=extra or {},
        )

    def plan(self, group: Group, *, order: Order = "shuffled") -> Plan:
        """Return what would be sent for a group, how much it is and what it is likely to cost; send nothing."""
        return plan_group(
            group,
            self.rubric,
            model=self.model,
            order=order,
            max_prompt_tokens=self.max_prompt_tokens or context_tokens(self.model),
            max_siblings=self.max_siblings,
        )

    def score_groups(
        self,
        groups: Iterable[Group],
        *,
        order: Order = "shuffled",
        known: Iterable[Score] = (),
        purpose: str = "score",
        on_scored: OnScored | None = None,
        on_judgement: OnJudgement | None = None,
        progress: Progress | None = None,
        now: float | None = None,
    ) -> JudgeReport:
        """Return scores for the siblings of each group, and why where there are none.

        Args:
            groups: what to judge.
            order: of the siblings in the question. `reversed` shows each group in exactly the reverse order of
                `shuffled`; the scores of such a second pass have the ids of the first, so do not store both.
            known: scores that were given before; a group whose every sibling has one from this judge under this
                rubric is not asked about again.
            purpose: for the record of what was spent.
            on_scored: told of each group that was judged as soon as it was, so that nothing is lost by a kill.
            on_judgement: told what each group took, failed ones too; after `on_scored`.
            progress: told after each group.
            now: `Score.at` and `Judgement.at`; the present unless given.

        Raises:
            JudgeError: there were groups, and not one could be judged, the budget alone not being the reason; or there
                is a limit in USD and the judge's price is unknown.
        """
        waiting = list(groups)
        at = time.time() if now is None else now
        found = known_scores(waiting, known, judge=self.model, rubric=self.rubric.version)
        asked = [group for group in waiting if group.id not in found]
        scores = [score for of_group in found.values() for score in of_group]
        total, unscored, judgements = Usage(), dict[str, str](), list[Judgement]()
        failures, failed, by_budget = 0, dict[str, str](), False
        stop = threading.Event()
        with self._asking(asked, order, stop) as outcomes:
            for group, outcome in outcomes:
                total.add(outcome.usage)
                if outcome.verdicts is None:
                    unscored[group.id] = outcome.reason or ""
                else:
                    given = make_scores(group, outcome.verdicts, judge=self.model, rubric=self.rubric.version, at=at)
                    scores += given
                    if on_scored is not None:
                        on_scored(group, given, outcome.usage)
                judgements.append(self._judgement(group, outcome, order, purpose, at))
                if on_judgement is not None:
                    on_judgement(judgements[-1])
                by_budget = by_budget or outcome.by_budget
                if outcome.failed:
                    failed[group.id] = outcome.reason or ""
                failures = failures + 1 if outcome.judge_down else 0
                if failures >= _GIVE_UP_AFTER:
                    stop.set()
                if progress is not None:
                    progress(len(found) + len(judgements), len(waiting))
        if asked and not scores and (failed or not by_budget):
            raise JudgeError(self._nothing_judged(failed or unscored, len(unscored)))
        return JudgeReport(
            tuple(scores),
            unscored,
            total.calls,
            total.prompt_tokens,
            total.completion_tokens,
            total.cost_usd,
            tuple(judgements),
        )

    @contextmanager
    def _asking(
        self, groups: Sequence[Group], order: Order, stop: threading.Event
    ) -> Generator[Iterator[tuple[Group, _Outcome]]]:
        """Judge these groups side by side; yield each with what came of it as it is done. Ask no more after the block.

        Raises:
            JudgeError: there is a limit in USD, and the judge's price is unknown.
        """
        if groups:
            load_litellm()  # here, so that the threads do not queue up behind one another's import
        if groups and self.budget.max_usd is not None and price_usd(self.model, 1, 1) is None:
            raise JudgeError(
                f"the price of {self.model} is unknown, so no limit in USD can be kept; "
                "limit the calls instead (--max-calls)"
            )
        pool = ThreadPoolExecutor(self.concurrency, thread_name_prefix="art-patch-judge")
        try:
            group_of = {pool.submit(self._judge, group, order, stop): group for group in groups}
            yield ((group_of[future], future.result()) for future in as_completed(group_of))
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)

    def _judge(self, group: Group, order: Order, stop: threading.Event) -> _Outcome:
        """Ask about one group, part by part; all parts or none."""
        usage = Usage()
        if stop.is_set():
            return _Outcome(usage, reason=_NOT_TRIED)
        plan = self.plan(group, order=order)
        if plan.too_long:
            return _Outcome(usage, reason=f"too long for the judge: {plan.too_long}")
        facts = {"attempts": plan.attempts, "parts": len(plan.requests)}
        try:
            parts = [self._ask(request, usage, stop) for request in plan.requests]
        except AskError as error:
            longest = max(request.prompt_tokens for request in plan.requests)
            if error.at_fault == "length" and longest > _SHORTEST_LIMIT:
                # It reads less than we thought, or counts otherwise. What it refused for its length cost nothing.
                self.max_prompt_tokens = min(self.max_prompt_tokens or longest, longest // 2)
                outcome = self._judge(group, order, stop)
                outcome.usage.add(usage)
                return outcome
            by_budget, down = error.at_fault == "budget", error.at_fault == "judge"
            reason = error.reason if by_budget else f"no answer: {error.reason}"
            return _Outcome(usage, None, reason, down, error.failed, by_budget, facts)
        except VerdictError as error:
            return _Outcome(usage, reason=f"no valid verdict in two tries: {error}", failed=True, facts=facts)
        return _Outcome(usage, merge(parts), facts=facts)

    def _ask(self, request: Request, usage: Usage, stop: threading.Event) -> dict[str, Verdict]:
        """Ask once, and once more if the answer is not a valid verdict; return the verdicts by trajectory id.

        Raises:
            AskError: no answer.
            VerdictError: both answers were invalid; what was wrong with the second.
        """
        prompt = request.prompt
        text = self._client.ask(prompt.messages, request.estimate_usd, usage, stop)
        try:
            return _by_trajectory(prompt, parse_verdict(text, prompt.siblings))
        except VerdictError as error:
            wrong = str(error)
        repair = _REPAIR.format(error=wrong, ids=", ".join(prompt.siblings))
        messages = (
            *prompt.messages,
            {"role": "assistant", "content": text[:_QUOTED].strip() or "(empty)"},
            {"role": "user", "content": repair},
        )
        try:
            text = self._client.ask(messages, request.estimate_usd, usage, stop)
        except AskError as error:
            if error.at_fault != "budget" or error.failed:
                raise
            reason = f"{error.reason}; the answer before was no valid verdict: {wrong}"
            raise AskError(reason, "budget", failed=True) from None
        return _by_trajectory(prompt, parse_verdict(text, prompt.siblings))

    def _judgement(self, group: Group, outcome: _Outcome, order: Order, purpose: str, at: float) -> Judgement:
        return Judgement(
            id=derived_id("judgement", group.id, self.rubric.version, self.model, purpose, order, repr(at)),
            group_id=group.id,
            at=at,
            judge=self.model,
            rubric=self.rubric.version,
            purpose=purpose,
            state="failed" if outcome.verdicts is None else "ok",
            reason=outcome.reason,
            calls=outcome.usage.calls,
            prompt_tokens=outcome.usage.prompt_tokens,
            completion_tokens=outcome.usage.completion_tokens,
            cost_usd=outcome.usage.cost_usd,
            facts={"order": order, **outcome.facts},
        )

    def _nothing_judged(self, reasons: Mapping[str, str], groups: int) -> str:
        where = f" at {self._client.base_url}" if self._client.base_url else ""
        return (
            f"the judge {self.model}{where} gave no valid scores for any of {groups} group(s); the first reason "
            f"was: {next(iter(reasons.values()))} -- check its name (ART_PATCH_JUDGE), address "
            "(ART_PATCH_JUDGE_BASE_URL) and key (ART_PATCH_JUDGE_API_KEY); nothing was scored and nothing was lost"
        )


def _by_trajectory(prompt: JudgePrompt, verdicts: Mapping[str, Verdict]) -> dict[str, Verdict]:
    return {member: verdicts[name] for name, members in prompt.siblings.items() for member in members}
