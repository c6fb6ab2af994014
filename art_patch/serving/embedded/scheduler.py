"""The embedded engine's scheduler: one thread that owns the model.

Between two decode steps it runs commands, admits waiting requests as a new cohort, and merges that into a running one
if this costs less. If a decode step raises, only the requests of its cohort fail; if a row's log-probability is NaN,
only that row's request. Of a request that comes, the expected wait follows from the rows ahead of it and the mean time
of a row.
"""

import logging
import math
import threading
import time
from bisect import insort
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch

from art_patch.serving.contract import Overloaded, admit
from art_patch.serving.embedded.cohort import Cohort
from art_patch.serving.embedded.generation import Delivery, Generation, Piece, Row, hand_over
from art_patch.serving.embedded.lora_bank import LoraBank
from art_patch.serving.embedded.text import PromptEncoder

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Policy:
    """A served policy; `users` counts its waiting and running rows. Once unloaded, it is freed when that count is 0."""

    name: str
    adapter: str | None = None
    users: int = 0


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Limits of one embedded engine: lengths, batch size, queue size and LoRA rank."""

    max_model_len: int | None = None  # longest prompt plus answer; `None` is the model's own limit
    max_rows: int = 64  # rows decoded at once; a request with n choices is n rows
    max_total_tokens: int = 131_072  # tokens, padding included, that may be cached when another request is admitted
    max_prefill_tokens: int = 8192  # prompt tokens computed between two decode steps; a longer prompt goes alone
    max_waiting: int = 1024  # requests that may wait for admission
    max_lora_rank: int = 64  # largest rank that is loaded


class Scheduler:
    """Runs the generations of a model on one thread. Every public method may be called from any thread."""

    def __init__(
        self, model: Any, bank: LoraBank, prompts: PromptEncoder, stop_ids: frozenset[int], limits: EngineLimits
    ) -> None:
        self._model, self._bank, self._prompts = model, bank, prompts
        self._stop_ids, self._limits = stop_ids, limits
        self.lock = threading.Condition()  # guards all below and every policy's `users`
        self._retired: list[Policy] = []
        self._commands: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._waiting: deque[tuple[Generation, Policy]] = deque()
        self._cohorts: list[Cohort] = []
        self._is_blocked = False  # whether the first waiting request had no room at the last look
        self._running = 0  # rows in the cohorts and on their way there
        self._row_s = math.inf  # moving average of the time from admission to the end of a row
        self._closing = False
        self._failure: str | None = None
        self._thread = threading.Thread(target=self._run, name="art-patch-engine", daemon=True)
        self._thread.start()

    @property
    def healthy(self) -> bool:
        """Whether the scheduler's thread runs and accepts requests."""
        return self._failure is None and not self._closing and self._thread.is_alive()

    def stats(self) -> dict[str, int]:
        """Returns three counts: rows being decoded, waiting requests, unloaded policies that still answer requests."""
        with self.lock:
            running = sum(not row.done for cohort in list(self._cohorts) for row in cohort.rows)
            return {"running": running, "waiting": len(self._waiting), "retired": len(self._retired)}

    def submit(self, generation: Generation, policy: Policy, accepted_s: float | None = None) -> None:
        """Queues a request, or raises `Overloaded`; the caller holds `lock` since it looked up the policy."""
        self._check_open()
        waiting = len(self._waiting)
        expected_s = 0.0 if accepted_s is None and waiting < self._limits.max_waiting else self._wait_s(generation)
        admit(waiting=waiting, most=self._limits.max_waiting, expected_s=expected_s, accepted_s=accepted_s)
        policy.users += generation.params.n
        # Stable: among equal priorities it stays first come, first served.
        insort(self._waiting, (generation, policy), key=lambda waiting: waiting[0].params.priority)
        self.lock.notify()

    def retire(self, policy: Policy) -> None:
        """Frees the policy's memory when its last request is done, without waiting for it; the caller holds `lock`."""
        self._retired.append(policy)
        self.lock.notify()

    def command(self, action: Callable[[], Any]) -> Future[Any]:
        """Schedules `action` between two decode steps, on the thread that owns the model; returns its future."""
        future: Future[Any] = Future()
        with self.lock:
            self._check_open()
            self._commands.append((action, future))
            self.lock.notify()
        return future

    def close(self) -> None:
        """Stops the scheduler's thread; unfinished requests fail. A second call does nothing."""
        with self.lock:
            self._closing = True
            self.lock.notify()
        # On the scheduler's own thread it cannot wait for itself.
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _wait_s(self, generation: Generation) -> float:
        """Returns how many seconds a request is expected to wait for its turn; the caller holds `lock`."""
        urgent = (g.params.n for g, _ in self._waiting if g.params.priority <= generation.params.priority)
        free = 0 if self._is_blocked else max(0, self._limits.max_rows - self._running)
        late = sum(urgent) + generation.params.n - free
        return late * self._row_s / max(1, self._running) if late > 0 else 0.0

    def _check_open(self) -> None:
        if not self.healthy:
            raise Overloaded(self._failure or "the engine is shutting down")

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                while self._wait_for_work():
                    self._run_commands()
                    self._admit()
                    for cohort in list(self._cohorts):
                        self._step(cohort)
                    if self._retired:
                        self._free_retired()
        except BaseException as error:
            # Unhealthy from here on: `/health` answers 503, and every request gets this message.
            _log.exception("the engine's scheduler failed")
            self._failure = f"the engine failed ({type(error).__name__}); restart the server"
        self._abandon(self._failure or "the engine is shutting down")

    def _wait_for_work(self) -> bool:
        with self.lock:
            if not self._cohorts:
                self._running, self._is_blocked = 0, False
            while not (self._closing or self._commands or self._waiting or self._cohorts or self._freeable()):
                self.lock.wait()
            return not self._closing

    def _freeable(self) -> list[Policy]:
        return [policy for policy in self._retired if not policy.users]

    def _run_commands(self) -> None:
        while self._commands:
            action, future = self._commands.popleft()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(action())
                except Exception as error:
                    future.set_exception(error)

    def _free_retired(self) -> None:
        with self.lock:
            free = self._freeable()
            self._retired = [policy for policy in self._retired if policy.users]
        # Without the lock: freeing takes long, and requests must be queued meanwhile. No new ones can come for these.
        for policy in free:
            if policy.adapter is not None:
                self._bank.remove(policy.adapter)

    def _admit(self) -> None:
        """Prefills new requests, a forward for each policy and similar length, and merges them into running cohorts."""
        arrivals = self._next_arrivals()
        for policy in dict.fromkeys(policy for _, policy in arrivals):
            rows = [row for generation, p in arrivals if p is policy for row in self._rows(generation)]
            # Neighbours of similar length share a forward with little padding.
            rows.sort(key=lambda row: len(row.generation.prompt_ids))
            for batch in _by_length(rows, self._limits.max_prefill_tokens):
                cohort = Cohort(policy, batch)
                host = None
                try:
                    self._bank.activate(policy.adapter)
                    cohort.prefill(self._model)
                    if host := next((c for c in self._cohorts if c.can_merge(cohort)), None):
                        host.merge(cohort)
                    else:
                        self._cohorts.append(cohort)
                except Exception as error:
                    # Half merged, neither cache can be trusted any more.
                    for failed in filter(None, (cohort, host)):
                        self._fail(failed, error)

    def _next_arrivals(self) -> list[tuple[Generation, Policy]]:
        rows = sum(len(cohort.rows) for cohort in self._cohorts)
        tokens, prefill = sum(len(cohort.rows) * cohort.width for cohort in self._cohorts), 0
        arrivals: list[tuple[Generation, Policy]] = []
        with self.lock:
            self._is_blocked = False
            while self._waiting:
                generation, policy = self._waiting[0]
                n, length = generation.params.n, len(generation.prompt_ids)
                if generation.cancelled:
                    policy.users -= n
                elif rows and (  # an idle engine takes any request, however large
                    (full := rows + n > self._limits.max_rows or tokens + n * length > self._limits.max_total_tokens)
                    or prefill + length > self._limits.max_prefill_tokens
                ):
                    # First come, first served among equals: a large request must not starve behind small ones.
                    self._is_blocked = full
                    break
                else:
                    rows, tokens, prefill = rows + n, tokens + n * length, prefill + length
                    arrivals.append((generation, policy))
                self._waiting.popleft()
            self._running = rows
        return arrivals

    def _rows(self, generation: Generation) -> list[Row]:
        params = generation.params
        rows: list[Row] = []
        for index in range(params.n):
            row = Row(generation, index, params.max_tokens, frozenset() if params.ignore_eos else self._stop_ids)
            if params.seed is not None:
                row.noise = torch.Generator(self._model.device).manual_seed(params.seed + index)
            if params.grammar is not None:
                row.grammar = params.grammar.deep_copy()
            if params.stops or params.one_call:
                row.watch = params.reader(self._prompts.decode)
            rows.append(row)
        return rows

    def _step(self, cohort: Cohort) -> None:
        """Samples a token for every row, delivers the pieces, drops rows that ended and computes the next logits."""
        try:
            masks = {
                index: row.mask() for index, row in enumerate(cohort.rows) if row.grammar is not None and not row.done
            }
            token_ids, logprobs = cohort.sampler.sample(cohort.logits_BV, masks)
            deliveries: list[Delivery] = []
            alive: list[int] = []
            for index, row in enumerate(cohort.rows):
                if row.done:
                    continue
                if (generation := row.generation).given_up:
                    self._end(cohort, row)
                    continue
                if (logprob := logprobs[index]) != logprob:  # NaN, the only number that differs from itself
                    error = f"{cohort.policy.name} computed NaN for this prompt; unload it and look at its training"
                    status = 500
                    if index in masks and not any(masks[index]):
                        status, error = 422, "the answer's schema is too complex to be followed further"
                    deliveries.append((generation, Piece(row.index, [], [], error=error, status=status)))
                    generation.failed = True  # its other choices are of no use either
                    self._end(cohort, row)
                    continue
                reason = row.take(token_ids[index], logprob)
                if (piece := row.piece(reason)) is not None:
                    deliveries.append((generation, piece))
                if reason is None:
                    alive.append(index)
                else:
                    self._end(cohort, row)
            # Before the next forward, so that a streaming client waits for one step and not two.
            hand_over(deliveries)
            if not alive:
                self._cohorts.remove(cohort)
                return
            # Dropping rows copies the cache. While few have ended, computing them along is cheaper.
            if len(alive) <= 0.9 * len(cohort.rows):
                cohort.keep(alive)
                token_ids = [token_ids[index] for index in alive]
            self._bank.activate(cohort.policy.adapter)
            cohort.advance(self._model, token_ids)
        except Exception as error:
            self._fail(cohort, error)

    def _end(self, cohort: Cohort, row: Row) -> None:
        row.done = True
        took_s = time.monotonic() - row.began_at
        with self.lock:
            cohort.policy.users -= 1
            self._row_s = took_s if math.isinf(self._row_s) else 0.95 * self._row_s + 0.05 * took_s

    def _fail(self, cohort: Cohort, error: Exception) -> None:
        _log.error("a batch of %d on %s failed", len(cohort.rows), cohort.policy.name, exc_info=error)
        if cohort in self._cohorts:
            self._cohorts.remove(cohort)
        message = f"the engine failed on this request ({type(error).__name__}: {error})"
        deliveries: list[Delivery] = []
        for row in cohort.rows:
            if not row.done:
                self._end(cohort, row)
                if not row.generation.given_up:
                    row.generation.failed = True
                    deliveries.append((row.generation, Piece(row.index, [], [], error=message)))
        hand_over(deliveries)

    def _abandon(self, reason: str) -> None:
        with self.lock:
            self._closing = True
            generations = {row.generation for cohort in self._cohorts for row in cohort.rows if not row.done}
            generations |= {generation for generation, _ in self._waiting}
            commands = list(self._commands)
            for left in (self._cohorts, self._waiting, self._commands):
                left.clear()
        hand_over([(generation, Piece(0, [], [], error=reason)) for generation in generations])
        for _, future in commands:
            future.set_exception(Overloaded(reason))


def _by_length(rows: list[Row], max_tokens: int) -> list[list[Row]]:
    """Splits rows, sorted by length, into batches in which padding stays small beside the prompts."""
    batches: list[list[Row]] = []
    tokens = 0
    for row in rows:
        length = len(row.generation.prompt_ids)
        padded = (len(batches[-1]) + 1) * length if batches else 0
        # A longer row pads all before it; from 1.5 times the real tokens on, another forward is cheaper.
        if batches and padded <= max_tokens and padded <= 1.5 * (tokens + length) + 2048:
            batches[-1].append(row)
            tokens += length
        else:
            batches.append([row])
            tokens = length
    return batches
