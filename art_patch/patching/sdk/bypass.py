"""Calls that go past the patch, as far as they can be seen: counted, and reported once for each bypass, with its cure.

Some libraries bring their own HTTP or websocket client beside the OpenAI SDK, so no patch of the SDK can see what goes
through it. Their functions are wrapped when their modules are imported, never before; the wrappers count and pass
through. Where one such function calls another, that is one call. A name that a release does not have is skipped: then
its calls are not seen, and nothing else happens. Not counted: with mode `off`, inside `suppress()`, what a library
sends through the SDK after all, and in mode `record` what an integration records (`context.own_calls`); in other modes
that is told, too, because nobody can route it.
"""

from __future__ import annotations

import inspect
import logging
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any, NamedTuple

import wrapt

from art_patch._lib.faults import faults
from art_patch.context import Passage, identify, is_passing, passing
from art_patch.patching.runtime import Runtime
from art_patch.patching.sdk.bypasses import BYPASSES

logger = logging.getLogger("art_patch")


class Watched(NamedTuple):
    """A bypass whose use can be seen.

    Attributes:
        name: as `status().bypasses` and the warning name it.
        package: its entry in the table of bypasses, which knows the cure.
        module: whose import brings it.
        places: `Class.function` in it; one call goes through one of them, once.
        passes: whether a call of that function, of this object, goes past the SDK; all do unless given.
    """

    name: str
    package: str
    module: str
    places: tuple[str, ...]
    passes: Callable[[Any], bool] | None = None


def _websocket(name: str, module: str, prefix: str) -> Watched:
    managers = (f"{prefix}ConnectionManager", f"Async{prefix}ConnectionManager")
    # `enter` is the same function under a second name, so both names are wrapped.
    names = (("__enter__", "enter"), ("__aenter__", "enter"))
    places = (f"{owner}.{place}" for owner, pair in zip(managers, names, strict=True) for place in pair)
    return Watched(name, "websockets", module, tuple(places))


_LITELLM = "litellm.llms.custom_httpx.llm_http_handler"
_OF_SDK = ("litellm.llms.openai.", "litellm.llms.azure.", "litellm.main")
"""LiteLLM's modules that ask through the SDK, and the one that asks nobody: it mocks answers."""

_OF_CHATS = frozenset(
    f"{prefix}{name}"
    for name in ("completion", "text_completion", "responses", "anthropic_messages", "generate_content")
    for prefix in ("", "a")
) | {"generate_content_stream", "agenerate_content_stream"}
"""LiteLLM's types of calls whose answer a chat model writes; embeddings, images and the like are none of ours."""


def _passes_litellm(logging: Any) -> bool:
    """Whether the request that LiteLLM is about to send goes past the SDK, and for the first time.

    `Logging.pre_call` is told of every request, by the function that sends it: only the place of that function says
    how. LiteLLM has a client of its own for Anthropic, for Gemini, for Bedrock, and for others, more with each release.
    """
    if getattr(logging, "call_type", None) not in _OF_CHATS or logging in _seen:
        return False
    frame, sender = inspect.currentframe(), __name__
    while frame is not None and sender.startswith((__name__, "wrapt")):
        frame, sender = frame.f_back, str(frame.f_globals.get("__name__"))
    if sender.startswith(_OF_SDK):
        return False
    _seen.add(logging)
    return True


_seen: weakref.WeakSet[Any] = weakref.WeakSet()
"""LiteLLM's loggers, one a call, that were told of their request: some functions tell twice."""

WATCHED = (
    Watched("litellm", "litellm", _LITELLM, ("BaseLLMHTTPHandler.completion",)),
    Watched("litellm.responses", "litellm", _LITELLM, ("BaseLLMHTTPHandler.response_api_handler",)),
    Watched(
        "litellm",
        "litellm",
        "litellm.litellm_core_utils.litellm_logging",
        ("Logging.pre_call",),
        passes=_passes_litellm,
    ),
    Watched(
        "dspy",
        "dspy",
        "dspy.clients.engines.lm15_engine",
        ("LM15Engine.complete", "LM15Engine.stream", "AsyncLM15Engine.complete", "AsyncLM15Engine.stream"),
    ),
    Watched(
        "openai-agents websocket",
        "openai-agents",
        "agents.models.openai_responses",
        ("OpenAIResponsesWSModel._fetch_response",),
    ),
    _websocket("openai responses websocket", "openai.resources.responses.responses", "Responses"),
    _websocket("openai realtime", "openai.resources.realtime.realtime", "Realtime"),
    _websocket("openai beta realtime", "openai.resources.beta.realtime.realtime", "Realtime"),
)
"""All that we can see."""


