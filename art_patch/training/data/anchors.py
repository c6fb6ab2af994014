"""Divides the credit for a run's reward over its turns, where siblings were in the same state. Pure.

The rewards of a group compare whole runs, so every turn of a run gets the same advantage, whichever turn decided. But
siblings that passed through the same prompt were in the same state (an anchor), and from there on they can be compared
with one another alone: a turn's anchor advantage is the advantage of its run minus the mean of all siblings that passed
through its prompt. Where the outcome was decided before, that is 0; where it was open, it is what the answer to this
prompt and all that followed were worth. This is the step advantage of GiGPO (https://arxiv.org/abs/2505.10978), without
a discount, and with token ids in place of the states of an environment.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from hashlib import blake2b

import numpy as np

from art_patch.training.data.packing import Example
from art_patch.training.data.rows import Row


class Anchors:
    """The prompts that the siblings of a group passed through, each with their mean advantage."""

    def __init__(self, siblings: Sequence[Example], weight: float) -> None:
        """Takes all siblings that are trained, and the weight of a turn's anchor advantage beside its run's."""
        self._weight = weight
        passed: dict[bytes, dict[int, float]] = defaultdict(dict)
        for index, each in enumerate(siblings if weight else ()):
            for row in each.rows:
                for prompt, _ in _turns(row):
                    passed[prompt][index] = each.advantage  # once, however often a run came back to it
        self._mean_of = {prompt: sum(those.values()) / len(those) for prompt, those in passed.items()}

    def of_turn(self, run: float, prompt_ids: Sequence[int]) -> float:
        """Returns the advantage of an answer to this prompt, in a run with the advantage `run`.

        It is `(run + weight * anchor) / (1 + weight)`. The anchor advantage is 0 if no other sibling passed through the
        prompt, and for an answer that continues another one without a token between them: rows hold both as one turn.
        Answers to a prompt that all siblings share keep the advantage of the run.
        """
        return self._mixed(run, _key(prompt_ids)) if self._weight else run

    def of_tokens(self, example: Example) -> Example:
        """Returns a sibling with the advantage of each of its sampled tokens."""
        if not self._weight:
            return example
        turns = [turn for row in example.rows for turn in _turns(row)]
        mixed = (self._mixed(example.advantage, prompt) for prompt, tokens in turns for _ in range(tokens))
        return replace(example, token_advantages=tuple(mixed))

    def _mixed(self, run: float, prompt: bytes) -> float:
        return (run + self._weight * (run - self._mean_of.get(prompt, run))) / (1 + self._weight)


def _turns(row: Row) -> Iterator[tuple[bytes, int]]:
    """Yields for each answer in a row the key of the prompt before it, and its number of sampled tokens."""
    seen, done = blake2b(digest_size=16), 0
    edges = np.flatnonzero(np.diff(np.array((False, *row.sampled_T, False), dtype=np.int8)))
    for start, stop in edges.reshape(-1, 2).tolist():
        seen.update(_bytes(row.ids_T[done:start]))  # each token is hashed once, however many turns follow it
        done = start
        yield seen.copy().digest(), stop - start


def _key(prompt_ids: Sequence[int]) -> bytes:
    return blake2b(_bytes(prompt_ids), digest_size=16).digest()


def _bytes(ids: Sequence[int]) -> bytes:
    return np.array(ids, dtype=np.int64).tobytes()
