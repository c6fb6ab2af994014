"""Optional: finds wordings of one task that have no words in common, with an embedding model.

The model alone is not precise enough: most models put "price of plums" close to "price of pears". So words with a digit
or a capital letter, words in quotes, and words of number and negation must be equal in both texts. The model decides
about the other words only.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from art_patch.grouping.scenario import Task

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
