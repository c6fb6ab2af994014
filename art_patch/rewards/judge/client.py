"""Sends one question to the judge over HTTP through litellm, within a budget, and returns its text.

- Temporary failures (429, 408, 5xx, no connection, timeout, a body that is not a completion) are retried after growing,
  random pauses, or after the pause that the server asked for. tenacity does the retries. litellm's own retries are off,
  because they work for some providers only and need tenacity as well.
- `temperature` and `response_format` are optional. litellm drops them for models that it knows not to accept them. If a
  server's error names one of them, the question is sent again without it, and so are all later questions.
"""

import contextlib
import importlib
import logging
import os
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from art_patch.errors import ConfigError, JudgeError
from art_patch.rewards.judge.question import VERDICT_SCHEMA

if TYPE_CHECKING:
    from tenacity import RetryCallState


def load_litellm() -> Any:
    """Import litellm without network access and log messages; the first call takes seconds. May raise `JudgeError`."""
    # Before the import: litellm downloads its price list while it is imported.
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


# --- tokens and money ---

# Prompt tokens that a judge can read, where litellm does not know it.
_ASSUMED_CONTEXT = 100_000
# Tokens of a judge's context that are kept free for its answer and a repair try.
_ANSWER_ROOM = 8_192


def count_tokens(model: str, text: str) -> int:
    """Return a text's number of tokens for a model; an estimate if litellm lacks the model's own tokenizer."""
    return load_litellm().token_counter(model=model, text=text)


