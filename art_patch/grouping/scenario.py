"""Which scenario a trajectory belongs to, and whether that scenario is held out for the gate.

A scenario has a key. Two texts that word one task have the same key whenever and in whatever company they come, because
the key is made from what they have in common (`wording.essence`); so a scenario never changes sides. Only a text with a
typo needs others beside it to be understood, and a scenario that `embeddings` brought together takes the key of its
most frequent wording.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from art_patch.grouping.masks import mask, normalise, one_spelling
from art_patch.grouping.spelling import corrections
from art_patch.grouping.wording import Word, essence, words_of
from art_patch.types import JSON, Call, Trajectory

# Made once: `json.dumps` makes an encoder for each call that has arguments.
_compact = json.JSONEncoder(separators=(",", ":")).encode
_sorted = json.JSONEncoder(sort_keys=True, default=repr).encode


@dataclass(frozen=True, slots=True)
class Task:
    """What a trajectory was asked, as far as the text tells.

    Attributes:
        setting: hash of everything before the first user message and of the tools, volatile parts masked.
        attached: hashes of the images, audio and files that came with the first user message.
        text: the first user message, normalised.
        words: its words.
    """

    setting: str
    attached: tuple[str, ...]
    text: str
    words: tuple[Word, ...]


def scenario_of(trajectory: Trajectory) -> tuple[str, str] | None:
    """Return `(scenario key, how it was found)` of a trajectory alone; `None` for one without calls and keys."""
    given = given_scenario(trajectory)
    if given is not None or not trajectory.calls:
        return given
    return task_key(task_of(trajectory.calls[0])), "same_task"


def given_scenario(trajectory: Trajectory) -> tuple[str, str] | None:
    """Return `(scenario key, how)` as the user gave it; `None` if the text must tell."""
    info = trajectory.info
    if info.group_key is not None:
        return f"group:{info.group_key}", "group_key"
    if info.scenario_key is not None:
        return f"scenario:{info.scenario_key}", "scenario_key"
    return None


def task_of(first: Call, *, across: bool = False, seen: dict[str, tuple[str, tuple[Word, ...]]] | None = None) -> Task:
    """Return what the first call of a run asks.

    Args:
        first: the call.
        across: leave system prompt and tools out of it.
        seen: what masked texts say, kept between calls: many runs say the same.
    """
    before: list[Any] = []
    text, attached = "", ()
    for message in first.messages:
        if message.get("role") == "user":
            text, attached = _text_and_media(message)
            break
        said, also = _text_and_media(message)
        before.append([message.get("role"), _normalised(said), also])
    setting = "" if across else digest([before, tools_key(first)])
    masked = mask(text)
    seen = {} if seen is None else seen
    if masked not in seen:
        seen[masked] = one_spelling(masked), words_of(masked)
    return Task(setting, attached, *seen[masked])


def tools_key(call: Call) -> list[str]:
    """Return the tools that were offered, in an order of their own."""
    return sorted(map(_sorted, call.tools))


def task_key(task: Task, spelling: dict[str, str] | None = None) -> str:
    """Return the scenario key of a task.

    Args:
        task: the task.
        spelling: misspelt word -> word.
    """
    words: Sequence[Word] = task.words
    if spelling:
        words = [Word(spelling.get(w.text, w.text), True) if w.loose else w for w in words]
    return f"task:{digest([task.setting, task.attached, essence(words)])}"


def spelling_of(tasks: Iterable[Task]) -> dict[str, str]:
    """Return the misspelt words of these tasks, one for each run, and what they stand for."""
    return corrections(Counter(word.text for task in tasks for word in task.words if word.loose))


def digest(value: Any) -> str:
    """Return 32 hex digits that stand for a JSON value."""
    return hashlib.blake2b(_compact(value).encode(), digest_size=16).hexdigest()


def is_held_out(scenario_key: str, share: float) -> bool:
    """Whether the scenario is kept for the gate. Depends on the key alone, so it never changes sides.

    Args:
        scenario_key: as `scenario_of` gives it.
        share: part of all scenarios to hold out, 0..1.
    """
    hashed = hashlib.blake2b(scenario_key.encode("utf-8", "surrogatepass"), digest_size=8, person=b"held-out").digest()
    return int.from_bytes(hashed) < share * 2**64


def _text_and_media(message: JSON) -> tuple[str, tuple[str, ...]]:
    """The text of a message, and hashes of what else is in it."""
    content: Any = message.get("content") or ""
    if isinstance(content, str):
        return content, ()
    parts: list[Any] = list(content) if isinstance(content, list | tuple) else [content]
    texts: list[str] = []
    attached: list[str] = []
    for part in parts:
        text = part.get("text") if isinstance(part, dict) else part
        if isinstance(text, str):
            texts.append(text)
        else:
            attached.append(hashlib.blake2b(_sorted(part).encode()).hexdigest()[:32])
    return "\n".join(texts), tuple(attached)


@lru_cache(maxsize=256)
def _normalised(prompt: str) -> str:
    """System prompts are long, and the same ones come with every run."""
    return normalise(prompt)
