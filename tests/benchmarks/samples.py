"""Calls as `store.py` writes them: English that comes with Python, ids as tokenizers make them."""

from __future__ import annotations

import json
import math
import random
import time
from pydoc_data.topics import topics

from art_patch._lib.ids import new_id
from art_patch.types import Call, Choice, TrajectoryInfo

TEXT = "\n".join(topics.values())
"""Half a megabyte."""

VOCABULARY = 151_000

Pair = tuple[TrajectoryInfo, Call]
"""A trajectory and its only call."""


def some_text(size: int) -> str:
    """Text from somewhere."""
    start = random.randrange(len(TEXT) - size)
    return TEXT[start : start + size]


def token_ids(count: int) -> tuple[int, ...]:
    """Ids as a tokenizer makes them: the frequent ones are small, and a few are very frequent."""
    return tuple(int(math.exp(random.random() * math.log(VOCABULARY))) for _ in range(count))


def logprobs(count: int) -> tuple[float, ...]:
    """Log-probabilities, most of them near zero."""
    return tuple(-random.expovariate(3) for _ in range(count))


def message(role: str, text: str) -> dict[str, str]:
    """A message."""
    return {"role": role, "content": text}


SYSTEM = message("system", TEXT[10_000:11_000])
"""What all calls of an agent begin with."""


def big_call() -> Pair:
    """6 KB of text, 1 KB of it `SYSTEM`, and 2 KB of tokens."""
    key, now = new_id(), time.time()
    answer = Choice(0, message("assistant", some_text(300)), "stop", token_ids(250), logprobs(250))
    call = Call(new_id(), key, now, "gpt-5", (SYSTEM, message("user", some_text(4_900))), (answer,), policy="agent@1",
                params={"temperature": 1.0}, prompt_tokens=1_500, completion_tokens=250)  # fmt: skip
    return TrajectoryInfo(key, now), call


def small_call() -> Pair:
    """1 KB of text, and 50 tokens."""
    key, now = new_id(), time.time()
    answer = Choice(0, message("assistant", some_text(200)), "stop", token_ids(50), logprobs(50))
    call = Call(new_id(), key, now, "gpt-5", (SYSTEM, message("user", some_text(800))), (answer,), policy="agent@1",
                params={"temperature": 1.0}, prompt_tokens=300, completion_tokens=50)  # fmt: skip
    return TrajectoryInfo(key, now), call


def agent_run(prompt_ids: bool) -> tuple[list[TrajectoryInfo | Call], int]:
    """Twenty turns of an agent, and what they weigh when each request is written whole. The last prompt has 37 KB."""
    key = new_id()
    records: list[TrajectoryInfo | Call] = [TrajectoryInfo(key, time.time(), "explicit")]
    messages = [message("system", some_text(3_000)), message("user", some_text(1_000))]
    ids, naive = list(token_ids(1_000)), 0
    for turn in range(20):
        sampled, said = token_ids(120), message("assistant", some_text(500))
        answer = Choice(0, said, "tool_calls", sampled, logprobs(120))
        call = Call(new_id(), key, time.time() + turn, "gpt-5", tuple(messages), (answer,), policy="agent@1",
                    prompt_token_ids=tuple(ids) if prompt_ids else None, prompt_tokens=len(ids),
                    completion_tokens=120)  # fmt: skip
        records.append(call)
        naive += len(json.dumps([*messages, said])) + 8 * 120 + (4 * len(ids) if prompt_ids else 0)
        messages += [said, message("tool", some_text(1_260))]
        ids += [*sampled, *token_ids(260)]
    return records, naive


def small_run(number: int, users: int, *, began: float | None = None) -> list[TrajectoryInfo | Call]:
    """Ten calls of an agent: a trajectory as a store that holds a year of them has a hundred thousand."""
    key, began = new_id(), 1.7e9 + number if began is None else began
    user = f"user-{number % users}"
    records: list[TrajectoryInfo | Call] = [TrajectoryInfo(key, began, "explicit", user_id=user)]
    messages = [SYSTEM, message("user", some_text(80))]
    for turn in range(10):
        said = message("assistant", some_text(60))
        answer = Choice(0, said, "tool_calls", tuple(range(turn, turn + 15)), (-0.5,) * 15)
        records.append(Call(new_id(), key, began + turn / 100, "gpt-5", tuple(messages), (answer,), policy="agent@1",
                            prompt_tokens=100, completion_tokens=15))  # fmt: skip
        messages += [said, message("tool", some_text(60))]
    return records
