"""Asks a teacher, a model with the tokenizer of the base, for the log-probabilities of tokens that a policy sampled.

The teacher is a server of OpenAI's `/v1/completions` that takes token ids as prompt and echoes them with their
log-probabilities (`echo` with `logprobs`), as vLLM does. They are those of the model itself, at temperature 1. Only
token ids are sent. Temporary failures are retried by the SDK, with growing pauses or the one that the server asked for.

A sequence that the teacher refuses, because it is longer than its context, say, is left out with the reason; any other
failure raises a `JudgeError`. What was answered once is kept in memory, so no sequence is asked about twice.
"""

import math
from array import array
from collections.abc import Mapping, Sequence
from functools import cached_property
from hashlib import blake2b
from typing import Any
from urllib.parse import urlsplit

from art_patch._lib.loose_json import as_object
from art_patch.errors import ConfigError, JudgeError
from art_patch.rewards.judge.client import Budget

Ids = Sequence[int]

_REFUSED = frozenset((400, 413, 422))  # statuses that speak of the one request
_REASON_LENGTH = 300
_UNKNOWN = "\N{REPLACEMENT CHARACTER}"  # a token of half a character has no text


class Teacher:
    """A model that gives log-probabilities of tokens; several threads may share it.

    Args:
        model: the name under which the server has it.
        base_url: address of the server, which ends in `/v1`.
        budget: limits the calls; it cannot limit USD, because no price of a teacher is known.
        timeout_s: how long one answer may take.

    Raises a `ConfigError` if the budget has a limit in USD.
    """

    def __init__(
        self, model: str, base_url: str, api_key: str | None = None, *, budget: Budget | None = None,
        max_retries: int = 4, timeout_s: float = 300.0,
    ) -> None:  # fmt: skip
        self.model, self.budget = model, budget or Budget()
        if self.budget.max_usd is not None:
            raise ConfigError("the price of a teacher is unknown, so no limit in USD can be kept; give --max-calls")
        self._base_url, self._api_key = base_url, api_key
        self._limits: dict[str, Any] = {"max_retries": max_retries, "timeout": timeout_s}
        self._known: dict[bytes, array[float]] = {}

    @property
    def host(self) -> str:
        """Where the teacher is, without a password."""
        parts = urlsplit(self._base_url)
        return (parts.hostname or "") + (f":{parts.port}" if parts.port else "")

    def knows(self, ids: Ids) -> bool:
        """Return whether the teacher was asked about these tokens before, so that it is not asked again."""
        return _key(ids) in self._known

    def logprobs(self, ids: Ids) -> Sequence[float] | str:
        """Return the log-probability of each token of a sequence, or why the teacher refuses the sequence.

        The first token has none and gets 0. Raises `BudgetUsedUp`, and `JudgeError` if the teacher does not answer.
        """
        key = _key(ids)
        if (known := self._known.get(key)) is not None:
            return known
        answer = self._asked(ids)
        if isinstance(answer, str):
            return answer
        values = _list(answer, "token_logprobs")[: len(ids)]
        if len(values) < len(ids) or not all(_is_number(value) for value in values[1:]):
            raise JudgeError(
                f"{self._named} gives no log-probabilities of tokens that it is sent: its /v1/completions must have "
                "`echo` with `logprobs`, as vLLM's does"
            )
        self._known[key] = array("d", (0.0, *values[1:]))
        return self._known[key]

    def require_same_tokens(self, texts: Mapping[int, str], base: str, special: frozenset[int]) -> None:
        """Raise `ConfigError` unless the teacher reads these token ids of the `base` as the same texts.

        `special` are ids whose texts a server may leave out.
        """
        ids = [*texts]
        answer = self._asked(ids)
        if isinstance(answer, str):
            raise ConfigError(f"{self._named} cannot read the tokens of {base}: {answer}; it needs the same tokenizer")
        theirs = _list(answer, "tokens")[: len(ids)]
        compared = [
            (key, ours, said)
            for (key, ours), said in zip(texts.items(), theirs, strict=False)
            # Servers differ in whether a token that begins a word has its space.
            if ours and _UNKNOWN not in ours + str(said) and (said or key not in special)
        ]
        other = next(((key, ours, said) for key, ours, said in compared if ours.strip() != str(said).strip()), None)
        if other is None and compared:
            return
        key, ours, said = other or (ids[0], texts[ids[0]], None)
        raise ConfigError(
            f"{self._named} has another tokenizer than {base}: token {key} is {said!r:.40} there, {ours!r:.40} here. "
            "What it says of tokens cannot be compared with what a policy says; choose a teacher of the base's family"
        )

    @property
    def _named(self) -> str:
        return f"the teacher {self.model} at {self.host}"

    @cached_property
    def _client(self) -> Any:
        from openai import DefaultHttpxClient, OpenAI

        # Without a redirect, tokens and key go nowhere else; and without a key of its own it gets none of a provider's.
        pool = DefaultHttpxClient(follow_redirects=False)
        return OpenAI(base_url=self._base_url, api_key=self._api_key or "none", http_client=pool, **self._limits)

    def _asked(self, ids: Ids) -> Any:
        """Return the JSON of the teacher's answer, or why it refuses these tokens."""
        from openai import APIStatusError, OpenAIError

        body = {"model": self.model, "prompt": list(ids), "max_tokens": 1, "echo": True, "logprobs": 1}
        reserved, refused = self.budget.reserve(None), True
        try:
            answer = self._client.post("/completions", cast_to=object, body=body)
            refused = False
            return answer
        except APIStatusError as error:
            if error.status_code in _REFUSED:
                return self._words(error)
            raise JudgeError(self._cannot(error)) from None
        except (OpenAIError, ValueError) as error:  # ValueError: a 200 that is no JSON
            raise JudgeError(self._cannot(error)) from None
        finally:
            self.budget.settle(reserved, 0.0, was_refused=refused)

    def _cannot(self, error: Exception) -> str:
        return (
            f"{self._named} did not answer: {self._words(error)} -- check its name (ART_PATCH_TEACHER), address "
            "(ART_PATCH_TEACHER_BASE_URL, which ends in /v1) and key (ART_PATCH_TEACHER_API_KEY)"
        )

    def _words(self, error: Exception) -> str:
        said = as_object(getattr(error, "body", None)).get("message")
        # A server may quote the key that it refuses.
        words = " ".join(str(said or error).split()).replace(self._api_key or "\0", "***")
        return words if len(words) <= _REASON_LENGTH else words[: _REASON_LENGTH - 3] + "..."


def _key(ids: Ids) -> bytes:
    return blake2b(array("q", ids).tobytes(), digest_size=16).digest()


def _list(answer: Any, name: str) -> list[Any]:
    try:
        found = answer["choices"][0]["logprobs"][name]
    except (KeyError, IndexError, TypeError):
        return []
    return found if isinstance(found, list) else []


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not math.isnan(value)
