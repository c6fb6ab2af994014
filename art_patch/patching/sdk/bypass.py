"""Counts calls that known libraries send without the OpenAI SDK, and warns once for each way of sending, with a cure.

Some libraries have an HTTP or websocket client of their own beside the OpenAI SDK, so the patch of the SDK does not see
their calls. This module wraps the sending functions of such libraries when their modules are imported. The wrappers
only count. If one wrapped function calls another, this counts as one call. If a release of the library lacks a
function, it is skipped, and calls that would use it are not counted.

Also not counted are calls in mode `off`, calls inside `suppress()`, and calls that the library does send through the
SDK. Calls that an integration records (`record_call`) are not counted in mode `record`. In the other modes they are
counted, because they cannot be routed.
"""

import inspect
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any, NamedTuple

import wrapt

from art_patch._lib.faults import faults, logger
from art_patch.context import Passage, identify, passage_around, passing
from art_patch.patching.runtime import Runtime
from art_patch.patching.sdk.wrapping import Site


class Bypass(NamedTuple):
    """A package on PyPI, its model calls that the patch cannot see, and how to send them through the patched SDK."""

    package: str
    unseen: str
    cure: str


_OWN_SDK = "call the model through the OpenAI SDK and an OpenAI-compatible address, if it has one"

# The most likely come first.
# fmt: off
BYPASSES: tuple[Bypass, ...] = (
    Bypass("litellm", "litellm.responses(), and most providers but openai/ (hosted_vllm/, openrouter/, ...): its own "
           "HTTP client", "pass the address of `art-patch proxy` as api_base=, with openai/ before the model's name"),
    Bypass("dspy", "dspy.LM with its default engine: its own HTTP client",
           'dspy.LM(..., engine="litellm"), or pass the address of `art-patch proxy` as api_base='),
    Bypass("openai-agents", "the websocket transport of the Responses API, where it was switched on",
           'agents.set_default_openai_responses_transport("http")'),
    Bypass("pydantic-ai-slim", "the websocket transport of the Responses API, where it was switched on",
           "use the OpenAIResponsesModel over HTTP"),
    Bypass("websockets", "client.realtime.connect() and client.responses.connect() of the OpenAI SDK",
           "call client.responses.create() instead"),
    Bypass("portkey-ai", "all calls: it brings an OpenAI SDK of its own",
           "use OpenAI(base_url=...) with Portkey's address"),
    Bypass("anthropic", "all calls: an SDK of its own", "set ANTHROPIC_BASE_URL to the address of `art-patch proxy "
           "--upstream https://api.anthropic.com/v1`, without its /v1"),
    Bypass("google-genai", "all calls: an SDK of its own",
           'OpenAI(base_url="https://generativelanguage.googleapis.com/v1beta/openai/")'),
    Bypass("boto3", "calls to Bedrock: an SDK of its own", _OWN_SDK),
    Bypass("ollama", "all calls: an SDK of its own", 'OpenAI(base_url="http://127.0.0.1:11434/v1")'),
    Bypass("groq", "all calls: an SDK of its own", 'OpenAI(base_url="https://api.groq.com/openai/v1")'),
    Bypass("mistralai", "all calls: an SDK of its own", 'OpenAI(base_url="https://api.mistral.ai/v1")'),
    Bypass("together", "all calls: an SDK of its own", 'OpenAI(base_url="https://api.together.xyz/v1")'),
    Bypass("cohere", "all calls: an SDK of its own", _OWN_SDK),
    *(Bypass(name, "calls that a program sends by it: it is an HTTP client", "give the program the address of "
             "`art-patch proxy`; `art-patch run` says at the program's exit if it sent such calls")
      for name in ("requests", "aiohttp")),
)
# fmt: on


class Watched(NamedTuple):
    """A way to send calls without the OpenAI SDK, and the functions by which its use is counted."""

    name: str  # its name in `status().bypasses` and in the warning
    package: str  # the package's name in `BYPASSES`, which holds the cure
    module: str
    places: tuple[str, ...]  # the functions to wrap, as `Class.function`. Each call runs one of them, once
    # Returns whether the call of an object of that class, with these positional arguments, bypasses the SDK. Without
    # it, every call does.
    passes: Callable[..., bool] | None = None


def _leaves(client: Any, path: Any = "", *_: Any) -> bool:
    """Return whether Anthropic's SDK asks a model, on another machine, and so past a proxy on this one."""
    is_call = str(path).partition("?")[0].endswith("/messages")
    return is_call and client.base_url.host not in ("127.0.0.1", "::1", "localhost")


def _websocket(name: str, module: str, prefix: str) -> Watched:
    # The SDK defines `enter` as a second name of the same function, so both names are wrapped.
    names = ("{}.__enter__", "{}.enter", "Async{}.__aenter__", "Async{}.enter")
    return Watched(name, "websockets", module, tuple(name.format(f"{prefix}ConnectionManager") for name in names))


_LITELLM = "litellm.llms.custom_httpx.llm_http_handler"
# LiteLLM's modules that send through the SDK. `litellm.main` sends nothing: it mocks answers.
_OF_SDK = ("litellm.llms.openai.", "litellm.llms.azure.", "litellm.main")

# LiteLLM's call types whose answer a chat model writes. Embeddings, images and the like are not counted.
_OF_CHATS = frozenset(
    f"{prefix}{name}"
    for name in ("completion", "text_completion", "responses", "anthropic_messages", "generate_content")
    for prefix in ("", "a")
) | {"generate_content_stream", "agenerate_content_stream"}


