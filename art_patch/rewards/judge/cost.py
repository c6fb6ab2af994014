"""The cost of judging: token counts and prices from litellm, the budget, and what was spent.

Importing this module does not import litellm. Only the job's process loads litellm, never an app's process.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import sys
import threading
from dataclasses import dataclass
from typing import Any

from art_patch.errors import ConfigError, JudgeError


def load_litellm() -> Any:
    """Import litellm without network access and without its log messages; the first call takes seconds.

    Raises `JudgeError` if litellm cannot be imported.
    """
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


# Prompt tokens that a judge can read, where litellm does not know it.
ASSUMED_CONTEXT = 100_000
# Tokens of a judge's context that are kept free for its answer and a repair try.
_ANSWER_ROOM = 8_192


def count_tokens(model: str, text: str) -> int:
    """Return a text's number of tokens for a model; an estimate if litellm lacks the model's own tokenizer."""
    return load_litellm().token_counter(model=model, text=text)


def context_tokens(model: str) -> int:
    """Return the most tokens that a prompt for this model may have: litellm's number, or a default if it has none."""
    with contextlib.suppress(Exception):  # litellm raises a bare Exception for a model that it does not know
        known: Any = load_litellm().get_model_info(model).get("max_input_tokens")
        if known:
            return max(known - _ANSWER_ROOM, known // 2)
    return ASSUMED_CONTEXT


def price_usd(model: str, prompt_tokens: int, completion_tokens: int) -> float | None:
    """Return the price of a request with these token counts; `None` if the model is not on litellm's price list."""
    try:
        prompt_usd, completion_usd = load_litellm().cost_per_token(
            model=model, prompt_tokens=prompt_tokens, completion_tokens=completion_tokens
        )
    except Exception:  # a bare Exception here, too
        return None
    return prompt_usd + completion_usd


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
    within the limit. The limit on calls is never exceeded. The limit in USD can be exceeded, because the price of an
    answer is only known afterwards. So requests go one at a time until the first answer is paid for. From then on, a
    request is expected to exceed its estimate by the same factor as the most expensive answer so far. If later answers
    exceed their estimates by a larger factor, the limit can be exceeded by the difference.

    Args:
        max_usd: limit on the price of all requests together.
        max_calls: limit on HTTP requests; retries and repair tries count, too.

    Raises:
        ConfigError: a limit is negative or not a number.
    """

    def __init__(self, max_usd: float | None = None, max_calls: int | None = None) -> None:
        for name, limit in (("max_usd", max_usd), ("max_calls", max_calls)):
            if limit is not None and not limit >= 0:
                raise ConfigError(f"{name} is {limit}; give a number of 0 or more, or leave it out for no limit")
        self.max_usd = max_usd
        self.max_calls = max_calls
        self._changed = threading.Condition()
        self._calls = 0
        self._spent_usd = 0.0
        self._held: list[Reservation] = []
        self._dearness: float | None = None  # largest price / estimate so far; `None` until an answer was paid for

    @property
    def calls(self) -> int:
        """Number of requests that the budget has allowed so far."""
        return self._calls

    @property
    def spent_usd(self) -> float:
        """USD spent so far: the known costs, and the expected price of each request whose cost is unknown."""
        return self._spent_usd

    def reserve(self, estimate_usd: float | None) -> Reservation:
        """Allow one request; block while the price of requests under way decides whether the budget allows it.

        `estimate_usd` is the request's likely price; `None` if the judge's price is unknown.

        Raises:
            BudgetUsedUp: a limit is reached, or there is a limit in USD and no price.
        """
        with self._changed:
            if self.max_calls is not None and self._calls >= self.max_calls:
                raise BudgetUsedUp(f"{self._calls} of {self.max_calls} calls were made")
            held = Reservation(0.0, 0.0) if self.max_usd is None else self._hold(self.max_usd, estimate_usd)
            if self.max_calls is not None and self._calls >= self.max_calls:  # made while we waited
                raise BudgetUsedUp(f"{self._calls} of {self.max_calls} calls were made")
            self._calls += 1
            self._held.append(held)
            return held

    def settle(self, reservation: Reservation, cost_usd: float | None) -> None:
        """End a reserved request with its cost in USD.

        The cost is 0 if the server refused the request. `None`: the cost is unknown, so the held amount counts as
        spent.
        """
        with self._changed:
            self._held.remove(reservation)
            self._spent_usd += reservation.held_usd if cost_usd is None else cost_usd
            if cost_usd and reservation.estimate_usd:
                self._dearness = max(self._dearness or 0.0, cost_usd / reservation.estimate_usd)
            self._changed.notify_all()

    def _hold(self, max_usd: float, estimate_usd: float | None) -> Reservation:
        if estimate_usd is None:
            raise BudgetUsedUp("the judge's price is unknown, so no limit in USD can be kept; limit the calls instead")
        # Without a first price a burst of parallel requests could overrun the limit many times.
        while self._dearness is None and self._held:
            self._changed.wait()
        expected = estimate_usd * max(self._dearness or 1.0, 1.0)
        under_way = sum(reservation.held_usd for reservation in self._held)
        if self._spent_usd + under_way + expected > max_usd:
            raise BudgetUsedUp(
                f"${self._spent_usd:.4g} of ${max_usd:.4g} were spent, ${under_way:.4g} are held for requests under "
                f"way, and the next one is expected to cost ${expected:.4g}"
            )
        return Reservation(estimate_usd, expected)


@dataclass(slots=True)
class Usage:
    """Requests, tokens and USD that judging spent. `cost_usd` is `None` if the price of one answer is unknown."""

    calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost_usd: float | None = 0.0

    def add(self, other: Usage) -> None:
        """Add the requests, tokens and costs of another `Usage` to this one."""
        self.calls += other.calls
        self.prompt_tokens += other.prompt_tokens
        self.completion_tokens += other.completion_tokens
        known = self.cost_usd is not None and other.cost_usd is not None
        self.cost_usd = (self.cost_usd or 0.0) + (other.cost_usd or 0.0) if known else None
