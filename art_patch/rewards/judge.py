"""RULER: groups in, a score for each sibling out, from an LLM that ranks the siblings of one group against each other.

- One question a group, groups side by side in threads. An answer that is not a valid verdict gets one repair try.
- A group that could not be judged is left out whole and named with the reason. It never becomes zero: a zero would be
  learned from.
- A judge that fails several groups running for no reason of theirs is given up, so that a dead judge costs a minute and
  not a night; groups judged by then keep their scores. Not one group judged is a `JudgeError`.
- Siblings with the same transcript get the same score. A score only means something within its group.
"""

from __future__ import annotations

import hashlib
import random
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass

from art_patch.errors import JudgeError
from art_patch.records import Group, Score
from art_patch.rewards.client import AskError, JudgeClient, Usage, load_litellm
from art_patch.rewards.prompt import JudgePrompt, build_prompt
from art_patch.rewards.rubric import DEFAULT_RUBRIC, Rubric
from art_patch.rewards.verdict import Verdict, VerdictError, parse_verdict

SCORE_NAME = "ruler"
SCORE_SOURCE = "ruler"

_GIVE_UP_AFTER = 3
"""So many groups in a row without an answer, after all their retries, and the judge counts as down."""
_QUOTED = 4000
"""Characters of a bad answer that the judge gets to see again; a runaway one must not fill its context."""

_REPAIR = """\
That answer cannot be used: {error}
Answer the same question again with the JSON object alone. Score exactly these ids: {ids}."""

Progress = Callable[[int, int], None]
"""Called with (groups done, groups in all), in the thread that called `score_groups`."""


@dataclass(frozen=True, slots=True)
class JudgeReport:
    """What came of judging some groups.

    Attributes:
        scores: one for each trajectory of each group that was judged.
        unscored: group id -> why the group has no scores.
        calls: requests made, repair tries and retries included.
        prompt_tokens: as the judge's server counted them.
        completion_tokens: as the judge's server counted them.
        cost_usd: `None` where the price of an answer is not known.
    """

    scores: tuple[Score, ...]
    unscored: dict[str, str]
    calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost_usd: float | None = None


@dataclass(frozen=True, slots=True)
class _Outcome:
    """One group judged: `verdicts` by trajectory id, or why there are none."""

    usage: Usage
    verdicts: dict[str, Verdict] | None = None
    reason: str = ""
    judge_down: bool = False


