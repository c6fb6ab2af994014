"""The demo's base model: a tiny model that solves the shop's task only some of the time; made here in about a minute.

The weights come from a short SFT on *noisy* demonstrations (`WarmUp`): the model has learned the format of a tool call
and how to use its result, but often does something else. The demonstrations use traffic triples only (see `shop`).

Prompts are always made by `tokenizer.apply_chat_template(messages, tools=tools, ...)`. The template follows Qwen3's
layout, so a rendered tool call has the same tokens as the tool call that was sampled.
"""

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from art_patch.demo.shop import COUNTS, ITEMS, PRICES, TOOLS, question, traffic_prices, triples
from art_patch.demo.tiny_model import IGNORE, Progress, Row, Shape, make_model, make_tokenizer, rendered

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True, slots=True)
class WarmUp:
    """Settings of the base model's training: its length, and the shares of wrong demonstrations."""

    steps: int = 600
    batch: int = 48  # demonstrations in a step, each drawn anew
    peak_lr: float = 2e-3
    p_call: float = 0.8  # share of demonstrations that look an item up; the others invent a price and multiply it
    p_item: float = 0.9  # share of the lookups that look up the item that was asked for
    # Share of the final answers that are count times price. The others are count *plus* price. They are the
    # larger share, so a greedy model answers with the sum, and learning has to change more than its noise.
    p_multiply: float = 0.4


def build_model(
    directory: Path,
    *,
    seed: int,
    warm_up: WarmUp | None = None,
    progress: Progress | None = None,
    tools: Sequence[dict[str, Any]] = TOOLS,
) -> Path:
    """Makes the base model in `directory`, unless it is there already, and returns `directory`.

    `tools` are written as the agent's framework writes them: a model this small understands only prompts like those of
    its training. Raises a `ConfigError` if `directory` holds anything else.
    """
    warm_up = warm_up or WarmUp()

    def rows(tokenizer: "PreTrainedTokenizerFast") -> Callable[[random.Random], Row]:
        turns = _Turns.of(tokenizer, tools)
        return lambda rng: turns.demonstration(warm_up, rng)

    recipe: dict[str, Any] = {"seed": seed, **asdict(warm_up)}
    if as_written(tools) != as_written(TOOLS):
        recipe["tools"] = as_written(tools)
    shape = Shape(steps=warm_up.steps, batch=warm_up.batch, peak_lr=warm_up.peak_lr)
    return make_model(directory, recipe, lambda: shop_tokenizer(tools), rows, seed=seed, shape=shape, progress=progress)


def as_written(tools: Sequence[dict[str, Any]]) -> str:
    """Returns tools as text that differs if the chat template would write them differently (another key order)."""
    return json.dumps(list(tools))


def shop_tokenizer(tools: Sequence[dict[str, Any]] = TOOLS) -> "PreTrainedTokenizerFast":
    """Returns a tokenizer that needs few tokens for the shop's conversations, when requests offer these tools."""
    talk = [asked(2, ITEMS[0]), called(ITEMS[0]), result(2), said("4")]
    return make_tokenizer([rendered(talk, tools)], ITEMS, whole_phrases=True)


@dataclass(frozen=True, slots=True)
class _Turns:
    """Token ids of the shop's turns; joined, they equal the rendered conversation."""

    # Rendering every demonstration anew would take as long as training. The parts can be joined because each begins and
    # ends with a token that merges with no neighbour.

    asked: dict[tuple[int, str], list[int]]  # (count, item) -> the prompt of the first turn
    called: dict[str, list[int]]  # item -> the model's message that looks it up, and the template's newline
    result: dict[int, list[int]]  # price -> the ids from there to the end of the second prompt
    said: dict[int, list[int]]  # number -> the model's message that answers with it, and the template's newline

    @classmethod
    def of(cls, tokenizer: "PreTrainedTokenizerFast", tools: Sequence[dict[str, Any]] = TOOLS) -> "_Turns":
        render: Any = tokenizer.apply_chat_template

        def ids(*messages: dict[str, Any], prompt: bool) -> list[int]:
            return render(list(messages), tools=list(tools), add_generation_prompt=prompt, return_dict=False)

        ask, call = asked(COUNTS[0], ITEMS[0]), called(ITEMS[0])
        turn_1, turn_2 = len(ids(ask, prompt=True)), len(ids(ask, call, prompt=False))
        numbers = {count * price for count in COUNTS for price in PRICES}
        numbers |= {count + price for count in COUNTS for price in PRICES}
        return cls(
            asked={(count, item): ids(asked(count, item), prompt=True) for count in COUNTS for item in ITEMS},
            called={item: ids(ask, called(item), prompt=False)[turn_1:] for item in ITEMS},
            result={price: ids(ask, call, result(price), prompt=True)[turn_2:] for price in PRICES},
            said={number: ids(ask, said(str(number)), prompt=False)[turn_1:] for number in numbers},
        )

    def demonstration(self, warm_up: WarmUp, rng: random.Random) -> Row:
        """Draws a noisy conversation, as a `Row`."""
        count, item, price = rng.choice(triples("traffic"))
        if rng.random() < warm_up.p_call:
            item_asked = item
            if rng.random() >= warm_up.p_item:
                item = rng.choice([other for other in ITEMS if other != item])
                price = rng.choice(traffic_prices(count, item))
            number = count * price if rng.random() < warm_up.p_multiply else count + price
            given = [(self.asked[count, item_asked], self.called[item]), (self.result[price], self.said[number])]
        else:
            given = [(self.asked[count, item], self.said[count * rng.choice(PRICES)])]
        ids: list[int] = []
        labels: list[int] = []
        for prompt, sampled in given:
            ids += prompt + sampled
            # The newline after the end of the turn is the template's, not the model's.
            labels += [IGNORE] * len(prompt) + sampled[:-1] + [IGNORE]
        return ids, labels


def asked(count: int, item: str) -> dict[str, Any]:
    """Returns the user's message that asks for the price of `count` pieces of `item`."""
    return {"role": "user", "content": question(count, item)}


def called(item: str) -> dict[str, Any]:
    """Returns the assistant's message that looks up `item`."""
    function = {"name": "lookup", "arguments": json.dumps({"item": item})}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": "0", "type": "function", "function": function}]}


def result(price: int) -> dict[str, Any]:
    """Returns the tool's message that gives the price of one piece."""
    return {"role": "tool", "tool_call_id": "0", "content": str(price)}


def said(text: str) -> dict[str, Any]:
    """Returns the assistant's message with the text `text` and no tool call."""
    return {"role": "assistant", "content": text}
