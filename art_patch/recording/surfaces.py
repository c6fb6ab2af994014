"""What each surface's request and answer say, in the words of chat: one reader for each, all of the same two shapes.

`Asked` is what a request says, `Answered` what came back, streamed or not, complete or cut. Readers are pure, know no
exchange, and cannot fail because of what an app or a server wrote: what cannot be read is left out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from art_patch.types import JSON, Choice


@dataclass(frozen=True, slots=True)
class Asked:
    """A request.

    Attributes:
        messages: the prompt.
        tools: what was offered.
        params: the allow-listed fields; what is not named in an allow-list never reaches the store.
        answers: how many choices a whole answer has.
    """

    messages: tuple[JSON, ...] = ()
    tools: tuple[JSON, ...] = ()
    params: dict[str, Any] = field(default_factory=dict[str, Any])
    answers: int = 1


@dataclass(frozen=True, slots=True)
class Answered:
    """An answer.

    Attributes:
        choices: as far as they came.
        done: nothing of it can be missing.
        error: what the server put in the place of the rest of it.
        model: the model that says it answered.
        prompt_token_ids: as the server told them.
        prompt_tokens: from `usage`; `None` where it is unknown.
        completion_tokens: from `usage`; `None` where it is unknown.
    """

    choices: tuple[Choice, ...] = ()
    done: bool = True
    error: Any = None
    model: str | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


def is_whole(raw: bytes) -> bool:
    """Whether an answer's bytes are one JSON object, and no stream of events."""
    return raw.lstrip()[:1] == b"{"