def cure_of(bypass: Watched) -> str:
    """Return the one line that brings the calls back."""
    return next(known.cure for known in BYPASSES if known.package == bypass.package)


class _Site(NamedTuple):
    owner: type
    name: str
    original: Any
    wrapper: Any


class Detector:
    """The wrappers, and what they have seen."""

    def __init__(self) -> None:
        """Wrap nothing, watch nothing."""
        self._runtime: Callable[[], Runtime | None] | None = None
        self._hooked = False
        self._sites: list[_Site] = []
        self._lock = threading.RLock()
        self._seen: Counter[str] = Counter()

    @property
    def seen(self) -> Mapping[str, int]:
        """How often each bypass was used."""
        with self._lock:
            return dict(self._seen)

    def clear(self) -> None:
        """Forget what was seen, so that the next one is told again; used by tests."""
        with self._lock:
            self._seen.clear()

    def put_on(self, runtime: Callable[[], Runtime | None]) -> None:
        """Watch the bypasses of what is imported, and of what will be; `runtime` tells whose calls they would be."""
        with self._lock:
            self._runtime = runtime
            for bypass in WATCHED:
                if not self._hooked:
                    wrapt.register_post_import_hook(partial(self._imported, bypass), bypass.module)
                elif bypass.module in sys.modules:
                    self._imported(bypass, sys.modules[bypass.module])
            self._hooked = True

    def take_off(self) -> None:
        """Restore the original functions, wherever nobody has wrapped over ours."""
        with self._lock:
            self._runtime = None
            for site in tuple(self._sites):
                if site.owner.__dict__.get(site.name) is site.wrapper:
                    setattr(site.owner, site.name, site.original)
                    self._sites.remove(site)

    def _imported(self, bypass: Watched, module: Any) -> None:
        with self._lock:
            if self._runtime is None:
                return
            for place in bypass.places:
                try:
                    self._wrap(bypass, module, *place.split("."))
                except Exception as error:
                    faults.trouble("patching.bypass", error)

    def _wrap(self, bypass: Watched, module: Any, owner_name: str, name: str) -> None:
        owner = getattr(module, owner_name, None)
        if not isinstance(owner, type) or name not in owner.__dict__:
            return
        if any(site.owner is owner and site.name == name for site in self._sites):
            return
        original = owner.__dict__[name]

        def sent_past_us(wrapped: Callable[..., Any], of: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if not self._passes(bypass, of):
                return wrapped(*args, **kwargs)
            passage = Passage()
            try:
                with passing(passage):
                    sent = wrapped(*args, **kwargs)
            except BaseException:
                self._count(bypass, recorded=passage.recorded)
                raise
            if inspect.iscoroutine(sent):
                return self._awaited(bypass, passage, sent)
            self._count(bypass, recorded=passage.recorded)
            return sent

        wrapper: Any = wrapt.FunctionWrapper(original, sent_past_us)
        setattr(owner, name, wrapper)
        self._sites.append(_Site(owner, name, original, wrapper))

    def _passes(self, bypass: Watched, of: Any) -> bool:
        if is_passing():
            return False
        try:
            return bypass.passes is None or bypass.passes(of)
        except Exception as error:
            faults.fault("patching.bypass", error)
            return False

    async def _awaited(self, bypass: Watched, passage: Passage, sent: Coroutine[Any, Any, Any]) -> Any:
        try:
            with passing(passage):
                return await sent
        finally:
            self._count(bypass, recorded=passage.recorded)

    def _count(self, bypass: Watched, *, recorded: bool) -> None:
        try:
            runtime = None if self._runtime is None else self._runtime()
            if runtime is None or runtime.target.mode == "off" or identify(using=False, call=True).suppressed:
                return
            if recorded and runtime.target.mode == "record":
                return
            with self._lock:
                self._seen[bypass.name] += 1
                first = self._seen[bypass.name] == 1
            if first:
                logger.warning(
                    "art_patch: a call went past the patch (%s), %s: %s",
                    bypass.name,
                    "recorded, but not routed" if recorded else "neither recorded nor routed",
                    cure_of(bypass),
                )
        except Exception as error:
            faults.fault("patching.bypass", error)


detector = Detector()
"""The process's own."""


def bypasses_seen() -> Mapping[str, int]:
    """Return how often each bypass past the patch was used."""
    return detector.seen
