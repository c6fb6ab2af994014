"""Computes the scenario of a trajectory: its key, and whether it is held out for the gate.

The key of a task is a hash of its essential words (`wording.essence`). So it does not depend on when a text arrives, or
which other texts arrive with it. There are two exceptions: a misspelt word is corrected if other texts contain the
right one, and scenarios that `embeddings` finds equal get the key of the most frequent wording.

Nothing changes sides: the caller keeps the scenario of each wording that it has seen (`KnownScenario`). So a cluster
keeps the key that it had first, whatever wording is the most frequent later (`first_keys`).
"""

import hashlib
import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from art_patch.grouping.wording import Word, corrections, essence, mask, normalise, one_spelling, words_of
from art_patch.types import JSON, Call, KnownScenario, Trajectory

# Made once: `json.dumps` makes an encoder for each call that has arguments.
_compact = json.JSONEncoder(separators=(",", ":")).encode
_sorted = json.JSONEncoder(sort_keys=True, default=repr).encode


@dataclass(frozen=True, slots=True)
class Task:
    """A run's task, as the messages of its first call and the offered tools describe it."""

    setting: str  # hash of the tools and of all before the first user message, masked
    attached: tuple[str, ...]  # hashes of images, audio and files in the first user message
    text: str  # the first user message, normalised
    words: tuple[Word, ...]


def scenario_of(trajectory: Trajectory) -> tuple[str, str] | None:
    """Return a trajectory's (scenario key, how it was found); `None` if it has no key of the user's and no calls."""
    if (given := given_scenario(trajectory)) is not None or not trajectory.calls:
        return given
    return task_key(task_of(trajectory.calls[0])), "same_task"


def given_scenario(trajectory: Trajectory) -> tuple[str, str] | None:
    """Return (scenario key, how it was found) if the user gave the trajectory a key; else the text gives the key."""
    info = trajectory.info
    if info.group_key is not None:
        return f"group:{info.group_key}", "group_key"
    if info.scenario_key is not None:
        return f"scenario:{info.scenario_key}", "scenario_key"
    return None


def task_of(first: Call, *, across: bool = False, seen: dict[str, tuple[str, tuple[Word, ...]]] | None = None) -> Task:
    """Return the task of a run, given the run's first call; with `across` only the first user message counts.

    `seen` is a cache of masked text -> its spelling and words, which many runs share; the function adds to it.
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
    """Return the tools offered in a call as sorted JSON texts, so that their order does not matter."""
    return sorted(map(_sorted, call.tools))


def task_key(task: Task, spelling: dict[str, str] | None = None) -> str:
    """Return the scenario key of a task; `spelling` maps misspelt words to the words that replace them."""
    words: Sequence[Word] = task.words
    if spelling:
        words = [Word(spelling.get(w.text, w.text), True) if w.loose else w for w in words]
    return f"task:{digest([task.setting, task.attached, essence(words)])}"


def task_keys(tasks: Collection[Task]) -> dict[Task, str]:
    """Return the scenario key of each task; the frequencies of all words in these tasks tell which are misspelt."""
    spelling = corrections(Counter(word.text for task in tasks for word in task.words if word.loose))
    return {task: task_key(task, spelling) for task in set(tasks)}


def first_keys(clusters: Mapping[str, str], known: Mapping[str, KnownScenario]) -> dict[str, str]:
    """Return wording key -> scenario key, given wording key -> key of the cluster that it is in now.

    A cluster has the scenario key of its oldest wording that is `known`. A wording that is known on the other side
    stays in its own scenario.
    """
    oldest: dict[str, KnownScenario] = {}
    for wording, cluster in clusters.items():
        for seen in (known.get(wording), known.get(cluster)):
            if seen is not None:
                oldest[cluster] = min(seen, oldest.get(cluster, seen), key=_age)
    keys: dict[str, str] = {}
    for wording, cluster in clusters.items():
        own, first = known.get(wording), oldest.get(cluster)
        if own is not None and first is not None and own.held_out != first.held_out:
            first = own
        keys[wording] = cluster if first is None else first.scenario_key
    return keys


def _age(seen: KnownScenario) -> tuple[float, str]:
    return seen.first_seen_at, seen.scenario_key


def digest(value: Any) -> str:
    """Return a hash of a JSON value as 32 hex digits; equal values give equal hashes."""
    return hashlib.blake2b(_compact(value).encode(), digest_size=16).hexdigest()


def is_held_out(scenario_key: str, share: float) -> bool:
    """Whether a scenario is held out for the gate: by its key and `share` alone, unless it is known or has a user."""
    hashed = hashlib.blake2b(scenario_key.encode("utf-8", "surrogatepass"), digest_size=8, person=b"held-out").digest()
    return int.from_bytes(hashed) < share * 2**64


def is_user_held_out(user_id: str, share: float) -> bool:
    """Whether a user is held out: by a hash of the id and `share` alone, so nothing about the user is kept for it."""
    return is_held_out(f"user:{user_id}", share)


def _text_and_media(message: JSON) -> tuple[str, tuple[str, ...]]:
    """Return the text of a message, and hashes of its images, audio and files."""
    content: Any = message.get("content") or ""
    if isinstance(content, str):
        return content, ()
    texts: list[str] = []
    attached: list[str] = []
    for part in content if isinstance(content, list | tuple) else [content]:
        text = part.get("text") if isinstance(part, dict) else part
        if isinstance(text, str):
            texts.append(text)
        else:
            attached.append(hashlib.blake2b(_sorted(part).encode()).hexdigest()[:32])
    return "\n".join(texts), tuple(attached)


_normalised = lru_cache(maxsize=256)(normalise)  # system prompts are long, and the same ones come with every run
