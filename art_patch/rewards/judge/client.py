"""Sends one question to the judge over HTTP, through litellm, and returns its text. It knows nothing of groups.

- Temporary failures (429, 408, 5xx, no connection, timeout, a body that is not a completion) are retried after growing,
  random pauses, or after the pause that the server asked for. tenacity does the retries. litellm's own retries are off,
  because they work for some providers only and need tenacity as well.
- `temperature` and `response_format` are optional. litellm drops them for models that it knows not to accept them. If a
  server's error names one of them, the question is sent again without it, and so are all later questions.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from art_patch.rewards.judge.cost import Budget, BudgetUsedUp, Usage, load_litellm
from art_patch.rewards.judge.verdict import VERDICT_SCHEMA

if TYPE_CHECKING:
    from tenacity import RetryCallState

_PASSING = frozenset((408, 409, 425, 429))
_REFUSED_FOR_ALL = frozenset((401, 402, 403, 404))
_LONGEST_PAUSE_S = 60.0
_REASON_LENGTH = 400


class AskError(Exception):
    """Raised if the judge gave no answer. It names the reason, and whether judge, question or budget is at fault."""

    def __init__(
        self, reason: str, at_fault: Literal["judge", "question", "length", "budget"], *, failed: bool = True
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        # `judge`: every other question would fail, too. `question`: this one was refused. `length`: it is longer than
        # the judge can read. `budget`: no further request is allowed.
        self.at_fault = at_fault
        # Whether the judge was asked and failed; with `budget`, at an earlier try.
        self.failed = failed


@dataclass(frozen=True, slots=True)
class _Asked:
    """A question with the estimate of one request's price, the usage to add to, and the event that stops it."""

    messages: Sequence[dict[str, str]]
    estimate_usd: float | None
    usage: Usage
    stop: threading.Event


@dataclass(kw_only=True, repr=False)  # a repr would show the key
class JudgeClient:
    """Sends questions to one model, also from several threads. Its fields mean the same as the arguments of `Judge`."""

    model: str
    base_url: str | None
    api_key: str | None
    max_retries: int
    timeout_s: float
    pause_s: float
    budget: Budget
    extra: Mapping[str, Any]

    def __post_init__(self) -> None:
        """Choose the key, and what is asked of the model besides the text."""
        # A server on this machine that needs no key must not be sent the provider's key from the environment either.
        if not self.api_key and self.base_url and _is_loopback(self.base_url):
            self.api_key = "none"
        self._wishes: dict[str, Any] = {
            "temperature": 0,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "verdict", "schema": VERDICT_SCHEMA, "strict": True},
            },
        }

    def ask(
        self, messages: Sequence[dict[str, str]], estimate_usd: float | None, usage: Usage, stop: threading.Event
    ) -> str:
        """Return the text of the judge's answer, empty if the judge refused; add what the request cost to `usage`.

        Args:
            estimate_usd: likely price of one request, for the budget; `None` if unknown.
            stop: once this event is set, no further request is made.

        Raises:
            AskError: no answer after all retries, `stop` was set, or the budget is used up.
        """
        import openai  # litellm's errors are subclasses of the SDK's

        asked, failures = _Asked(messages, estimate_usd, usage, stop), list[Exception]()
        while True:
            wishes = dict(self._wishes)
            try:
                return self._complete(asked, wishes, failures)
            except BudgetUsedUp as error:
                before = f"; no answer before: {_ask_error(failures[-1]).reason}" if failures else ""
                raise AskError(f"budget used up: {error}{before}", "budget", failed=bool(failures)) from error
            except openai.BadRequestError as error:
                refused = [wish for wish in wishes if wish in str(error)]
                if not refused:
                    raise _ask_error(error) from error
                for wish in refused:
                    self._wishes.pop(wish, None)
            except openai.APIError as error:
                raise _ask_error(error) from error

    def _complete(self, asked: _Asked, wishes: dict[str, Any], failures: list[Exception]) -> str:
        import openai
        import tenacity

        def attempt() -> Any:
            try:
                return self._request(asked, wishes)
            except openai.APIError as error:
                failures.append(error)  # the next try may end for the budget, and hide that the judge is broken
                raise

        backoff = tenacity.wait_random_exponential(multiplier=self.pause_s, max=_LONGEST_PAUSE_S)
        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception(_is_passing),
            stop=tenacity.stop_after_attempt(self.max_retries + 1) | tenacity.stop_when_event_set(asked.stop),
            wait=lambda state: _asked_pause_s(state) or backoff(state),
            sleep=tenacity.sleep_using_event(asked.stop),
            reraise=True,
        )
        response = retrying(attempt)
        return response.choices[0].message.content or "" if response.choices else ""

    def _request(self, asked: _Asked, wishes: dict[str, Any]) -> Any:
        """Make one HTTP request within the budget."""
        import openai

        reserved = self.budget.reserve(asked.estimate_usd)
        cost: float | None = 0.0
        try:
            if asked.stop.is_set():  # while the budget made us wait, or another part of the group was asked about
                raise AskError("stopped", "question", failed=False)
            asked.usage.calls += 1
            response = load_litellm().completion(
                **{
                    "model": self.model,
                    "messages": list(asked.messages),
                    "api_base": self.base_url,
                    "api_key": self.api_key or None,
                    "timeout": self.timeout_s,
                    "max_retries": 0,
                    "num_retries": 0,
                    "drop_params": True,
                    **wishes,
                    **self.extra,
                }
            )
            cost = getattr(response, "_hidden_params", {}).get("response_cost")
        # The server may have computed, and will charge for, an answer that nobody waited for: its cost is unknown, not
        # 0.
        except openai.APITimeoutError:
            cost = None
            raise
        finally:
            self.budget.settle(reserved, cost)
        spent = getattr(response, "usage", None)
        asked.usage.add(
            Usage(
                prompt_tokens=getattr(spent, "prompt_tokens", None) or 0,
                completion_tokens=getattr(spent, "completion_tokens", None) or 0,
                cost_usd=cost,
            )
        )
        return response


def _status(error: BaseException) -> int | None:
    status = getattr(error, "status_code", None)
    return status if isinstance(status, int) else None


def _is_passing(error: BaseException) -> bool:
    """Whether the same question may be answered a little later."""
    import openai

    if not isinstance(error, openai.APIError):
        return False
    status = _status(error)
    # Below 400: the server said success and sent something that is not a completion, as a proxy in trouble does.
    return status is None or status in _PASSING or status >= 500 or status < 400


def _asked_pause_s(state: RetryCallState) -> float | None:
    """Return the pause of the server's `Retry-After` in seconds; `None` if there is none, or a date."""
    error = state.outcome.exception() if state.outcome else None
    headers: Any = getattr(error, "litellm_response_headers", None) or {}
    try:
        pause_s = float(headers.get("retry-after") or "nan")
    except ValueError:
        return None
    return min(pause_s, _LONGEST_PAUSE_S) if pause_s > 0 else None


def _ask_error(error: Exception) -> AskError:
    reason = " ".join(str(error).split())
    clipped = reason if len(reason) <= _REASON_LENGTH else reason[: _REASON_LENGTH - 3] + "..."
    if isinstance(error, load_litellm().ContextWindowExceededError):
        return AskError(clipped, "length")
    return AskError(clipped, "judge" if _is_passing(error) or _status(error) in _REFUSED_FOR_ALL else "question")


def _is_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    return host in ("localhost", "::1") or host.startswith("127.")
