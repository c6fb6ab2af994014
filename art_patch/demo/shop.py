"""The demo's world: a shop, questions about it, one tool, and the check that an answer is right. Standard library only.

In: a seed. Out: `Task`s, tool results, and verdicts on transcripts (lists of OpenAI messages).

- A task asks for the price of `count` pieces of one item. Each task has its own price list, so the price must be
  looked up (turn 1) and multiplied (turn 2); nothing in the question gives it away.
- The 768 triples (count, item, price of that item) fall into two parts by a hash that no seed changes. Only the report
  asks `evaluation` triples; the agent records and learns from `traffic` alone, the warm-up included. A task's *other*
  prices are chosen so that asking for them would be traffic: an agent that looks up the wrong item does not meet an
  `evaluation` triple either.
- All products of a count and a price occur in traffic: `evaluation` measures whether *behaviour* carries over, not
  whether arithmetic does.
- Bad tool calls are answered and raise no error, because agents make them.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, cast

ITEMS = ("apple", "bread", "candle", "grape", "honey", "kettle", "lemon", "mug", "onion", "pear", "plum", "soap")
COUNTS = tuple(range(2, 10))
PRICES = tuple(range(2, 10))

Part = Literal["traffic", "evaluation"]
Triple = tuple[int, str, int]
"""(count, item, price of one)."""

LOOKUP_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Price of one item.",
        "parameters": {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]},
    },
}
"""The only tool, in the key order in which servers write it again."""

TOOLS: list[dict[str, Any]] = [LOOKUP_TOOL]


@dataclass(frozen=True, slots=True)
class Task:
    """One question to the shop: the price of `count` pieces of `item`."""

    id: str  # made of part, triple and price list, so it fits as a scenario key
    count: int
    item: str
    prices: Mapping[str, int] = field(hash=False)  # price of one piece, for every item in `ITEMS`

    @property
    def question(self) -> str:
        """Text of the user's message."""
        return question(self.count, self.item)

    @property
    def answer(self) -> str:
        """The only final answer that counts as right."""
        return str(self.count * self.prices[self.item])

    @property
    def messages(self) -> list[dict[str, Any]]:
        """A new conversation that asks the question."""
        return [{"role": "user", "content": self.question}]


def question(count: int, item: str) -> str:
    """Return the text that asks for the price of `count` pieces of `item`."""
    return f"price of {count} {item}?"


def part_of(count: int, item: str, price: int) -> Part:
    """Return the part that a triple belongs to; one in five is evaluation."""
    # Python's own `hash` is salted per process, hence sha256.
    digest = hashlib.sha256(f"{count}|{item}|{price}".encode()).digest()
    return "evaluation" if digest[0] % 5 == 0 else "traffic"


@cache
def triples(part: Part) -> tuple[Triple, ...]:
    """Return all triples of one part, in a fixed order."""
    every = ((count, item, price) for count in COUNTS for item in ITEMS for price in PRICES)
    return tuple(triple for triple in every if part_of(*triple) == part)


@cache
def traffic_prices(count: int, item: str) -> tuple[int, ...]:
    """Return the prices at which asking for `count` pieces of `item` is traffic; there is at least one."""
    return tuple(price for price in PRICES if part_of(count, item, price) == "traffic")


def make_task(triple: Triple, rng: random.Random) -> Task:
    """Return a task for `triple`, with the other prices drawn from `rng`."""
    count, item, price = triple
    prices = {other: price if other == item else rng.choice(traffic_prices(count, other)) for other in ITEMS}
    price_list = "".join(str(prices[other]) for other in ITEMS)
    return Task(id=f"{part_of(*triple)}-{count}-{item}-{price_list}", count=count, item=item, prices=prices)


def make_tasks(part: Part, size: int, *, seed: int) -> list[Task]:
    """Return `size` tasks of one part, the same for the same seed.

    Every triple of the part comes up once before a triple comes up again (then with another price list).
    """
    rng = random.Random(f"{part}|{seed}")
    tasks: list[Task] = []
    while len(tasks) < size:
        pool = list(triples(part))
        rng.shuffle(pool)
        tasks += [make_task(triple, rng) for triple in pool[: size - len(tasks)]]
    return tasks


def run_tool(task: Task, name: str, arguments: str | Mapping[str, Any]) -> str:
    """Return the shop's answer to a tool call: a price, or a sentence about the mistake.

    `arguments` are JSON text, as the SDK has them, or already parsed.
    """
    item = _looked_up(name, arguments)
    if item is None:
        return "bad call"
    return str(task.prices.get(item, "no such item"))


def is_success(task: Task, messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a transcript is exactly: the question, one right lookup, the shop's result, the right number.

    System messages do not count; anything else that is more or less than that (a second call, a number with spaces,
    an answer without a lookup) is a failure.
    """
    asked = [message for message in messages if message.get("role") != "system"]
    if [message.get("role") for message in asked] != ["user", "assistant", "tool", "assistant"]:
        return False
    request, call, result, final = asked
    return (
        request.get("content") == task.question
        and is_lookup(call, task.item)
        and result.get("content") == str(task.prices[task.item])
        and final.get("content") == task.answer
        and not final.get("tool_calls")
    )


def is_lookup(message: Mapping[str, Any], item: str) -> bool:
    """Whether a message is one call that looks up `item`, and nothing besides."""
    calls: Sequence[Mapping[str, Any]] = message.get("tool_calls") or ()
    if len(calls) != 1 or message.get("content"):
        return False
    function: Mapping[str, Any] = calls[0].get("function") or {}
    return _looked_up(function.get("name"), function.get("arguments")) == item


def _looked_up(name: Any, arguments: Any) -> str | None:
    """Return the item that a call looks up, or `None` if it is not a well-formed lookup."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return None
    if name != "lookup" or not isinstance(arguments, Mapping):
        return None
    given = cast("Mapping[str, Any]", arguments)
    item = given.get("item")
    return item if isinstance(item, str) and len(given) == 1 else None
