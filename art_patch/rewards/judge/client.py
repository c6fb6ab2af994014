"""One question to the judge over HTTP: messages in, its text out, through litellm. Knows nothing of groups.

- litellm belongs to the job process. It takes seconds to import, so that happens in a function, and it is told to stay
  off the network for its price list, and silent. It imports nothing into the app.
- What passes (429, 408, 5xx, no connection, timeout, a body that is no completion) is tried again with growing, random
  pauses, or after the pause that the server asked for. litellm's own retries reach only some providers and need
  tenacity as well, so tenacity is used directly and litellm's are off.
- `temperature` and `response_format` are asked for and not insisted on: litellm drops them for models that it knows
  not to take them, and a server that refuses one by name is asked again, from then on without it.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from art_patch.errors import JudgeError
from art_patch.rewards.judge.budget import Budget, BudgetUsedUp
from art_patch.rewards.judge.verdict import VERDICT_SCHEMA

if TYPE_CHECKING:
    from tenacity import RetryCallState

_PASSING = frozenset((408, 409, 425, 429))
_REFUSED_FOR_ALL = frozenset((401, 402, 403, 404))
_LONGEST_PAUSE_S = 60.0
_REASON_LENGTH = 400


class AskError(Exception):
    """The judge gave no answer.

    Attributes:
        reason: what happened, in one line.
        at_fault: the `judge`: the same is to be expected of every other question; this `question`: it was refused;
            its `length`: it is more than the judge can read; the `budget`: it is used up.
        failed: whether the judge was asked and failed; with the budget used up, at an earlier try.
    """

    def __init__(
        self, reason: str, at_fault: Literal["judge", "question", "length", "budget"], *, failed: bool = True
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        self.at_fault = at_fault
        self.failed = failed


@dataclass(slots=True)
class Usage:
    """What was spent. `cost_usd` is `None` as soon as one answer's price is unknown."""

    calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost_usd: float | None = 0.0

    def add(self, other: Usage) -> None:
        """Add what was spent elsewhere."""
        self.calls += other.calls
        self.prompt_tokens += other.prompt_tokens
        self.completion_tokens += other.completion_tokens
        known = self.cost_usd is not None and other.cost_usd is not None
        self.cost_usd = (self.cost_usd or 0.0) + (other.cost_usd or 0.0) if known else None


class JudgeClient:
    """Asks one model. May be used by several threads at once.

    Args:
        model: litellm's name of the model.
        base_url: address where it is not the provider's own.
        api_key: key where litellm does not find it in the environment.
        max_retries: how often a question is asked again after a passing failure.
        timeout_s: how long one answer may take.
        pause_s: the first pause is up to this long; each further one up to twice as long as the last.
        budget: what all questions together may cost.
        extra: further arguments of `litellm.completion`; they win over ours.
    """

    def __init__(
        self,
        model: str,
        *,
        base_url: str | None,
        api_key: str | None,
        max_retries: int,
        timeout_s: float,
        pause_s: float,
        budget: Budget,
        extra: Mapping[str, Any],
    ) -> None:
        self.model = model
        self.base_url = base_url
        self.timeout_s = timeout_s
        self.max_retries = max_retries
        self.pause_s = pause_s
        self.budget = budget
        self._extra = dict(extra)
        # A server on this machine that needs no key must not be sent the provider's key from the environment either.
        self._api_key = api_key or ("none" if base_url and _is_loopback(base_url) else None)
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
        """Return the judge's text (empty if it refused), adding what it took to `usage`.

        Args:
            messages: the question.
            estimate_usd: what one request is likely to cost, for the budget; `None` where no price is known.
            usage: is added to.
            stop: when set, no more requests are made.

        Raises:
            AskError: no answer, after all retries, once `stop` was set, or because the budget is used up.
        """
        import openai  # litellm's errors are subclasses of the SDK's

        failures: list[Exception] = []
        while True:
            wishes = dict(self._wishes)
            try:
                return self._complete(messages, wishes, estimate_usd, usage, stop, failures)
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

    def _complete(
        self,
        messages: Sequence[dict[str, str]],
        wishes: dict[str, Any],
        estimate_usd: float | None,
        usage: Usage,
        stop: threading.Event,
        failures: list[Exception],
    ) -> str:
        import openai
        import tenacity

        def attempt() -> Any:
            try:
                return self._request(messages, wishes, estimate_usd, usage, stop)
            except openai.APIError as error:
                failures.append(error)  # the next try may end for the budget, and hide that the judge is broken
                raise

        backoff = tenacity.wait_random_exponential(multiplier=self.pause_s, max=_LONGEST_PAUSE_S)
        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception(_is_passing),
            stop=tenacity.stop_after_attempt(self.max_retries + 1) | tenacity.stop_when_event_set(stop),
            wait=lambda state: _asked_pause_s(state) or backoff(state),
            sleep=tenacity.sleep_using_event(stop),
            reraise=True,
        )
        response = retrying(attempt)
        return response.choices[0].message.content or "" if response.choices else ""

    def _request(
        self,
        messages: Sequence[dict[str, str]],
        wishes: dict[str, Any],
        estimate_usd: float | None,
        usage: Usage,
        stop: threading.Event,
    ) -> Any:
        """Make one HTTP request, within the budget."""
        import openai

        reserved = self.budget.reserve(estimate_usd)
        cost: float | None = 0.0
        try:
            if stop.is_set():  # while the budget made us wait, or another part of the group was asked about
                raise AskError("stopped", "question", failed=False)
            usage.calls += 1
            response = load_litellm().completion(
                **{
                    "model": self.model,
                    "messages": list(messages),
                    "api_base": self.base_url,
                    "api_key": self._api_key,
                    "timeout": self.timeout_s,
                    "max_retries": 0,
                    "num_retries": 0,
                    "drop_params": True,
                    **wishes,
                    **self._extra,
                }
            )
            cost = getattr(response, "_hidden_params", {}).get("response_cost")
        except openai.APITimeoutError:
            cost = None
            raise
        finally:
            self.budget.settle(reserved, cost)
        spent = getattr(response, "usage", None)
        usage.add(
            Usage(
                prompt_tokens=getattr(spent, "prompt_tokens", None) or 0,
                completion_tokens=getattr(spent, "completion_tokens", None) or 0,
                cost_usd=cost,
            )
        )
        return response


def load_litellm() -> Any:
    """Import litellm, off the network and silent. Seconds the first time.

    Raises:
        JudgeError: litellm is not installed.
    """
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    first = "litellm" not in sys.modules
    try:
        importlib.import_module("tenacity")
        # Any: litellm ships annotations that a strict checker cannot follow.
        litellm: Any = importlib.import_module("litellm")
    except ModuleNotFoundError as error:
        raise JudgeError(f"{error.name} is not installed; the judge needs it: pip install 'art-patch[judge]'") from None
    if first:
        # Its models are put together when first used, with warnings that it silences when imported: do both at once.
        litellm.ModelResponse()
    litellm.telemetry = False
    litellm.disable_hf_tokenizer_download = True
    litellm.suppress_debug_info = True
    if "LITELLM_LOG" not in os.environ:
        for name in ("LiteLLM", "LiteLLM Router", "LiteLLM Proxy"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    return litellm


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
    """The pause that the server asked for with `Retry-After`, in seconds; `None` if it named none or a date."""
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
