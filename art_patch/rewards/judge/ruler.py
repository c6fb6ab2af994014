"""RULER: an LLM judge ranks the siblings of each group and gives each sibling a score.

- The judge is asked one question for each group, about several groups at once in threads. After an invalid answer it is
  asked once more and told the error.
- A group that could not be judged gets no scores, and its reason is reported. It never gets zeros, because training
  would learn from zeros.
- After three groups in a row without an answer, none of them through a fault of the group, the judge counts as down and
  is not asked about the other groups. So a dead judge costs a minute and not a night. Groups that were judged before
  keep their scores.
- `JudgeError` is raised if no group could be judged, unless the budget alone is the reason.
- The judge is not asked again for known scores, and the scores of each group are passed to `on_scored` as soon as they
  exist. A caller that stores them and loads them again uses the store as a cache: a run that was killed, or stopped by
  its budget, is continued by the next.
"""

import random
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from art_patch._lib.ids import derived_id
from art_patch.errors import ConfigError, JudgeError
from art_patch.rewards.combine import SCORE_NAME, SCORE_SOURCE
from art_patch.rewards.judge import client
from art_patch.rewards.judge import question as questions
from art_patch.rewards.judge.client import AskError, Budget, JudgeClient, Usage
from art_patch.rewards.judge.prompt import DEFAULT_RUBRIC, JudgePrompt, Rubric, write_prompt
from art_patch.rewards.judge.question import ANCHORS, Order, Question, Verdict, VerdictError
from art_patch.types import Group, Judgement, Score

