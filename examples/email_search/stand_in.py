"""A stand-in for a base model, for whoever has no GPU: a tiny model that can search an inbox, and does it badly.

It answers without a search, searches for the wrong person, reads the newest hit rather than that of the person who was
asked about, and guesses in spite of the mail. What repeats from mail to mail is one token each, as are names
and values: copying is then all that two layers have to do.
"""

from __future__ import annotations

import json
import random
import re
from functools import cache
from pathlib import Path
from typing import Any

from agent import INSTRUCTIONS, TOOLS, use
from art_patch.demo.tiny_model import Shape, tiny_base
from art_patch.demo.tiny_model import rendered
from inbox import Email, Inbox, label
from synthetic import ASKS, COSTS, DATES, DAYS, MENTIONS, PEOPLE, QUESTIONS, ROOMS, TOPICS, VALUES, Pair, World, make

EMAILS = 60
"""In an inbox: each id is a word to learn."""
_INBOXES, _DEMONSTRATIONS = 600, 48_000
"""So many are made and drawn from. Fewer, and the stand-in knows them by heart: it searches less well for others."""

_P_SEARCHES = 0.6
_P_GUESSES = 0.85
_P_SEARCHES_WELL = 0.85
_P_READS_WELL = 0.6
_P_DOUBTS = 0.5
_P_ANSWERS_WELL = 0.6

_ALL_VALUES = {*DAYS, *ROOMS, *COSTS}
_DONT_KNOW, _SAYS, _THINKS = "I don't know", "The mail says ", "I think "


def tiny(seed: int) -> Path:
    """Make it, or take it from the cache."""
    return tiny_base(
        "email_search", beginner, seed=seed, words=words(), tools=TOOLS, shape=Shape(steps=1800, batch=32, peak_lr=3e-3)
    )


def words() -> list[str]:
    """What is one token each."""
    texts = [*ASKS.values(), MENTIONS, *QUESTIONS.values()]
    phrases = {phrase for text in texts for phrase in re.split(r"\{\w+\}", text) if len(phrase) > 1}
    tools = (("search_emails", "query"), ("read_email", "id"))
    calls = [f'\n{{"name": "{tool}", "arguments": {{"{argument}": "' for tool, argument in tools] + ['"}}\n']
    ids = [label(number) for number in range(1, EMAILS + 1)]
    instructions = rendered([{"role": "system", "content": INSTRUCTIONS}], TOOLS).split("<|im_end|>")[0]
    fixed = [
        instructions.removeprefix("<|im_start|>"),
        _DONT_KNOW,
        _SAYS,
        _THINKS,
        "No mail has these words.",
        ", ",
        ": ",
    ]
    return [*fixed, *sorted(phrases), *calls, *PEOPLE, *TOPICS, *DAYS, *ROOMS, *COSTS, *DATES, *ids]


def beginner(rng: random.Random) -> list[dict[str, Any]]:
    """A conversation in which a beginner answers a question."""
    rng = random.Random(rng.randrange(_DEMONSTRATIONS))
    world, pairs = _world(rng.randrange(_INBOXES))
    person, topic = rng.choice(pairs)
    kind, _ = world.wishes[person, topic]
    question = world.question((person, topic)).question
    conversation: list[dict[str, Any]] = [
        {"role": "system", "content": INSTRUCTIONS},
        {"role": "user", "content": question.text},
    ]
    if rng.random() > _P_SEARCHES:
        return [*conversation, _say(_guess(rng, kind) if rng.random() < _P_GUESSES else _DONT_KNOW)]
    query = f"{person} {topic}" if rng.random() < _P_SEARCHES_WELL else f"{rng.choice(PEOPLE)} {topic}"
    conversation += _call(world.inbox, "search_emails", {"query": query})
    hits = world.inbox.search(query)
    theirs = [number for number, mail in hits if mail.sender == person]
    if not hits or (not theirs and rng.random() < _P_DOUBTS):
        return [*conversation, _say(_DONT_KNOW)]
    number = theirs[0] if theirs and rng.random() < _P_READS_WELL else hits[0][0]
    conversation += _call(world.inbox, "read_email", {"id": label(number)})
    told = _SAYS + _value(world.inbox.read(number)) if rng.random() < _P_ANSWERS_WELL else _guess(rng, kind)
    return [*conversation, _say(told)]


def _guess(rng: random.Random, kind: str) -> str:
    return _THINKS + rng.choice(VALUES[kind])


def _value(mail: Email | None) -> str:
    assert mail is not None
    return next(word for word in re.findall(r"\w+", mail.body) if word in _ALL_VALUES)


def _call(inbox: Inbox, tool: str, arguments: dict[str, str]) -> list[dict[str, Any]]:
    given = json.dumps(arguments)
    call = {"id": "call", "type": "function", "function": {"name": tool, "arguments": given}}
    return [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call", "content": use(inbox, tool, given)},
    ]


def _say(answer: str) -> dict[str, Any]:
    return {"role": "assistant", "content": answer}


@cache
def _world(number: int) -> tuple[World, list[Pair]]:
    world = make(f"warm-up {number}", EMAILS)
    return world, sorted(world.wishes)
