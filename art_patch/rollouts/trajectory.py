"""One rollout: what was said, and how good it was.

`messages_and_choices` holds messages as the OpenAI SDK takes them, and the `Choice` of each answer that may be trained
on. An answer that stands there as a message is context. Conversations beside the main one (a sub-agent, a history that
was cut) are `additional_histories`; they share the reward.

Fields and methods are those of OpenPipe ART, and classes of the user's own may extend this one.
"""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from contextvars import ContextVar
from datetime import datetime
from typing import Annotated, Any, Self, cast

from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam
from openai.types.chat.chat_completion import Choice
from pydantic import BaseModel, BeforeValidator, Field, GetPydanticSchema
from pydantic_core import core_schema

_NOTE = "__art_patch_trajectory__"

Message = ChatCompletionMessageParam
Messages = list[ChatCompletionMessageParam]
MessageOrChoice = ChatCompletionMessageParam | Choice
MessagesAndChoices = list[ChatCompletionMessageParam | Choice]
Tools = list[ChatCompletionToolParam]

MADE_HERE: ContextVar[list[Trajectory] | None] = ContextVar("art_patch_made_here", default=None)
"""Trajectories that the running rollout has made so far, so that one that fails does not take them along."""


def _read_history(given: Iterable[Any]) -> MessagesAndChoices:
    """Take messages as they are, of whatever SDK; and choices, from JSON too."""
    if isinstance(given, str | bytes | Mapping):
        raise ValueError("messages_and_choices is a list of messages and choices")
    return [_read_item(item) for item in given]


def _read_item(item: Any) -> Any:
    if isinstance(item, Mapping) and "message" in item and "finish_reason" in item:
        return Choice.model_validate(item)
    return item


def _unknown_reward(value: Any) -> Any:
    """JSON has no number for it."""
    return math.nan if value is None else value


def _read_tools(given: Iterable[Any] | None) -> list[Any] | None:
    return None if given is None else list(given)


def _by(read: Callable[[Any], Any]) -> GetPydanticSchema:
    """Read and write a field as it is: the SDK's types say what may be in it; checking them would copy all of it."""
    return GetPydanticSchema(lambda _type, _handler: core_schema.no_info_plain_validator_function(read))


_Said = Annotated[MessagesAndChoices, _by(_read_history)]
_Tools = Annotated[Tools | None, _by(_read_tools)]


def messages_of(history: Iterable[Any]) -> Messages:
    """Return a history as messages that can be sent: a choice becomes the assistant's message.

    Args:
        history: messages, and choices of the SDK or of one that is like it.
    """
    return [cast(ChatCompletionMessageParam, _message(item)) for item in history]


def _message(item: Any) -> Mapping[str, Any]:
    message: Any = getattr(item, "message", item)
    if isinstance(message, Mapping):
        return cast("Mapping[str, Any]", message)
    content, calls = message.content, message.tool_calls
    plain: dict[str, Any] = {"role": "assistant", "content": content}
    if calls:
        plain["tool_calls"] = [
            {
                "id": call.id,
                "type": call.type,
                "function": {"name": call.function.name, "arguments": call.function.arguments},
            }
            for call in calls
        ]
    return plain


class History(BaseModel):
    """A conversation of a trajectory.

    Attributes:
        messages_and_choices: see the module.
        tools: offered in it.
    """

    messages_and_choices: _Said = Field(default_factory=list)
    tools: _Tools = None

    def messages(self) -> Messages:
        """Return it as messages that can be sent."""
        return messages_of(self.messages_and_choices)


class Trajectory(BaseModel):
    """A rollout.

    Attributes:
        messages_and_choices: the main conversation, see the module.
        tools: offered in it.
        additional_histories: conversations beside it.
        reward: how good it was; compared within its group only. NaN is "not known yet", and is never trained on.
        metrics: further metrics; kept as scores beside the reward.
        metadata: anything to find it by, JSON values.
        logs: lines for people.
        start_time: when it was made.
    """

    messages_and_choices: _Said = Field(default_factory=list)
    tools: _Tools = None
    additional_histories: list[History] = Field(default_factory=list[History])
    reward: Annotated[float, BeforeValidator(_unknown_reward)]
    metrics: dict[str, float | int | bool] = Field(default_factory=dict)
    metadata: dict[str, Any] = Field(default_factory=dict)
    logs: list[str] = Field(default_factory=list)
    start_time: datetime = Field(default_factory=datetime.now, exclude=True)

    def model_post_init(self, context: Any, /) -> None:
        """Be known to the rollout that makes it."""
        made = MADE_HERE.get()
        if made is not None:
            made.append(self)

    def messages(self) -> Messages:
        """Return the main conversation as messages that can be sent."""
        return messages_of(self.messages_and_choices)

    def histories(self) -> list[History]:
        """Return all conversations, the main one first."""
        main = History.model_construct(messages_and_choices=self.messages_and_choices, tools=self.tools)
        return [main, *self.additional_histories]

    def choices(self) -> list[Choice]:
        """Return the choices of all conversations, in order."""
        items = (item for history in self.histories() for item in history.messages_and_choices)
        return [item for item in items if isinstance(item, Choice)]

    def log(self, message: str) -> None:
        """Keep a line for people."""
        self.logs.append(message)

    def finish(self) -> Self:
        """Note how long it took, as the metric `duration` in seconds."""
        self.metrics["duration"] = (datetime.now() - self.start_time).total_seconds()
        return self

    @asynccontextmanager
    async def track_duration(self, metric_name: str) -> AsyncGenerator[None]:
        """Add the seconds that the block takes to the metric `METRIC_NAME_duration`."""
        began = time.monotonic()
        try:
            yield
        finally:
            name = f"{metric_name}_duration"
            self.metrics[name] = self.metrics.get(name, 0.0) + time.monotonic() - began

    def for_logging(self) -> dict[str, Any]:
        """Return it as JSON values for people; each message says whether it may be trained on."""
        said = zip(self.messages_and_choices, self.messages(), strict=True)
        return {
            "reward": self.reward,
            "metrics": self.metrics,
            "metadata": self.metadata,
            "messages": [{**message, "trainable": isinstance(item, Choice)} for item, message in said],
            "tools": self.tools,
            "logs": self.logs,
        }

    def __str__(self) -> str:
        """Return what fits on a line."""
        return f"Trajectory(reward={self.reward}, metrics={self.metrics}, metadata={self.metadata})"


class Failure(BaseModel):
    """A rollout that raised.

    Attributes:
        type: of the exception.
        message: what it said.
        traceback: where it was raised.
        trajectory: what the rollout had made until then; `None` if nothing.
    """

    type: str
    message: str
    traceback: str
    trajectory: Trajectory | None = None


def remember(error: BaseException, trajectory: Trajectory | None) -> None:
    """Let the exception carry the trajectory that it ended, unless it has one."""
    if trajectory is not None and getattr(error, _NOTE, None) is None:
        setattr(error, _NOTE, trajectory)


def failure_of(error: BaseException) -> Failure:
    """Return the exception as a record."""
    return Failure(
        type=type(error).__qualname__,
        message=str(error),
        traceback="".join(traceback.format_exception(error)),
        trajectory=getattr(error, _NOTE, None),
    )