class Judge:
    """An LLM that ranks siblings.

    Args:
        model: litellm's name of it, such as `openai/gpt-5-mini` or `hosted_vllm/NAME`.
        base_url: address where it is not the provider's own.
        api_key: key where litellm does not find it in the environment.
        rubric: what it should value.
        concurrency: groups judged at once.
        max_retries: how often one question is asked again after a passing failure (429, 5xx, timeout).
        timeout_s: how long one answer may take.
        pause_s: the first pause before a retry is up to this long, each further one up to twice the last.

    Raises:
        JudgeError: no model is given.
    """

    def __init__(
        self,
        model: str | None,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        rubric: Rubric = DEFAULT_RUBRIC,
        concurrency: int = 4,
        max_retries: int = 4,
        timeout_s: float = 120.0,
        pause_s: float = 1.0,
    ) -> None:
        if not model:
            raise JudgeError(
                "no judge is configured; name the model that ranks siblings with ART_PATCH_JUDGE or --judge, "
                "for example ART_PATCH_JUDGE=openai/gpt-5-mini (and ART_PATCH_JUDGE_BASE_URL for a server of your own)"
            )
        self.model = model
        self.rubric = rubric
        self.concurrency = concurrency
        self._client = JudgeClient(
            model, base_url=base_url, api_key=api_key, max_retries=max_retries, timeout_s=timeout_s, pause_s=pause_s
        )

    def score_groups(
        self, groups: Iterable[Group], *, progress: Progress | None = None, now: float | None = None
    ) -> JudgeReport:
        """Return scores for the siblings of each group, and why where there are none.

        Args:
            groups: what to judge.
            progress: told after each group.
            now: `Score.at`; the present unless given.

        Raises:
            JudgeError: there were groups, and not one could be judged.
        """
        waiting = list(groups)
        if not waiting:
            return JudgeReport(scores=(), unscored={}, cost_usd=0.0)
        load_litellm()  # here, so that the threads do not queue up behind one another's import
        at = time.time() if now is None else now
        stop = threading.Event()
        total, failures = Usage(), 0
        scores: list[Score] = []
        unscored: dict[str, str] = {}
        pool = ThreadPoolExecutor(self.concurrency, thread_name_prefix="art-patch-judge")
        try:
            group_of = {pool.submit(self._judge, group, stop): group for group in waiting}
            for done, future in enumerate(as_completed(group_of), start=1):
                group, outcome = group_of[future], future.result()
                total.add(outcome.usage)
                if outcome.verdicts is None:
                    unscored[group.id] = outcome.reason
                else:
                    scores += [self._score(group.id, key, verdict, at) for key, verdict in outcome.verdicts.items()]
                failures = failures + 1 if outcome.judge_down else 0
                if failures >= _GIVE_UP_AFTER:
                    stop.set()
                if progress is not None:
                    progress(done, len(waiting))
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)
        if not scores:
            raise JudgeError(self._nothing_judged(unscored))
        return JudgeReport(
            tuple(scores), unscored, total.calls, total.prompt_tokens, total.completion_tokens, total.cost_usd
        )

    def _judge(self, group: Group, stop: threading.Event) -> _Outcome:
        """Ask once, and once more if the answer is not a valid verdict."""
        usage = Usage()
        if stop.is_set():
            return _Outcome(usage, reason="not tried: the judge had failed too often by then")
        prompt = build_prompt(group, self.rubric, rng=random.SystemRandom())
        messages = prompt.messages
        text = problem = ""
        for _ in range(2):
            try:
                text = self._client.ask(messages, usage, stop)
                return _Outcome(usage, _by_trajectory(prompt, parse_verdict(text, prompt.siblings)))
            except AskError as error:
                return _Outcome(usage, reason=f"no answer: {error.reason}", judge_down=error.for_all)
            except VerdictError as error:
                problem = str(error)
                repair = _REPAIR.format(error=problem, ids=", ".join(prompt.siblings))
                messages = (
                    *prompt.messages,
                    {"role": "assistant", "content": text[:_QUOTED].strip() or "(empty)"},
                    {"role": "user", "content": repair},
                )
        return _Outcome(usage, reason=f"no valid verdict in two tries: {problem}")

    def _score(self, group_id: str, trajectory_id: str, verdict: Verdict, at: float) -> Score:
        # The id is derived: judging the same group again under the same rubric replaces the scores, as after a crash
        # between judging and the end of a cycle.
        key = "\0".join((SCORE_NAME, group_id, trajectory_id, self.rubric.version, self.model))
        return Score(
            id=hashlib.sha256(key.encode()).hexdigest()[:32],
            trajectory_id=trajectory_id,
            name=SCORE_NAME,
            value=verdict.score,
            source=SCORE_SOURCE,
            at=at,
            comment=verdict.explanation,
            group_id=group_id,
            rubric=self.rubric.version,
            judge=self.model,
        )

    def _nothing_judged(self, unscored: dict[str, str]) -> str:
        where = f" at {self._client.base_url}" if self._client.base_url else ""
        return (
            f"the judge {self.model}{where} gave no valid scores for any of {len(unscored)} group(s); the first reason "
            f"was: {next(iter(unscored.values()))} -- check its name (ART_PATCH_JUDGE), address "
            "(ART_PATCH_JUDGE_BASE_URL) and key (ART_PATCH_JUDGE_API_KEY); nothing was scored and nothing was lost"
        )


def _by_trajectory(prompt: JudgePrompt, verdicts: dict[str, Verdict]) -> dict[str, Verdict]:
    return {member: verdicts[name] for name, members in prompt.siblings.items() for member in members}
