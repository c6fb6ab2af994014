"""Computes the scenario of a trajectory: its key, and whether it is held out for the gate.

The key of a task is a hash of its essential words (`wording.essence`). So it does not depend on when a text arrives, or
which other texts arrive with it. There are two exceptions: a misspelt word is corrected if other texts contain the
right one, and scenarios that mean the same get the key of the most frequent wording (`same_meaning`).

Nothing changes sides: the caller keeps the scenario of each wording that it has seen (`KnownScenario`). So a cluster
keeps the key that it had first, whatever wording is the most frequent later (`first_keys`).

An embedding model, if the caller has one, finds wordings of one task that have no words in common. The model alone is
not precise enough: most models put "price of plums" close to "price of pears". So words with a digit or a capital
letter, words in quotes, and words of number and negation must be equal in both texts. The model decides about the other
words only.
"""

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
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


# Texts -> one vector for each, all of one length. It raises `ConnectionError` if it has none; then words alone decide.
Embed = Callable[[Sequence[str]], Sequence[Sequence[float]]]

# Words of number and negation: opposite tasks that differ in one of these have almost the same embedding.
_COUNTING = frozenset(
    """
    zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen
    eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety hundred thousand million billion half
    double first second third fourth fifth last once twice no not never none nobody nothing neither nor without
    cannot cant dont doesnt didnt isnt wasnt wont wouldnt shouldnt couldnt havent hasnt
    """.split()  # noqa: SIM905 - reads better than fifty quotes
)
_BATCH = 256
_SIMILAR = 0.95  # least cosine similarity of two wordings of one task


def embed_with(base_url: str, model: str, *, api_key: str | None = None, timeout_s: float = 60.0) -> Embed:
    """Return a function that gets one vector for each text from an OpenAI-compatible `/v1/embeddings` server.

    `base_url` ends in `/v1`, `model` is a name on this server, and `timeout_s` limits each batch of 256 texts.
    """

    def embed(texts: Sequence[str]) -> list[list[float]]:
        import numpy as np
        from openai import APIStatusError, OpenAI, OpenAIError

        # The server's own words stay out of the reason, which goes into metrics: they may be a page, or quote a key.
        try:
            with OpenAI(base_url=base_url, api_key=api_key or "none", timeout=timeout_s) as client:
                batches = [list(texts[start : start + _BATCH]) for start in range(0, len(texts), _BATCH)]
                answers = [client.embeddings.create(model=model, input=batch).data for batch in batches]
            rows = [each.embedding for data in answers for each in sorted(data, key=lambda each: each.index)]
            vectors = np.asarray(rows, dtype=np.float32)
            if vectors.ndim != 2 or len(vectors) != len(texts) or not np.isfinite(vectors).all():
                raise ValueError("not one vector of numbers for each text")
        except APIStatusError as error:
            reason = f"HTTP {error.status_code}"
        except OpenAIError as error:
            reason = str(error)
        except (AttributeError, TypeError, ValueError):  # the SDK accepts any body as an answer
            reason = "its answer holds no vectors"
        else:
            return vectors.tolist()
        raise ConnectionError(f"{model} at {base_url} gave no embeddings: {reason}")

    return embed


def same_meaning(tasks: Mapping[str, Task], counts: Mapping[str, int], embed: Embed) -> dict[str, str]:
    """Return scenario key -> key of another scenario with the same meaning, at least as frequent.

    Scenarios are visited from the most to the least frequent. Each joins the most similar scenario that has not joined
    another itself, because similarity does not add up along a chain. `tasks` and `counts` have one task of each
    scenario and the number of its runs, by key.
    """
    import numpy as np

    blocks: dict[tuple[object, ...], list[str]] = defaultdict(list)
    for key, task in tasks.items():
        blocks[task.setting, task.attached, _hard(task)].append(key)
    crowded = sorted(key for keys in blocks.values() if len(keys) > 1 for key in keys)
    if not crowded:
        return {}
    vectors = np.asarray(embed([tasks[key].text for key in crowded]), dtype=np.float32)
    vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    row = {key: index for index, key in enumerate(crowded)}
    found: dict[str, str] = {}
    for keys in blocks.values():
        leaders: list[str] = []
        for key in sorted(keys, key=lambda key: (-counts[key], key)) if len(keys) > 1 else ():
            cosines = vectors[[row[leader] for leader in leaders]] @ vectors[row[key]]
            if leaders and cosines.max() >= _SIMILAR:
                found[key] = leaders[int(cosines.argmax())]
            else:
                leaders.append(key)
    return found


def _hard(task: Task) -> tuple[str, ...]:
    """Return the words that the model may not judge, sorted."""
    hard = (w.text for w in task.words if not w.loose or w.text in _COUNTING or any(map(str.isdigit, w.text)))
    return tuple(sorted(hard))
