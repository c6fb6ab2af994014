"""Checks for `art-patch doctor` of the serving side: the mode, the champion, its engine and LoRA, and the clock."""

import math
import time
from collections.abc import Callable
from itertools import takewhile
from operator import eq
from pathlib import Path
from typing import Any, NamedTuple

from art_patch import serving
from art_patch.doctor.finding import Finding
from art_patch.errors import ArtPatchError
from art_patch.types import Route

START = "art-patch serve --base MODEL"

_SKEW_S = 60.0  # clocks of two machines may differ by seconds; more makes runs settle too early or never
_BEFORE = 1_735_689_600.0  # 2025-01-01, before the first release: an earlier time is certainly wrong
_MESSAGE = "Tell me something I do not know."  # open-ended: a model that is sure of every token shows no difference
_SAME_NATS = 1e-6
_BACK = "restart `art-patch serve`; if that does not mend it, go back: `art-patch rollback`"
_UNREAD = "the store's route cannot be read"
_ASK = "see what `art-patch serve` says; calls go upstream meanwhile"


Connect = Callable[[str, str | None], "serving.EngineClient"]  # address, name of a key file -> a client of the engine


def mode(own: str, source: str, route: Route | None) -> Finding:
    """Report the mode that apps use, and its `source`. A mode in the store overrules the setting `own`."""
    if route is None:
        return Finding("mode", "unknown", _UNREAD)
    if route.mode is not None:
        percent = "" if route.canary_percent is None else f" at {route.canary_percent:g} %"
        return Finding("mode", "ok", f"{route.mode}{percent}, set in the store by `art-patch mode`")
    said = {"environment": "from ART_PATCH_MODE", "argument": "from --mode"}.get(source, "the default")
    return Finding("mode", "ok", f"{own}, {said}; each app may say otherwise in patch()")


def champion(route: Route | None) -> Finding:
    """Report the name of the champion, the policy that serves, or that upstream answers."""
    if route is None:
        return Finding("champion", "unknown", _UNREAD)
    told = "none yet: calls go upstream and are recorded"
    if route.learner is not None:
        told = f"upstream; {route.learner} learns"
    if route.challenger is not None:
        told = f"upstream; {route.challenger} is tested beside it"
    return Finding("champion", "ok", route.champion or told)


def base(model: str | None, check: Callable[[str], None]) -> Finding | None:
    """Check that policies of the champion's base model can be trained and served, as far as its small files tell.

    `check` raises an `ArtPatchError` for a base that cannot. Return `None` if no base is known.
    """
    # A base on the server's disk, of which this machine has nothing, is checked by `serve` there.
    if model is None or not Path(model).is_dir():
        return None
    try:
        check(model)
    except ArtPatchError as error:
        return Finding("base", "bad", " ".join(str(error).split()), START)
    return Finding("base", "ok", model)


def engine(route: Route | None, base_url: str | None, connect: Connect) -> Finding:
    """Check that the engine (`base_url`, else the route's) answers, and serves the champion and the tested policy."""
    if route is None and base_url is None:
        return Finding("engine", "unknown", _UNREAD)
    route = route or Route()
    address = base_url or route.base_url
    if address is None:
        if route.champion is None and route.learner is None and route.challenger is None:
            return Finding("engine", "ok", "none is running, and none is needed yet")
        if route.champion is None:
            return Finding("engine", "warn", "none is running: upstream answers, and nothing is learned", START)
        return Finding("engine", "warn", f"none is running: calls for {route.champion} go upstream", START)
    try:
        client = connect(address, route.key_file)
        if not client.health():
            return Finding("engine", "bad", f"{address} does not answer: calls go upstream", START)
        names = client.models()
    except ArtPatchError as error:
        return Finding("engine", "bad", " ".join(str(error).split()), START)
    # A proxy or another program may answer on this port with a page of HTML.
    except ValueError:
        return Finding("engine", "bad", f"{address} is not an engine: it answers with no JSON", START)
    if route.champion is not None and route.champion not in names:
        shown = ", ".join(names) or "nothing"
        text = f"{address} serves {shown}, and not the champion {route.champion}: calls go upstream"
        return Finding("engine", "bad", text, "restart `art-patch serve`, which loads the champion")
    if route.challenger is not None and route.challenger not in names:
        # Only a warning: the champion serves, and the challenger's calls are answered upstream.
        text = f"{address} does not serve {route.challenger}, which is tested: what is meant for it goes upstream"
        return Finding("engine", "warn", text, "art-patch rollback")
    if route.champion is None and route.learner is not None and route.learner not in names:
        text = f"{address} does not serve {route.learner}, which learns: upstream answers, and nothing is learned"
        cure = (
            f"see what `art-patch serve` says; `art-patch reject {route.learner} --reason WHY` goes back to its parent"
        )
        return Finding("engine", "warn", text, cure)
    return Finding("engine", "ok", f"{address} answers and serves {route.champion or ', '.join(names)}")


