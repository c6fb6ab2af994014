"""The class `Trajectory`, with OpenPipe ART's fields and methods: the conversations and the reward of one rollout.

Messages have the format of the OpenAI SDK. An answer that is given as a plain message, not as the SDK's `Choice`, is
only context. `additional_histories` are, for example, those of a sub-agent, or shortened ones.
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
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, GetPydanticSchema, model_validator
from pydantic_core import core_schema

_NOTE = "__art_patch_trajectory__"

Message = ChatCompletionMessageParam
Messages = list[ChatCompletionMessageParam]
MessagesAndChoices = list[ChatCompletionMessageParam | Choice]
Tools = list[ChatCompletionToolParam]

MADE_HERE: ContextVar[list[Trajectory] | None] = ContextVar("art_patch_made_here", default=None)
"""Trajectories that the running rollout has made so far. If the rollout raises, the newest goes with the exception."""


def _read_history(given: Iterable[Any]) -> MessagesAndChoices:
    if isinstance(given, str | bytes | Mapping):
        raise ValueError("messages_and_choices is a list of messages and choices")
    return [_read_item(item) for item in given]


def _read_item(item: Any) -> Any:
    if isinstance(item, Mapping) and "message" in item and "finish_reason" in item:  # a choice that was read from JSON
        return Choice.model_validate(item)
    return item


def _by(read: Callable[[Any], Any]) -> GetPydanticSchema:
    # pydantic would check the SDK's types and copy every message. A trajectory must hold the very objects that it was
    # given: the exact tokens hang on each `Choice`.
    return GetPydanticSchema(lambda _type, _handler: core_schema.no_info_plain_validator_function(read))


_Said = Annotated[MessagesAndChoices, _by(_read_history)]
_Tools = Annotated[Tools | None, _by(lambda given: None if given is None else list(given))]


def _message(item: Any) -> Mapping[str, Any]:
    message: Any = getattr(item, "message", item)
    if isinstance(message, Mapping):
        return cast("Mapping[str, Any]", message)
    # Only the fields of a request: an answer of the SDK has more, many of them null.
    content, calls = message.content, message.tool_calls
    plain: dict[str, Any] = {"role": "assistant", "content": content}
    if calls:
        plain["tool_calls"] = [
            {"id": c.id, "type": c.type, "function": {"name": c.function.name, "arguments": c.function.arguments}}
            for c in calls
        ]
    return plain


class History(BaseModel):
    """One conversation of a trajectory: messages, with a `Choice` in place of each answer that may be trained on."""

    messages_and_choices: _Said = Field(default_factory=list)
    tools: _Tools = None  # offered in all requests of this conversation

    def messages(self) -> Messages:
        """Return the conversation as messages of a request; a choice becomes the assistant message that it holds."""
        return [cast("Message", _message(item)) for item in self.messages_and_choices]


class Trajectory(BaseModel):
    """A rollout: the record of one run of an agent on one task.

    Attributes:
        messages_and_choices: the main conversation; a `Choice` for each answer that may be trained on. The argument may
            be called `messages`, too.
        tools: tools that were offered in the requests of the main conversation.
        additional_histories: the rollout's other conversations, which share the reward.
        reward: how good the run was, compared only with the rewards of its group; 0 if it is not given. NaN means "not
            known yet"; such a trajectory is not trained on.
        initial_policy_version: step of the policy that gave the first answer, if a trainer that samples and trains at
            the same time says it.
        final_policy_version: the same for the last answer.
        metrics: further numbers, stored as scores beside the reward.
        metadata: JSON values, stored with the rollout so that it can be found by them.
        logs: lines of free text, stored for people to read.
        start_time: time at which the object was created; `finish` computes the duration from it.
    """

    model_config = ConfigDict(extra="forbid")  # a field that is misspelt would be lost in silence

    messages_and_choices: _Said = Field(default_factory=list)
    tools: _Tools = None
    additional_histories: list[History] = Field(default_factory=list[History])
    # In JSON, NaN is `null`.
    reward: Annotated[float, BeforeValidator(lambda given: math.nan if given is None else given)] = 0.0
    initial_policy_version: int | None = None
    final_policy_version: int | None = None
    metrics: dict[str, float | int | bool] = Field(default_factory=dict)
    metadata: dict[str, Any] = Field(default_factory=dict)
    logs: list[str] = Field(default_factory=list)
    # Not in JSON: a trajectory that is read back would otherwise go on counting from its first making.
    start_time: datetime = Field(default_factory=datetime.now, exclude=True)

    @model_validator(mode="before")
    @classmethod
    def _read_older_names(cls, given: Any) -> Any:
        if not isinstance(given, Mapping) or "messages" not in given:
            return given
        if "messages_and_choices" in given:
            raise ValueError("messages and messages_and_choices say the same; leave one of them out")
        fields = {**cast("Mapping[str, Any]", given)}
        return {"messages_and_choices": fields.pop("messages"), **fields}

    def model_post_init(self, context: Any, /) -> None:
        """Note that the running rollout has made this trajectory; called by pydantic."""
        if (made := MADE_HERE.get()) is not None:
            made.append(self)

    @property
    def total_reward(self) -> float:
        """The reward: of an episode, the sum of the rewards of its steps."""
        return self.reward

    def messages(self) -> Messages:
        """Return the main conversation as messages of a request."""
        return self.histories()[0].messages()

    def histories(self) -> list[History]:
        """Return all conversations of the rollout, the main one first."""
        # `model_construct` copies nothing: appending to this history appends to the trajectory.
        main = History.model_construct(messages_and_choices=self.messages_and_choices, tools=self.tools)
        return [main, *self.additional_histories]

    def choices(self) -> list[Choice]:
        """Return the choices of all conversations, in order."""
        items = (item for history in self.histories() for item in history.messages_and_choices)
        return [item for item in items if isinstance(item, Choice)]

    def log(self, message: str) -> None:
        """Append a line of text to the trajectory's `logs`."""
        self.logs.append(message)

    def finish(self) -> Self:
        """Set the metric `duration` to the seconds since the object was created, and return the trajectory."""
        self.metrics["duration"] = (datetime.now() - self.start_time).total_seconds()
        return self

    @asynccontextmanager
    async def track_duration(self, metric_name: str) -> AsyncGenerator[None]:
        """Add the seconds that the block takes to the trajectory's metric `METRIC_NAME_duration`."""
        began = time.monotonic()
        try:
            yield
        finally:
            name = f"{metric_name}_duration"
            # Added up, because a rollout may enter the block once a turn.
            self.metrics[name] = self.metrics.get(name, 0.0) + time.monotonic() - began

    def for_logging(self) -> dict[str, Any]:
        """Return the main conversation and the rest of the rollout as JSON values; messages tell if `trainable`."""
        said = zip(self.messages_and_choices, self.messages(), strict=True)
        return {
            "reward": self.reward,
            "initial_policy_version": self.initial_policy_version,
            "final_policy_version": self.final_policy_version,
            "metrics": self.metrics,
            "metadata": self.metadata,
            "messages": [{**message, "trainable": isinstance(item, Choice)} for item, message in said],
            "tools": self.tools,
            "logs": self.logs,
        }

    def __str__(self) -> str:
        """Return one line with the reward, metrics and metadata."""
        return f"Trajectory(reward={self.reward}, metrics={self.metrics}, metadata={self.metadata})"


class Failure(BaseModel):
    """Record of a rollout that raised an exception."""

    type: str  # name of the exception's class
    message: str
    traceback: str
    trajectory: Trajectory | None = None  # the newest that the rollout had made when it raised


def remember(error: BaseException, trajectory: Trajectory | None) -> None:
    """Attach the trajectory of a failed rollout to its exception, for `failure_of`."""
    # On the exception itself, because it travels through code of the script. The first was set nearest to the raise.
    if trajectory is not None and getattr(error, _NOTE, None) is None:
        setattr(error, _NOTE, trajectory)


def failure_of(error: BaseException) -> Failure:
    """Return the exception as a `Failure` record, with the trajectory that `remember` attached to it."""
    return Failure(
        type=type(error).__qualname__,
        message=str(error),
        traceback="".join(traceback.format_exception(error)),
        trajectory=getattr(error, _NOTE, None),
    )
