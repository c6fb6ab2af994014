"""Chat messages to prompt ids and ids back to text, through the model's own tokenizer and chat template.

Every template gets the same normal form: contents are strings, tool-call arguments are objects if they parse, and
`developer` is `system`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast


class PromptError(ValueError):
    """The chat template refused the messages."""


class PromptEncoder:
    """The tokenizer, as the server uses it. Safe to call from several threads."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._entries: dict[int, tuple[str, list[int] | None]] = {}

    def encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Renders and tokenises a conversation up to where the assistant speaks.

        Raises:
            PromptError: The template cannot render these messages.
        """
        try:
            text = self._tokenizer.apply_chat_template(
                [_normal(message) for message in messages],
                tools=list(tools) if tools else None,
                add_generation_prompt=True,
                tokenize=False,
                **(template_kwargs or {}),
            )
        except Exception as error:  # a template may raise anything: jinja's errors, TypeError, KeyError
            raise PromptError(f"the model's chat template refused the messages: {error}") from error
        # The template wrote the special tokens already; the tokenizer would add a second <bos>.
        return self._tokenizer.encode(text, add_special_tokens=False)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of sampled ids, without special tokens such as the end of the turn."""
        return self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def token_entry(self, token_id: int) -> tuple[str, list[int] | None]:
        """A token's text and UTF-8 bytes as log-probability records show them; no bytes for half a character."""
        entry = self._entries.get(token_id)
        if entry is None:
            text = self._tokenizer.decode([token_id], clean_up_tokenization_spaces=False)
            entry = self._entries[token_id] = (text, None if "\ufffd" in text else list(text.encode()))
        return entry


def _normal(message: Mapping[str, Any]) -> dict[str, Any]:
    normal = dict(message)
    if normal["role"] == "developer":
        normal["role"] = "system"
    if isinstance(normal.get("content"), list):
        normal["content"] = "".join(part["text"] for part in normal["content"])
    elif normal.get("content") is None:
        normal["content"] = ""
    if normal.get("tool_calls"):
        normal["tool_calls"] = [_normal_call(call) for call in normal["tool_calls"]]
    else:
        normal.pop("tool_calls", None)
    return normal


def _normal_call(call: Mapping[str, Any]) -> dict[str, Any]:
    # OpenAI sends arguments as a string of JSON; most templates render an object and would quote a string once more.
    function = dict(call["function"])
    try:
        arguments = json.loads(function.get("arguments") or "{}")
    except (ValueError, RecursionError):
        arguments = function["arguments"]
    if isinstance(arguments, dict):
        function["arguments"] = cast("dict[str, Any]", arguments)
    return {**call, "function": function}
