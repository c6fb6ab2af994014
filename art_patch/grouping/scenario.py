"""The scenario of a trajectory: its key, and whether it is held out for the gate.

The key of a task is a hash of its essence (`wording.essence`), so it does not depend on when a text comes, or with
which others. Two exceptions need other texts beside it: a text with a typo, and scenarios that `embeddings` brought
together, which take the key of the most frequent wording.
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
from art_patch.grouping.wording import Word, corrections, essence, words_of
from art_patch.types import JSON, Call, Trajectory

# Made once: `json.dumps` makes an encoder for each call that has arguments.
_compact = json.JSONEncoder(separators=(",", ":")).encode
_sorted = json.JSONEncoder(sort_keys=True, default=repr).encode


@dataclass(frozen=True, slots=True)
class Task:
    """A run's task, as far as the texts of its first call and its tools tell."""

    setting: str  # hash of the tools and of all before the first user message, masked
    attached: tuple[str, ...]  # hashes of images, audio and files in the first user message
    text: str  # the first user message, normalised
    words: tuple[Word, ...]


def scenario_of(trajectory: Trajectory) -> tuple[str, str] | None:
    """Return (scenario key, how it was found) of a trajectory by itself; `None` without calls and keys."""
    given = given_scenario(trajectory)
    if given is not None or not trajectory.calls:
        return given
    return task_key(task_of(trajectory.calls[0])), "same_task"


def given_scenario(trajectory: Trajectory) -> tuple[str, str] | None:
    """Return (scenario key, how) if the user gave a key; `None` if the text must decide."""
    info = trajectory.info
    if info.group_key is not None:
        return f"group:{info.group_key}", "group_key"
    if info.scenario_key is not None:
        return f"scenario:{info.scenario_key}", "scenario_key"
    return None


def task_of(first: Call, *, across: bool = False, seen: dict[str, tuple[str, tuple[Word, ...]]] | None = None) -> Task:
    """Return the task of a run's first call.

    Args:
        across: ignore system prompt and tools.
        seen: cache of masked text -> its spelling and words, because many runs say the same.
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
    """Return the offered tools, sorted, so that their order does not matter."""
    return sorted(map(_sorted, call.tools))


def task_key(task: Task, spelling: dict[str, str] | None = None) -> str:
    """Return the scenario key of a task; `spelling` has the correct word for each misspelt word."""
    words: Sequence[Word] = task.words
    if spelling:
        words = [Word(spelling.get(w.text, w.text), True) if w.loose else w for w in words]
    return f"task:{digest([task.setting, task.attached, essence(words)])}"


def spelling_of(tasks: Iterable[Task]) -> dict[str, str]:
    """Return misspelt word -> word, from the frequencies of words in these tasks."""
    return corrections(Counter(word.text for task in tasks for word in task.words if word.loose))


def digest(value: Any) -> str:
    """Return 32 hex digits of a hash of a JSON value."""
    return hashlib.blake2b(_compact(value).encode(), digest_size=16).hexdigest()


def is_held_out(scenario_key: str, share: float) -> bool:
    """Whether the scenario is among the `share` of all scenarios that is held out for the gate.

    It depends on the key alone, so a scenario never moves from the gate to training.
    """
    hashed = hashlib.blake2b(scenario_key.encode("utf-8", "surrogatepass"), digest_size=8, person=b"held-out").digest()
    return int.from_bytes(hashed) < share * 2**64


def _text_and_media(message: JSON) -> tuple[str, tuple[str, ...]]:
    """Return the text of a message, and hashes of its images, audio and files."""
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
    """Cached: system prompts are long, and the same ones come with every run."""
    return normalise(prompt)
