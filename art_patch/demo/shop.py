"""The demo's task: a shop, questions about its prices, one tool, and the check of an answer. Standard library only.

- A task asks for the price of `count` pieces of one item. Each task has its own price list, so the agent must look the
  price up (turn 1) and multiply it by the count (turn 2); the question does not contain the price.
- The 768 triples (count, item, price of that item) are split into two parts by a fixed hash, whatever the seed. Only
  measurements ask `evaluation` triples; the agent's recorded traffic and the training of the base model use `traffic`
  triples alone. The prices of the items that a task does *not* ask for are chosen so that asking for them would be
  traffic. So an agent that looks up the wrong item never meets an `evaluation` triple.
- Every product of a count and a price occurs in traffic. So `evaluation` measures whether the learned *behaviour*
  carries over to new questions, not whether new arithmetic does.
- A wrong tool call gets an answer and raises no error, because agents make wrong calls.
"""

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
Triple = tuple[int, str, int]  # count, item, price of one

_PARAMETERS = {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]}
_LOOKUP = {"name": "lookup", "description": "Price of one item.", "parameters": _PARAMETERS}
TOOLS: list[dict[str, Any]] = [{"type": "function", "function": _LOOKUP}]
"""The shop's only tool, with its keys in the order in which servers write them again."""


@dataclass(frozen=True, slots=True)
class Task:
    """One question to the shop: the price of `count` pieces of `item`, with the task's own price list."""

    id: str  # made of part, triple and price list, so it fits as a scenario key
    count: int
    item: str
    prices: Mapping[str, int] = field(hash=False)  # price of one piece, for every item in `ITEMS`

    @property
    def question(self) -> str:
        """Text of the user's message that asks this task's question."""
        return question(self.count, self.item)

    @property
    def answer(self) -> str:
        """The only final answer that counts as right: count times price, as text."""
        return str(self.count * self.prices[self.item])

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The messages of a new conversation that asks this task's question."""
        return [{"role": "user", "content": self.question}]


def question(count: int, item: str) -> str:
    """Return the text of a question for the price of `count` pieces of `item`."""
    return f"price of {count} {item}?"


def part_of(count: int, item: str, price: int) -> Part:
    """Return whether a triple belongs to `evaluation` (about one in five) or to `traffic`, by a fixed hash."""
    # Python's own `hash` is salted per process, hence sha256.
    digest = hashlib.sha256(f"{count}|{item}|{price}".encode()).digest()
    return "evaluation" if digest[0] % 5 == 0 else "traffic"


@cache
def triples(part: Part) -> tuple[Triple, ...]:
    """Return all (count, item, price) triples of one part, in a fixed order."""
    every = ((count, item, price) for count in COUNTS for item in ITEMS for price in PRICES)
    return tuple(triple for triple in every if part_of(*triple) == part)


@cache
def traffic_prices(count: int, item: str) -> tuple[int, ...]:
    """Return the prices for which (`count`, `item`, price) is a traffic triple; there is at least one."""
    return tuple(price for price in PRICES if part_of(count, item, price) == "traffic")


def make_task(triple: Triple, rng: random.Random) -> Task:
    """Return a task for a triple; the prices of the other items are drawn from `rng`."""
    count, item, price = triple
    prices = {other: price if other == item else rng.choice(traffic_prices(count, other)) for other in ITEMS}
    price_list = "".join(str(prices[other]) for other in ITEMS)
    return Task(id=f"{part_of(*triple)}-{count}-{item}-{price_list}", count=count, item=item, prices=prices)


def make_tasks(part: Part, size: int, *, seed: int) -> list[Task]:
    """Return `size` tasks of one part, the same for the same seed; no triple occurs again before all have occurred."""
    rng = random.Random(f"{part}|{seed}")
    tasks: list[Task] = []
    while len(tasks) < size:
        pool = list(triples(part))
        rng.shuffle(pool)
        tasks += [make_task(triple, rng) for triple in pool[: size - len(tasks)]]
    return tasks


def run_tool(task: Task, name: str, arguments: str | Mapping[str, Any]) -> str:
    """Return the shop's answer to a tool call: the item's price, or what is wrong with the call."""
    item = _looked_up(name, arguments)
    return "bad call" if item is None else str(task.prices.get(item, "no such item"))


def is_success(task: Task, messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a transcript is exactly the question, one right lookup, the shop's result and the right number."""
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
    """Whether a message is exactly one call that looks up `item`, without text and without further calls."""
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
