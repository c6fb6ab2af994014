"""One request inside the embedded engine, shared by its event loop and its scheduler thread. It needs no torch.

The event loop creates a `Generation` and iterates over its `Piece`s: one for every sampled token of a streamed request,
one for each choice of an unstreamed one. The scheduler's thread owns the `Row`s and hands the pieces over.
"""

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from art_patch.serving.embedded.text import Decode, OutputText

EngineReason = Literal["stop", "length"]


class GenerationFailed(Exception):
    """The engine could not finish a request; the message is safe to show to the caller, with the HTTP `status`."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling settings of one request: temperature, limits, stop strings, number of choices."""

    temperature: float = 1.0
    top_p: float = 1.0  # nucleus cut; 1 is none
    max_tokens: int = 16  # limit on sampled tokens, the stop token included
    n: int = 1
    # Choice `i` draws from a generator seeded with `seed + i`; `None` draws from the engine's own.
    seed: int | None = None
    ignore_eos: bool = False  # sample on past the end-of-text token (for benchmarks)
    stops: tuple[str, ...] = ()  # strings that end the text; they are cut off
    one_call: bool = False  # end after the first well-formed tool call
    parse_tools: bool = False  # whether text is scanned for tool calls
    priority: int = 0  # smaller is admitted first
    grammar: Any = None  # the compiled grammar that the answer follows, for each choice to copy

    @property
    def greedy(self) -> bool:
        """Whether every step takes the likeliest token: the temperature is below vLLM's bound for that, 1e-5."""
        return self.temperature < 1e-5

    def reader(self, decode: Decode) -> OutputText:
        """Returns a new reader of one choice's text, with the stop strings and tool settings of the request."""
        return OutputText(decode, stops=self.stops, parse_tools=self.parse_tools, one_call=self.one_call)


@dataclass(frozen=True, slots=True)
class Piece:
    """Newly sampled tokens of one choice, on their way from the scheduler to the HTTP endpoint."""

    index: int
    token_ids: list[int]  # the new ids in order, the stop token included
    # Natural log-probability of each at the request's temperature, among the tokens that the grammar allows, and before
    # any top_p cut.
    logprobs: list[float]
    reason: EngineReason | None = None  # set on the last piece of the choice
    error: str | None = None  # set if the whole request failed; then nothing follows
    status: int = 500  # HTTP status of that error


class Generation:
    """One request, and an async iterator over the pieces of its answer. Created and read on the event loop."""

    def __init__(self, prompt_ids: list[int], params: SamplingParams, *, stream: bool) -> None:
        self.prompt_ids, self.params, self.stream = prompt_ids, params, stream
        self.cancelled = False  # written by the event loop, read by the scheduler between steps
        self.failed = False  # the scheduler's own: an error piece is on its way
        self.loop = asyncio.get_running_loop()
        self._pieces: deque[Piece] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._unfinished = params.n

    @property
    def given_up(self) -> bool:
        """Whether sampling for the request can stop, because it was cancelled or failed."""
        return self.cancelled or self.failed

    def __aiter__(self) -> "Generation":
        """Returns itself; the iteration ends when every choice has ended."""
        return self

    async def __anext__(self) -> Piece:
        """Waits for the next piece; raises `GenerationFailed` if the engine could not finish the request."""
        if not self._pieces:
            if not self._unfinished:
                raise StopAsyncIteration
            self._waiter = self.loop.create_future()
            await self._waiter
        piece = self._pieces.popleft()
        if piece.error is not None:
            raise GenerationFailed(piece.error, piece.status)
        if piece.reason is not None:
            self._unfinished -= 1  # ends when every choice has had its last piece
        return piece

    def deliver(self, piece: Piece) -> None:
        """Queues a piece for the code that iterates. Runs on the event loop; `hand_over` schedules it."""
        self._pieces.append(piece)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def cancel(self) -> None:
        """Cancels the request; the scheduler drops its rows from the batch before the next decode step."""
        self.cancelled = True


@dataclass(slots=True, eq=False)
class Row:
    """One choice of a request while the scheduler decodes it."""

    generation: Generation
    index: int
    max_tokens: int
    stop_ids: frozenset[int]
    noise: Any = None  # torch.Generator of a seeded row
    grammar: Any = None  # which tokens may come next, where the answer is constrained
    watch: OutputText | None = None  # reads the text along, where a stop string or a tool call can end the choice
    began_at: float = field(default_factory=time.monotonic)
    done: bool = False  # ended, but still in its batch until dropping it pays
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])

    def mask(self) -> bytes:
        """Returns which tokens the grammar allows next, one bit each; none if it cannot be followed any further."""
        allowed = self.grammar.compute_bitmask()
        # After an error the library allows the end of the text, wherever that is.
        return bytes(len(allowed)) if self.grammar.is_error() else allowed

    def take(self, token_id: int, logprob: float) -> EngineReason | None:
        """Appends a sampled token; returns the finish reason if the choice ends with it, else `None`."""
        self.token_ids.append(token_id)
        self.logprobs.append(logprob)
        if token_id in self.stop_ids:
            return "stop"
        if self.grammar is not None:
            self.grammar.consume_token(token_id)
        if self.watch is not None:
            # Read along on this thread, so that sampling ends where the text does and not a round trip later.
            self.watch.push((token_id,))
            if self.watch.done:
                return "stop"
        return "length" if len(self.token_ids) >= self.max_tokens else None

    def piece(self, reason: EngineReason | None) -> Piece | None:
        """Returns a streamed request's newest token, or all tokens of an unstreamed choice that ends with `reason`."""
        if self.generation.stream:
            return Piece(self.index, self.token_ids[-1:], self.logprobs[-1:], reason)
        return Piece(self.index, self.token_ids, self.logprobs, reason) if reason else None


Delivery = tuple[Generation, Piece]


def hand_over(deliveries: Sequence[Delivery]) -> None:
    """Schedules the delivery of each piece on the event loop of its request; called by the scheduler's thread."""
    # One wake-up for each loop and step: `call_soon_threadsafe` writes to a socket each time.
    for loop in {generation.loop for generation, _ in deliveries}:
        batch = [delivery for delivery in deliveries if delivery[0].loop is loop]
        try:
            loop.call_soon_threadsafe(_deliver_all, batch)
        except RuntimeError:
            if not loop.is_closed():  # a closed loop has no readers left
                raise


def _deliver_all(batch: Sequence[Delivery]) -> None:
    for generation, piece in batch:
        generation.deliver(piece)
