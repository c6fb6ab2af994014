"""Wordings that only their meaning shows to be one task: an embedding model instead of equal words. Optional.

Precision is bounded by the model: "price of plums" and "price of pears" lie close together in most. So what carries a
number, a capital or quotes, and words of number and negation, must still be equal; the model judges the rest.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from art_patch.grouping.scenario import Task

Embed = Callable[[Sequence[str]], Sequence[Sequence[float]]]
"""Texts -> one vector each, all of one length. Raises `ConnectionError` where it has none: the words decide then."""

_COUNTING = frozenset(
    """
    zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen
    eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety hundred thousand million billion half
    double first second third fourth fifth last once twice no not never none nobody nothing neither nor without
    cannot cant dont doesnt didnt isnt wasnt wont wouldnt shouldnt couldnt havent hasnt
    """.split()  # noqa: SIM905 - reads better than fifty quotes
)
_BATCH = 256


def embed_with(base_url: str, model: str, *, api_key: str | None = None, timeout_s: float = 60.0) -> Embed:
    """Return a function that asks an OpenAI-compatible `/v1/embeddings`.

    Args:
        base_url: address that ends in `/v1`.
        model: name of the embedding model there.
        api_key: as the server wants it.
        timeout_s: for each batch of 256 texts.
    """

    def embed(texts: Sequence[str]) -> list[list[float]]:
        import numpy as np
        from openai import APIStatusError, OpenAI, OpenAIError

        # What the server wrote stays out of the reason: it goes into metrics, and may be a page or quote a key.
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
        except (AttributeError, TypeError, ValueError):  # the SDK takes any body for an answer
            reason = "its answer holds no vectors"
        else:
            return vectors.tolist()
        raise ConnectionError(f"{model} at {base_url} gave no embeddings: {reason}")

    return embed


def same_meaning(tasks: Mapping[str, Task], counts: Mapping[str, int], embed: Embed, similar: float) -> dict[str, str]:
    """Return scenario key -> the key of the most frequent scenario that means the same.

    Each scenario joins one leader, the nearest, and never another follower: likeness does not add up along a chain.

    Args:
        tasks: one task of each scenario.
        counts: how many runs each scenario has.
        embed: texts -> vectors.
        similar: least cosine, 0..1.
    """
    import numpy as np

    blocks: dict[tuple[Any, ...], list[str]] = defaultdict(list)
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
        places: list[int] = []
        for key in sorted(keys, key=lambda key: (-counts[key], key)) if len(keys) > 1 else ():
            cosines = vectors[places] @ vectors[row[key]]
            if leaders and cosines.max() >= similar:
                found[key] = leaders[int(cosines.argmax())]
            else:
                leaders.append(key)
                places.append(row[key])
    return found


def _hard(task: Task) -> tuple[str, ...]:
    """The words that no model may judge, in any order."""
    return tuple(
        sorted(
            word.text
            for word in task.words
            if not word.loose or word.text in _COUNTING or any(character.isdigit() for character in word.text)
        )
    )
