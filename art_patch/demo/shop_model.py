"""The demo's base model, a tiny one that half knows the shop; it is made here in about a minute.

The weights come from a short SFT on *noisy* demonstrations (`WarmUp`): the model knows the form of a tool call and the
use of its result, but often does something else. The demonstrations have traffic triples only (see `shop`).

Prompts are made by `tokenizer.apply_chat_template(messages, tools=tools, ...)` and in no other way. The template has
Qwen3's layout, so that a rendered tool call is, token for token, the tool call that was sampled.
"""

from __future__ import annotations

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
    """Settings of the warm-up: its length, and how noisy the demonstrations are."""

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
    """Makes the base model in `directory`, unless it exists already, and returns `directory`.

    Args:
        seed: decides the weights and the demonstrations.
        warm_up: the demo's own settings unless given.
        tools: the tools in the agent's requests. Each framework writes the same tool a little differently, and a model
            this small knows only prompts like those of its training.

    Raises:
        ConfigError: `directory` has other content than this model.
    """
    warm_up = warm_up or WarmUp()

    def rows(tokenizer: PreTrainedTokenizerFast) -> Callable[[random.Random], Row]:
        turns = _Turns.of(tokenizer, tools)
        return lambda rng: turns.demonstration(warm_up, rng)

    return make_model(
        directory,
        recipe={
            "seed": seed,
            **asdict(warm_up),
            **({} if as_written(tools) == as_written(TOOLS) else {"tools": as_written(tools)}),
        },
        tokenizer=lambda: shop_tokenizer(tools),
        rows=rows,
        seed=seed,
        shape=Shape(steps=warm_up.steps, batch=warm_up.batch, peak_lr=warm_up.peak_lr),
        progress=progress,
    )


def as_written(tools: Sequence[dict[str, Any]]) -> str:
    """Returns tools as text that differs wherever the template writes them differently, as by the order of keys."""
    return json.dumps(list(tools))


def shop_tokenizer(tools: Sequence[dict[str, Any]] = TOOLS) -> PreTrainedTokenizerFast:
    """Returns a tokenizer that writes the shop's conversations in few tokens, with these tools as one sentence."""
    talk = [asked(2, ITEMS[0]), called(ITEMS[0]), result(2), said("4")]
    return make_tokenizer([rendered(talk, tools)], ITEMS, whole_phrases=True)


@dataclass(frozen=True, slots=True)
class _Turns:
    """Token ids of the shop's turns; joined, they equal the rendered conversation.

    Attributes:
        asked: (count, item) -> the prompt of the first turn.
        called: item -> the model's message that looks the item up, and the template's newline.
        result: price -> the ids from there to the end of the second prompt.
        said: number -> the model's message that gives the number as the answer, and the template's newline.
    """

    # Rendering every demonstration anew would take as long as training. The parts can be joined because each begins and
    # ends with a token that merges with no neighbour.

    asked: dict[tuple[int, str], list[int]]
    called: dict[str, list[int]]
    result: dict[int, list[int]]
    said: dict[int, list[int]]

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerFast, tools: Sequence[dict[str, Any]] = TOOLS) -> _Turns:
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
            if rng.random() >= warm_up.p_item:
                item_asked, item = item, rng.choice([other for other in ITEMS if other != item])
                price = rng.choice(traffic_prices(count, item))
            else:
                item_asked = item
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
    """Returns the message that asks for the price of `count` pieces of `item`."""
    return {"role": "user", "content": question(count, item)}


def called(item: str) -> dict[str, Any]:
    """Returns the model's message that looks `item` up."""
    function = {"name": "lookup", "arguments": json.dumps({"item": item})}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": "0", "type": "function", "function": function}]}


def result(price: int) -> dict[str, Any]:
    """Returns the shop's message that gives the price of one piece."""
    return {"role": "tool", "tool_call_id": "0", "content": str(price)}


def said(text: str) -> dict[str, Any]:
    """Returns the model's message that answers `text` without a tool call."""
    return {"role": "assistant", "content": text}