def _passes_litellm(logging: Any, *_: Any) -> bool:
    """Return whether LiteLLM is about to send a request past the SDK that it has not announced before."""
    if getattr(logging, "call_type", None) not in _OF_CHATS or logging in _seen:
        return False
    # `Logging.pre_call` is told of every request, by the function that sends it, so only the module of that function
    # says how. LiteLLM has clients of its own for Anthropic, Gemini, Bedrock and others, more with each release.
    frame, sender = inspect.currentframe(), __name__
    while frame is not None and sender.startswith((__name__, "wrapt")):
        frame, sender = frame.f_back, str(frame.f_globals.get("__name__"))
    if sender.startswith(_OF_SDK):
        return False
    _seen.add(logging)
    return True


# LiteLLM's loggers, one for each call, that have announced their request: some functions announce it twice.
_seen: weakref.WeakSet[Any] = weakref.WeakSet()

WATCHED = (
    Watched("litellm", "litellm", _LITELLM, ("BaseLLMHTTPHandler.completion",)),
    Watched("litellm.responses", "litellm", _LITELLM, ("BaseLLMHTTPHandler.response_api_handler",)),
    Watched("litellm", "litellm", "litellm.litellm_core_utils.litellm_logging", ("Logging.pre_call",), _passes_litellm),
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
    # Not `Messages.create`: its warnings name the line of the app only if nothing stands between the two.
    Watched("anthropic", "anthropic", "anthropic._base_client", ("SyncAPIClient.post", "AsyncAPIClient.post"), _leaves),
    Watched(
        "google-genai",
        "google-genai",
        "google.genai.models",
        tuple(f"{kind}Models.generate_content{end}" for kind in ("", "Async") for end in ("", "_stream")),
    ),
    _websocket("openai responses websocket", "openai.resources.responses.responses", "Responses"),
    _websocket("openai realtime", "openai.resources.realtime.realtime", "Realtime"),
    _websocket("openai beta realtime", "openai.resources.beta.realtime.realtime", "Realtime"),
)


def cure_of(bypass: Watched) -> str:
    """Return the advice to the user that makes calls of a bypass go through the patched SDK."""
    return next(known.cure for known in BYPASSES if known.package == bypass.package)


class Detector:
    """Wraps the functions by which libraries bypass the OpenAI SDK, and counts their calls."""

    def __init__(self) -> None:
        self._runtime: Callable[[], Runtime | None] | None = None
        self._hooked = False
        self._sites: list[Site] = []
        self._lock = threading.RLock()
        self._seen: Counter[str] = Counter()

    @property
    def seen(self) -> Mapping[str, int]:
        """Number of calls by the name of the bypass."""
        with self._lock:
            return dict(self._seen)

    def clear(self) -> None:
        """Set all counts to zero, so that the next call warns again. For tests."""
        with self._lock:
            self._seen.clear()

    def put_on(self, runtime: Callable[[], Runtime | None]) -> None:
        """Wrap the functions now, or when their module is imported. `runtime()` is `None` while nothing is patched."""
        with self._lock:
            self._runtime = runtime
            for bypass in WATCHED:
                if not self._hooked:
                    wrapt.register_post_import_hook(partial(self._imported, bypass), bypass.module)
                elif bypass.module in sys.modules:
                    self._imported(bypass, sys.modules[bypass.module])
            self._hooked = True

    def take_off(self) -> None:
        """Restore the original functions. A wrapper that other code has wrapped again stays, and counts nothing."""
        with self._lock:
            self._runtime = None
            for site in tuple(self._sites):
                if site.restore():
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
            if not self._passes(bypass, of, args):
                return wrapped(*args, **kwargs)
            passage, sent = Passage(), None
            try:
                with passing(passage):
                    sent = wrapped(*args, **kwargs)
            finally:
                # A coroutine has sent nothing yet; it is counted when it is awaited.
                if not inspect.iscoroutine(sent):
                    self._count(bypass, recorded=passage.recorded)
            return self._awaited(bypass, passage, sent) if inspect.iscoroutine(sent) else sent

        wrapper: Any = wrapt.FunctionWrapper(original, sent_past_us)
        setattr(owner, name, wrapper)
        self._sites.append(Site(owner, name, original, wrapper))

    def _passes(self, bypass: Watched, of: Any, args: tuple[Any, ...]) -> bool:
        # One bypass calls another: LiteLLM's handler announces its request to LiteLLM's logger.
        if passage_around() is not None:
            return False
        try:
            return bypass.passes is None or bypass.passes(of, *args)
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
            # `using=False` below: a call that is only counted must not make its trajectory be stored.
            runtime = None if self._runtime is None else self._runtime()
            if runtime is None or runtime.target.mode == "off" or identify(using=False, call=True).suppressed:
                return
            if recorded and runtime.target.mode == "record":
                return
            with self._lock:
                self._seen[bypass.name] += 1
                first = self._seen[bypass.name] == 1
            if first:
                done = "recorded, but not routed" if recorded else "neither recorded nor routed"
                shown = (bypass.name, done, cure_of(bypass))
                logger.warning("art_patch: a call went past the patch (%s), %s: %s", *shown)
                runtime.report()  # a program without other calls may end before its next report
        except Exception as error:
            faults.fault("patching.bypass", error)


detector = Detector()