# Expected answer of a judge for each attempt. A reasoning judge writes more; the budget learns how much.
_ANSWER_TOKENS = 100


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt for the judge, its length in tokens, and its likely price (`None` if the judge's price is unknown)."""

    prompt: JudgePrompt
    prompt_tokens: int
    estimate_usd: float | None


@dataclass(frozen=True, slots=True)
class Plan:
    """The prompts with which the judge scores one group, or the reason why the group is too long to be judged."""

    group_id: str
    attempts: int  # distinct transcripts
    requests: tuple[Request, ...] = ()  # one, or several if the group is split; none if it is too long
    too_long: str | None = None  # why no prompt of this group fits


@dataclass(frozen=True, slots=True)
class JudgeReport(Usage):
    """The result of judging some groups: scores, reasons for missing scores, and what it cost."""

    scores: tuple[Score, ...]  # one for each trajectory of each group that was judged, or was known already
    unscored: dict[str, str]  # group id -> reason
    judgements: tuple[Judgement, ...] = ()  # one for each group that was asked about


# So many groups in a row without an answer, and the judge counts as down.
_GIVE_UP_AFTER = 3
# Characters of an invalid answer that the repair try quotes; an endless answer must not fill the judge's context.
_QUOTED = 4000
# Tokens. A judge that refuses a prompt of this length as too long is not asked with a shorter one.
_SHORTEST_LIMIT = 2_000
_NOT_TRIED = "not tried: the judge had failed too often by then"

_REPAIR = """\
That answer cannot be used: {error}
Answer the same question again with the JSON object alone. Score exactly these ids: {ids}."""

# Callbacks, all called in the thread that called `score_groups`. Progress: (groups done, groups in all).
Progress = Callable[[int, int], None]
# Called with each group as soon as it is judged, so that its scores survive a kill.
OnScored = Callable[[Group, Sequence[Score], Usage], None]
# Called with the record of each question, whether it gave scores or not; after `OnScored`.
OnJudgement = Callable[[Judgement], None]


@dataclass(frozen=True, slots=True)
class _Outcome:
    """The verdicts on one group by trajectory id, or why there are none."""

    verdicts: dict[str, Verdict] | None = None
    reason: str | None = None
    usage: Usage = field(default_factory=Usage)
    judge_down: bool = False  # the failure was no fault of the group, so other groups would fail, too
    failed: bool = False  # the judge was asked, and no answer could be used
    by_budget: bool = False  # the budget allowed no further request
    facts: dict[str, Any] = field(default_factory=dict[str, Any])


class Judge:
    """An LLM judge that scores the siblings of a group against each other.

    Args:
        model: litellm's name of the model, such as `openai/gpt-5-mini` or `hosted_vllm/NAME`.
        base_url: address of the model's server; `None` for the provider's own address.
        api_key: `None` if litellm finds it in the environment.
        rubric: the text that tells the judge what makes an attempt good.
        budget: limits on all questions together; several judges may share one budget.
        max_siblings: largest number of attempts in one prompt, at least 3; larger groups are split.
        max_prompt_tokens: largest number of tokens in a prompt; by default litellm's number for the model, else
            100,000. It is lowered when the judge refuses a prompt as too long.
        max_retries: number of retries of a question after temporary failures (429, 5xx, timeout).
        timeout_s: how long one answer may take.
        pause_s: upper limit of the first random pause before a retry; it doubles with each retry.
        extra: further arguments of `litellm.completion`, such as `reasoning_effort`; they override ours.

    Raises:
        JudgeError: no model is named.
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
        self._client = JudgeClient(model, base_url, api_key, max_retries, timeout_s, pause_s, self.budget, extra or {})

    def plan(self, group: Group, *, order: Order = "shuffled") -> Plan:
        """Return the prompts for a group with their token counts and likely prices. Nothing is sent to the judge."""
        limit = self.max_prompt_tokens or client.context_tokens(self.model)

        def size(question: Question) -> int:
            return client.count_tokens(self.model, write_prompt(question, self.rubric, rng=random.Random(0)).text)

        whole = questions.make_question(group)
        # The anchors are drawn by the group's id, so both orders of a group are split alike.
        rng = questions.rng_of(group, "anchors")
        try:
            parts = questions.split(whole, size, max_tokens=limit, max_siblings=self.max_siblings, rng=rng)
        except questions.TooLongError as error:
            return Plan(group.id, len(whole.attempts), too_long=str(error))
        requests: list[Request] = []
        for part in parts:
            # Ids and nonce of the prompt that is sent must not be known beforehand; those of `size` do not matter.
            prompt, tokens = write_prompt(part.turned(order), self.rubric, rng=random.SystemRandom()), size(part)
            estimate = client.price_usd(self.model, tokens, _ANSWER_TOKENS * len(part.attempts))
            requests.append(Request(prompt, tokens, estimate))
        return Plan(group.id, len(whole.attempts), tuple(requests))

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
        """Score the siblings of each group; report the reason for each group without scores.

        Args:
            order: order of the siblings in the prompt. `reversed` is exactly the reverse of `shuffled`. Scores of both
                orders have the same ids, so store the scores of one order only.
            known: earlier scores. The judge is not asked about a group if every sibling has a score of this judge under
                this rubric.
            purpose: what the questions are for; noted in the `Judgement` of each question.
            now: time of the scores and judgements, in seconds since the epoch.

        Raises:
            JudgeError: no group could be judged and the budget alone is not the reason; or the budget has a limit in
                USD and the judge's price is unknown.
        """
        waiting = list(groups)
        at = time.time() if now is None else now
        found = _known_scores(waiting, known, judge=self.model, rubric=self.rubric.version)
        asked = [group for group in waiting if group.id not in found]
        scores = [score for of_group in found.values() for score in of_group]
        unscored, failed, judgements, spent = dict[str, str](), dict[str, str](), list[Judgement](), list[Usage]()
        failures, by_budget, stop = 0, False, threading.Event()
        with self._asking(asked, order, stop) as outcomes:
            for group, outcome in outcomes:
                spent.append(outcome.usage)
                if outcome.verdicts is None:
                    unscored[group.id] = outcome.reason or ""
                else:
                    given = _make_scores(group, outcome.verdicts, judge=self.model, rubric=self.rubric.version, at=at)
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
        return JudgeReport(tuple(scores), unscored, tuple(judgements), **asdict(client.total(spent)))

    @contextmanager
    def _asking(
        self, groups: Sequence[Group], order: Order, stop: threading.Event
    ) -> Generator[Iterator[tuple[Group, _Outcome]]]:
        """Judge groups in parallel: yield each with its outcome as it is done; stop all questions after the block."""
        if groups:
            client.load_litellm()  # here, so that the threads do not queue up behind one another's import
        if groups and self.budget.max_usd is not None:
            client.require_price(self.model)
        pool = ThreadPoolExecutor(self.concurrency, thread_name_prefix="art-patch-judge")
        try:
            group_of = {pool.submit(self._judge, group, order, stop): group for group in groups}
            yield ((group_of[future], future.result()) for future in as_completed(group_of))
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)

    def _judge(self, group: Group, order: Order, stop: threading.Event) -> _Outcome:
        spent: list[Usage] = []
        outcome = self._verdicts(group, order, stop, spent)
        return replace(outcome, usage=client.total(spent))

    def _verdicts(self, group: Group, order: Order, stop: threading.Event, spent: list[Usage]) -> _Outcome:
        """Ask about one group, part by part. One part without a verdict leaves the whole group without scores."""
        if stop.is_set():
            return _Outcome(reason=_NOT_TRIED)
        plan = self.plan(group, order=order)
        if plan.too_long:
            return _Outcome(reason=f"too long for the judge: {plan.too_long}")
        facts = {"attempts": plan.attempts, "parts": len(plan.requests)}
        try:
            parts = [self._ask(request, spent, stop) for request in plan.requests]
        except AskError as error:
            longest = max(request.prompt_tokens for request in plan.requests)
            if error.at_fault == "length" and longest > _SHORTEST_LIMIT:
                # Its context is smaller than litellm says, or it counts tokens differently. A refusal costs nothing.
                self.max_prompt_tokens = min(self.max_prompt_tokens or longest, longest // 2)
                return self._verdicts(group, order, stop, spent)
            by_budget = error.at_fault == "budget"
            return _Outcome(
                reason=error.reason if by_budget else f"no answer: {error.reason}",
                judge_down=error.at_fault == "judge",
                failed=error.failed,
                by_budget=by_budget,
                facts=facts,
            )
        except VerdictError as error:
            return _Outcome(reason=f"no valid verdict in two tries: {error}", failed=True, facts=facts)
        return _Outcome(questions.merge(parts), facts=facts)

    def _ask(self, request: Request, spent: list[Usage], stop: threading.Event) -> dict[str, Verdict]:
        """Ask once, and once more if the answer is not a valid verdict; return verdicts by trajectory id.

        `AskError` if the judge gave no answer, `VerdictError` about the second answer if both were invalid.
        """
        prompt = request.prompt
        text = self._client.ask(prompt.messages, request.estimate_usd, spent, stop)
        try:
            return _by_trajectory(prompt, questions.parse_verdict(text, prompt.siblings))
        except VerdictError as error:
            wrong = str(error)
        quoted = {"role": "assistant", "content": text[:_QUOTED].strip() or "(empty)"}
        repair = {"role": "user", "content": _REPAIR.format(error=wrong, ids=", ".join(prompt.siblings))}
        messages = (*prompt.messages, quoted, repair)
        try:
            text = self._client.ask(messages, request.estimate_usd, spent, stop)
        except AskError as error:
            if error.at_fault != "budget" or error.failed:
                raise
            # The budget ended before the repair try, but the judge was asked and failed, and that must not be hidden.
            reason = f"{error.reason}; the answer before was no valid verdict: {wrong}"
            raise AskError(reason, "budget", failed=True) from None
        return _by_trajectory(prompt, questions.parse_verdict(text, prompt.siblings))

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
            **asdict(outcome.usage),
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


def _known_scores(
    groups: Sequence[Group], scores: Iterable[Score], *, judge: str, rubric: str
) -> dict[str, tuple[Score, ...]]:
    """Return group id -> scores, for each group whose siblings all have a score of this judge under this rubric."""
    found: dict[tuple[str | None, str], Score] = {}
    for score in scores:
        if (score.name, score.source, score.judge, score.rubric) == (SCORE_NAME, SCORE_SOURCE, judge, rubric):
            found[score.group_id, score.trajectory_id] = score
    keys_of = {group.id: [(group.id, sibling.id) for sibling in group.trajectories] for group in groups}
    return {name: tuple(found[key] for key in keys) for name, keys in keys_of.items() if found.keys() >= set(keys)}


def _make_scores(
    group: Group, verdicts: Mapping[str, Verdict], *, judge: str, rubric: str, at: float
) -> tuple[Score, ...]:
    """Return a score for each verdict; a second judgement has the same ids, so it replaces the scores of the first."""
    about: dict[str, Any] = {"group_id": group.id, "rubric": rubric, "judge": judge}

    def score(key: str, verdict: Verdict) -> Score:
        name = derived_id(SCORE_NAME, group.id, key, rubric, judge)
        return Score(name, key, SCORE_NAME, verdict.score, SCORE_SOURCE, at, verdict.explanation, **about)

    return tuple(score(key, verdict) for key, verdict in verdicts.items())