class _Answer(NamedTuple):
    """Token ids of an answer, and the log-probability of each in nats."""

    token_ids: list[int]
    logprobs: list[float]


class _Unreadable(Exception):
    """The engine's answer has no token ids or no log-probabilities."""


def adapter(route: Route | None, base_url: str | None, connect: Connect) -> Finding | None:
    """Check that the champion answers differently from its base model, so that its LoRA is applied.

    An engine that ignores a LoRA looks healthy, because it answers with the base model. So base model and champion get
    the same short message at temperature 0, and their log-probabilities are compared. The check fails only if they are
    equal: how large the difference may be is checked when an engine loads an adapter. The result is `None` if no engine
    answers, or if it does not serve both.
    """
    if route is None or (champion := route.champion) is None or (address := base_url or route.base_url) is None:
        return None
    base = f"{champion.rpartition('@')[0]}@0"
    try:
        client = connect(address, route.key_file)
        if not client.health() or not {champion, base} <= set(client.models()):
            return None
    except (ArtPatchError, ValueError):  # the check `engine` reports it
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


def _ask(client: serving.EngineClient, name: str) -> _Answer:
    # Temperature 0, so that a difference between the two answers comes from the weights and not from sampling.
    sampling = {"max_tokens": 8, "temperature": 0, "logprobs": True, "return_token_ids": True}
    answer = client.chat(model=name, messages=[{"role": "user", "content": _MESSAGE}], **sampling)
    try:
        choice: Any = answer["choices"][0]
        # JSON has no NaN, and some servers write null for it.
        logprobs = [math.nan if (value := one["logprob"]) is None else value for one in choice["logprobs"]["content"]]
        found = _Answer(list(map(int, choice["token_ids"])), list(map(float, logprobs)))
    except (LookupError, TypeError, ValueError) as error:
        raise _Unreadable from error
    if not found.logprobs or len(found.logprobs) != len(found.token_ids):
        raise _Unreadable
    return found


def _compare(champion: str, base: _Answer, own: _Answer) -> Finding:
    # After the first different token the contexts differ, so later log-probabilities cannot be compared.
    agreed = sum(takewhile(bool, map(eq, base.token_ids, own.token_ids)))
    both = zip(base.logprobs[:agreed], own.logprobs[:agreed], strict=True)
    gap = max((abs(one - other) for one, other in both), default=0.0)
    if base.token_ids == own.token_ids and gap <= _SAME_NATS:
        return Finding("adapter", "bad", f"{champion} answers exactly as the base: the LoRA is not applied", _BACK)
    if base.token_ids == own.token_ids:
        words = f"up to {gap:.2g} nats a token from the base"
    elif gap <= _SAME_NATS:
        words = f"other words than the base from token {agreed + 1}"
    else:
        words = f"up to {gap:.2g} nats a token from the base, other words from token {agreed + 1}"
    return Finding("adapter", "ok", f"{champion} is applied: {words}")


def clock(now: float, last_call_at: float | None) -> Finding:
    """Check that this machine's clock (`now`, seconds since the epoch) is plausible.

    It is not if it shows a time before 2025, or if the newest call was recorded more than a minute in its future. Runs
    count as complete after some time without a call, and ids are sorted by time, so both need the right time.
    """
    shown = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now))
    if now < _BEFORE:
        return Finding("clock", "bad", f"{shown} cannot be right", "set the clock")
    if last_call_at is not None and last_call_at > now + _SKEW_S:
        text = f"{shown}; the newest call was recorded {last_call_at - now:.0f} s in the future"
        return Finding("clock", "bad", text, "let all machines of the project take their time from the network (NTP)")
    return Finding("clock", "ok", shown)
