"""Decides which requests of the SDK are patched: by their path (the surface), and by the app's own `match`.

So `create`, `parse`, `stream`, raw responses and plain `client.post` are treated alike, and requests to other paths are
not changed or recorded. The engine only answers chat completions; other surfaces are translated or go upstream.
"""

import fnmatch
import re
from collections.abc import Callable, Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Any, cast

from art_patch._lib.faults import faults
from art_patch.patching.rewriting.engine_request import to_engine_request, translated, why_not_routed
from art_patch.patching.rewriting.response_rewriter import ResponseRewriter
from art_patch.patching.routing.target import Target
from art_patch.settings import Match, Settings
from art_patch.types import Api


class Chat:
    """Chat completions, the API that the engine has. The other surfaces derive from this class. It has no state."""

    api: Api = "chat"
    needs_model = True

    def why_not_routed(self, options: Any, stream: bool, settings: Settings) -> str | None:
        """Return the reason why the engine cannot answer this call; `None` if it can."""
        return why_not_routed(options, stream)

    def to_engine_request(self, options: Any, target: Target, client: Any) -> Any:
        """Return the request options for the engine. `options` itself stays unchanged, for upstream."""
        return to_engine_request(options, target, client)

    def rewriter(self, options: Any, local: Any) -> ResponseRewriter:
        """Return the rewriter for the engine's answer to `local`, the request options made from `options`."""
        body, given = local.json_data, options.json_data
        extra: Any = getattr(options, "extra_json", None) or {}
        return ResponseRewriter(
            policy=body["model"],
            requested_model=given["model"],
            n=body.get("n") or 1,
            keeps_logprobs=bool(given.get("logprobs") or extra.get("logprobs")),
            keeps_token_ids=bool(extra.get("return_token_ids") or given.get("return_token_ids")),
        )


class Completions(Chat):
    """Legacy completions. They are recorded and never routed."""

    api = "completions"

    def why_not_routed(self, options: Any, stream: bool, settings: Settings) -> str | None:
        """Return the reason why no completion is routed: the engine's chat template would change its prompt."""
        return "a completion prompt is not a chat"


class Translated(Chat):
    """An API whose calls become chat completions if that loses nothing. A module of `rewriting` does it."""

    def __init__(self, api: Api, module: str, *, needs_model: bool = True) -> None:
        self.api, self.needs_model, self._module = api, needs_model, f"art_patch.patching.rewriting.{module}"

    def why_not_routed(self, options: Any, stream: bool, settings: Settings) -> str | None:
        """Return why this call cannot be translated; `None` if it can."""
        # Imported by the first call that needs it, so that `patch()` is spared it.
        return import_module(self._module).why_not_routed(options, stream, settings)

    def to_engine_request(self, options: Any, target: Target, client: Any) -> Any:
        """Return the request options of a chat completion, translated from this call."""
        return translated(options, target, client, import_module(self._module).read_request)

    def rewriter(self, options: Any, local: Any) -> ResponseRewriter:
        """Return a rewriter that turns the engine's chat answer into one of this API."""
        return import_module(self._module).rewriter(options, local)


_BY_PATH: dict[str, Chat] = {
    "chat/completions": Chat(),
    "completions": Completions(),
    "messages": Translated("messages", "messages"),  # Anthropic's, for callers of the proxy
    "responses": Translated("responses", "responses_request", needs_model=False),  # a `prompt` template may name it
}
# The path as the SDK writes it, so that nearly every call is found without splitting its address.
_BY_URL: dict[str, Chat] = {f"/{path}": surface for path, surface in _BY_PATH.items()}


def surface_of(options: Any) -> Chat | None:
    """Return the surface of a request; `None` if the patch does not handle its path, method or body."""
    url = options.url
    surface = _BY_URL.get(url) or _BY_PATH.get(url.partition("?")[0].strip("/"))
    if surface is None:
        return None
    body = options.json_data
    if options.method.lower() != "post" or not isinstance(body, dict):
        return None
    model = cast("dict[str, Any]", body).get("model")
    return surface if isinstance(model, str) or (model is None and not surface.needs_model) else None


def compile_match(match: Match) -> Callable[[Mapping[str, Any]], bool] | None:
    """Return a function that says whether a request body matches `match`; `None` if every call does.

    A pattern is compared with the model's name: a glob must match the whole name, `re:EXPRESSION` any part of it.
    """
    if match is None:
        return None
    if isinstance(match, str):
        match = re.compile(match[3:] if match.startswith("re:") else fnmatch.translate(match))
    if isinstance(match, re.Pattern):
        search = match.search
        return lambda body: search(cast("str", body.get("model") or "")) is not None
    chooses = match

    def ask(body: Mapping[str, Any]) -> bool:
        try:
            return bool(chooses(MappingProxyType(cast("dict[str, Any]", body))))
        except Exception as error:  # the user's function failed, so the call is left alone
            faults.trouble("match", error)
            return False

    return ask