def context_tokens(model: str) -> int:
    """Return the most tokens that a prompt for this model may have: litellm's number, or a default if it has none."""
    with contextlib.suppress(Exception):  # litellm raises a bare Exception for a model that it does not know
        if known := load_litellm().get_model_info(model).get("max_input_tokens"):
            return max(known - _ANSWER_ROOM, known // 2)
    return _ASSUMED_CONTEXT


def price_usd(model: str, prompt_tokens: int, completion_tokens: int) -> float | None:
    """Return the price of a request with these token counts; `None` if the model is not on litellm's price list."""
    counts = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
    with contextlib.suppress(Exception):  # a bare Exception here, too
        return sum(load_litellm().cost_per_token(model=model, **counts))
    return None


def require_price(model: str) -> None:
    """Raise `JudgeError` if a model's price is unknown, so that no limit in USD can be kept."""
    if price_usd(model, 1, 1) is None:
        raise JudgeError(
            f"the price of {model} is unknown, so no limit in USD can be kept; limit the calls instead (--max-calls)"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Requests, tokens and USD that judging spent."""

    calls: int = 0  # HTTP requests, retries and repair tries included
    prompt_tokens: int = 0  # tokens as the judge's server counted them
    completion_tokens: int = 0
    cost_usd: float | None = 0.0  # `None` if the price of an answer is unknown


def total(usages: Iterable[Usage]) -> Usage:
    """Return the sum of several usages; its cost is `None` if one of theirs is."""
    every = list(usages)
    costs = [one.cost_usd for one in every if one.cost_usd is not None]
    return Usage(
        calls=sum(one.calls for one in every),
        prompt_tokens=sum(one.prompt_tokens for one in every),
        completion_tokens=sum(one.completion_tokens for one in every),
        cost_usd=sum(costs, 0.0) if len(costs) == len(every) else None,
    )


class BudgetUsedUp(Exception):
    """Raised if the budget does not allow the next request; the message names the limit that was reached."""


@dataclass(frozen=True, slots=True)
class Reservation:
    """A request that the budget has allowed: its estimated price, and the USD that are held for it until `settle`."""

    estimate_usd: float
    held_usd: float


class Budget:
    """Limits on the requests to a judge; `None` is no limit. Threads, and several judges, may share one budget.

    A request is allowed if the money spent, the money held for requests under way and the expected price together stay
    within the limit. The limit on calls is never exceeded. A request that the server refused, or that did not reach it,
    uses up nothing; one whose answer did not come in time may have cost something, and counts. The limit in USD can be
    exceeded, because the price of an answer is only known afterwards. So requests go one at a time until the first
    answer is paid for. From then on, a request is expected to exceed its estimate by the same factor as the most
    expensive answer so far. If later answers exceed their estimates by a larger factor, the limit can be exceeded by
    the difference.

    `max_calls` counts repair tries, too. Raises a `ConfigError` if a limit is negative or not a number.
    """

    def __init__(self, max_usd: float | None = None, max_calls: int | None = None) -> None:
        for name, limit in (("max_usd", max_usd), ("max_calls", max_calls)):
            if limit is not None and not limit >= 0:
                raise ConfigError(f"{name} is {limit}; give a number of 0 or more, or leave it out for no limit")
        self.max_usd = max_usd
        self.max_calls = max_calls
        self.calls = 0  # requests that were answered, may have been, or are under way
        self.spent_usd = 0.0  # known costs, and the expected price of each request whose cost is unknown
        self._changed = threading.Condition()
        self._held: list[Reservation] = []
        self._dearness: float | None = None  # largest price / estimate so far; `None` until an answer was paid for

    def reserve(self, estimate_usd: float | None) -> Reservation:
        """Allow one request, waiting for those under way; `BudgetUsedUp` at a limit, or without a price to compare."""
        with self._changed:
            # Without a first price a burst of parallel requests could overrun the limit many times.
            while self.max_usd is not None and self._dearness is None and self._held:
                self._changed.wait()
            # One that is under way may be refused.
            while self.max_calls is not None and self.calls >= self.max_calls and self._held:
                self._changed.wait()
            if self.max_calls is not None and self.calls >= self.max_calls:
                raise BudgetUsedUp(f"{self.calls} of {self.max_calls} calls were made")
            held = Reservation(0.0, 0.0) if self.max_usd is None else self._hold(self.max_usd, estimate_usd)
            self.calls += 1
            self._held.append(held)
            return held

    def settle(self, reservation: Reservation, cost_usd: float | None, *, was_refused: bool = False) -> None:
        """End a reserved request with its cost in USD.

        The cost is 0 if the server refused the request, which is not counted then. `None`: the cost is unknown, so the
        held amount counts as spent.
        """
        with self._changed:
            self._held.remove(reservation)
            self.calls -= was_refused
            self.spent_usd += reservation.held_usd if cost_usd is None else cost_usd
            if cost_usd and reservation.estimate_usd:
                self._dearness = max(self._dearness or 0.0, cost_usd / reservation.estimate_usd)
            self._changed.notify_all()

    def _hold(self, max_usd: float, estimate_usd: float | None) -> Reservation:
        if estimate_usd is None:
            raise BudgetUsedUp("the judge's price is unknown, so no limit in USD can be kept; limit the calls instead")
        expected = estimate_usd * max(self._dearness or 1.0, 1.0)
        under_way = sum(reservation.held_usd for reservation in self._held)
        if self.spent_usd + under_way + expected > max_usd:
            raise BudgetUsedUp(
                f"${self.spent_usd:.4g} of ${max_usd:.4g} were spent, ${under_way:.4g} are held for requests under "
                f"way, and the next one is expected to cost ${expected:.4g}"
            )
        return Reservation(estimate_usd, expected)


# --- requests ---

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


@dataclass(repr=False)  # a repr would show the key
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
        schema = {"name": "verdict", "schema": VERDICT_SCHEMA, "strict": True}
        self._wishes: dict[str, Any] = {
            "temperature": 0,
            "response_format": {"type": "json_schema", "json_schema": schema},
        }

    def ask(
        self, messages: Sequence[dict[str, str]], estimate_usd: float | None, spent: list[Usage], stop: threading.Event
    ) -> str:
        """Return the text of the judge's answer, empty if the judge refused.

        `spent` gets the usage of each request, also if no answer comes. Raises an `AskError` if there is no answer
        after all retries, `stop` was set, or the budget is used up.
        """
        import openai  # litellm's errors are subclasses of the SDK's
        import tenacity

        failures = list[Exception]()

        def attempt() -> Any:
            try:
                return self._request({"messages": list(messages), **wishes}, estimate_usd, spent, stop)
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
        while True:
            wishes = dict(self._wishes)
            try:
                response = retrying(attempt)
                return response.choices[0].message.content or "" if response.choices else ""
            except BudgetUsedUp as error:
                before = f"; no answer before: {_ask_error(failures[-1]).reason}" if failures else ""
                raise AskError(f"budget used up: {error}{before}", "budget", failed=bool(failures)) from error
            except openai.APIError as error:
                refused = [wish for wish in wishes if wish in str(error)]
                if not (refused and isinstance(error, openai.BadRequestError)):
                    raise _ask_error(error) from error
                for wish in refused:
                    self._wishes.pop(wish, None)

    def _request(
        self, asked: Mapping[str, Any], estimate_usd: float | None, spent: list[Usage], stop: threading.Event
    ) -> Any:
        import openai

        reserved = self.budget.reserve(estimate_usd)
        cost: float | None = 0.0
        was_refused = True
        try:
            if stop.is_set():  # while the budget made us wait, or another part of the group was asked about
                raise AskError("stopped", "question", failed=False)
            spent.append(Usage(calls=1))
            ours: dict[str, Any] = {
                "model": self.model,
                "api_base": self.base_url,
                "api_key": self.api_key or None,
                "timeout": self.timeout_s,
                "max_retries": 0,
                "num_retries": 0,
                "drop_params": True,
            }
            response = load_litellm().completion(**{**ours, **asked, **self.extra})
            cost = getattr(response, "_hidden_params", {}).get("response_cost")
            was_refused = False
        # The server may have computed, and will charge for, an answer that came too late: its cost is unknown, not 0.
        except openai.APITimeoutError:
            cost, was_refused = None, False
            raise
        finally:
            self.budget.settle(reserved, cost, was_refused=was_refused)
        counted = getattr(response, "usage", None)
        prompt, completion = (getattr(counted, f"{which}_tokens", None) or 0 for which in ("prompt", "completion"))
        spent.append(Usage(prompt_tokens=prompt, completion_tokens=completion, cost_usd=cost))
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


def _asked_pause_s(state: "RetryCallState") -> float | None:
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
