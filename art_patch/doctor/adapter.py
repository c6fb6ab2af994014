"""Whether the champion's LoRA is truly applied: an engine that ignores one answers well, and as the base does.

In: the route and a client of the engine. Out: one finding, or `None` where nobody can be asked. The same short message
goes to the champion and to its base, at temperature 0, and the log-probabilities of the answers are compared. Only
what happens to be equal is suspicious: how large the difference should be is checked when an adapter is loaded.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from art_patch.doctor.finding import Finding
from art_patch.doctor.serving import Engine
from art_patch.errors import ArtPatchError
from art_patch.types import Route

_MESSAGE = "Tell me something I do not know."
"""Leaves much open: a model that is sure of every token shows no difference."""

_SAME_NATS = 1e-6
_BACK = "restart `art-patch serve`; if that does not mend it, go back: `art-patch rollback`"
_ASK = "see what `art-patch serve` says; calls go upstream meanwhile"


class _Answer(NamedTuple):
    """Token ids and the log-probability of each, nats."""

    token_ids: list[int]
    logprobs: list[float]


class _Unreadable(Exception):
    """An answer without what was asked for."""


def adapter(route: Route, base_url: str | None, connect: Callable[[str, str | None], Engine]) -> Finding | None:
    """Whether the champion answers otherwise than its base.

    Args:
        route: what the store says.
        base_url: what the settings say instead.
        connect: makes a client from an address and the name of a key file.
    """
    address, champion = base_url or route.base_url, route.champion
    if address is None or champion is None:
        return None
    base = f"{champion.rpartition('@')[0]}@0"
    try:
        client = connect(address, route.key_file)
        if not client.health() or not {champion, base} <= set(client.models()):
            return None
    except (ArtPatchError, ValueError):  # `serving.engine` has said so
        return None
    if champion == base:
        return Finding("adapter", "ok", f"none: {base}, the base itself, serves")
    answers: list[_Answer] = []
    for name in (base, champion):
        try:
            answers.append(_ask(client, name))
        except _Unreadable:
            return Finding("adapter", "bad", f"{name} answers without log-probabilities", _ASK)
        except (ArtPatchError, ValueError) as error:  # ValueError: no JSON
            return Finding("adapter", "bad", f"{name} cannot be asked ({' '.join(str(error).split())})", _ASK)
        if not all(map(math.isfinite, answers[-1].logprobs)):
            return Finding("adapter", "bad", f"{name} answers with log-probabilities that are not finite", _BACK)
    return _compare(champion, *answers)


def _ask(client: Engine, name: str) -> _Answer:
    messages = [{"role": "user", "content": _MESSAGE}]
    answer = client.chat(
        model=name, messages=messages, max_tokens=8, temperature=0, logprobs=True, return_token_ids=True
    )
    try:
        choice: Any = answer["choices"][0]
        # JSON knows no NaN; some servers write null for it.
        logprobs = [math.nan if (value := one["logprob"]) is None else value for one in choice["logprobs"]["content"]]
        found = _Answer(list(map(int, choice["token_ids"])), list(map(float, logprobs)))
    except (LookupError, TypeError, ValueError) as error:
        raise _Unreadable from error
    if not found.logprobs or len(found.logprobs) != len(found.token_ids):
        raise _Unreadable
    return found


def _compare(champion: str, base: _Answer, own: _Answer) -> Finding:
    # Beyond the first other token the contexts differ, and log-probabilities have nothing to do with each other.
    agreed = 0
    for one, other in zip(base.token_ids, own.token_ids, strict=False):
        if one != other:
            break
        agreed += 1
    gaps = [abs(one - other) for one, other in zip(base.logprobs[:agreed], own.logprobs[:agreed], strict=True)]
    gap = max(gaps, default=0.0)
    if base.token_ids == own.token_ids and gap <= _SAME_NATS:
        return Finding("adapter", "bad", f"{champion} answers exactly as the base: the LoRA is not applied", _BACK)
    if base.token_ids == own.token_ids:
        words = f"up to {gap:.2g} nats a token from the base"
    elif gap <= _SAME_NATS:
        words = f"other words than the base from token {agreed + 1}"
    else:
        words = f"up to {gap:.2g} nats a token from the base, other words from token {agreed + 1}"
    return Finding("adapter", "ok", f"{champion} is applied: {words}")
