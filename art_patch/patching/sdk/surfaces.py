"""The surfaces of the SDK that are recorded, by path: what may be routed, how it is sent, how the answer is rewritten.

By path, so that `create`, `parse`, `stream`, raw responses and plain `client.post` are all the same. Everything else
(embeddings, files, `/responses/compact`, `/responses/ID/cancel`) passes through untouched. The champion is only ever
asked for a chat completion; a surface that is not chat translates, and then only if nothing is lost, or stays
upstream. What translates is imported by the first call that needs it.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, cast

from art_patch._lib.faults import faults
from art_patch.patching.rewriting.engine_request import to_engine_request, why_not_routed
from art_patch.patching.rewriting.response_rewriter import ResponseRewriter
from art_patch.patching.routing.target import Target
from art_patch.settings import Match, Settings
from art_patch.types import Api


class Surface:
    """One surface; stateless. `to_engine_request` and `rewriter` are only called for what may be routed."""

    api: ClassVar[Api]
    needs_model: ClassVar[bool] = True

    def why_not_routed(self, options: Any, stream: bool, settings: Settings) -> str | None:
        """Return why the champion cannot answer this call; `None` if it can."""
        raise NotImplementedError

    def to_engine_request(self, options: Any, target: Target, client: Any) -> Any:
        """Return the request options for the champion; `options` itself is what upstream will get."""
        raise NotImplementedError

    def rewriter(self, options: Any, local: Any) -> ResponseRewriter:
        """Return what checks and rewrites the answer to the request options `local`, made from `options`."""
        raise NotImplementedError


class Chat(Surface):
    """Chat completions, the engine's own tongue."""

    api = "chat"

    def why_not_routed(self, options: Any, stream: bool, settings: Settings) -> str | None:
        """See `eligible`."""
        return why_not_routed(options, stream)

    def to_engine_request(self, options: Any, target: Target, client: Any) -> Any:
        """See `local_request`."""
        return to_engine_request(options, target, client)

    def rewriter(self, options: Any, local: Any) -> ResponseRewriter:
        """See `rewriter`."""
        body, given = local.json_data, options.json_data
        extra: Any = getattr(options, "extra_json", None) or {}
        return ResponseRewriter(
            policy=body["model"],
            requested_model=given["model"],
            n=body.get("n") or 1,
            keeps_logprobs=bool(given.get("logprobs") or extra.get("logprobs")),
            keeps_token_ids=bool(extra.get("return_token_ids") or given.get("return_token_ids")),
        )


class Completions(Surface):
    """Legacy completions: recorded only."""

    api = "completions"

    def why_not_routed(self, options: Any, stream: bool, settings: Settings) -> str | None:
        """A completion prompt is continued as it stands; a chat template would make another prompt of it."""
        return "a completion prompt is not a chat"


class Responses(Surface):
    """The Responses API, translated to chat where nothing is lost."""

    api = "responses"
    needs_model = False  # a `prompt` template may name it

    def why_not_routed(self, options: Any, stream: bool, settings: Settings) -> str | None:
        """See `responses_request`."""
        from art_patch.patching.rewriting.responses_request import why_not_routed

        return why_not_routed(options, stream, stateless=settings.stateless_responses)

    def to_engine_request(self, options: Any, target: Target, client: Any) -> Any:
        """See `responses_request`."""
        from art_patch.patching.rewriting.responses_request import to_engine_request

        return to_engine_request(options, target, client)

    def rewriter(self, options: Any, local: Any) -> ResponseRewriter:
        """See `responses_rewriter`."""
        from art_patch.patching.rewriting.responses_rewriter import rewriter

        return rewriter(options, local)


_BY_PATH: dict[str, Surface] = {
    "chat/completions": Chat(),
    "completions": Completions(),
    "responses": Responses(),
}
_BY_URL: dict[str, Surface] = {f"/{path}": surface for path, surface in _BY_PATH.items()}
"""As the SDK itself writes it; saves taking the address apart."""


def surface_of(options: Any) -> Surface | None:
    """Return the surface that a request goes to; `None` if it is none of ours."""
    url = options.url
    surface = _BY_URL.get(url) or _BY_PATH.get(url.partition("?")[0].strip("/"))
    if surface is None:
        return None
    body = options.json_data
    if options.method.lower() != "post" or not isinstance(body, dict):
        return None
    model = cast(dict[str, Any], body).get("model")
    return surface if isinstance(model, str) or (model is None and not surface.needs_model) else None


Matches = Callable[[Mapping[str, Any]], bool]


def compile_match(match: Match) -> Matches | None:
    """Return the question that a request's body answers; `None` if every call is ours.

    A pattern looks at the model that the app asks for: a glob must fit the whole name, an expression any part of it.
    """
    if match is None:
        return None
    if isinstance(match, str):
        glob = not match.startswith("re:")
        match = re.compile(fnmatch.translate(match) if glob else match[3:])
    if isinstance(match, re.Pattern):
        search = match.search
        return lambda body: search(cast(str, body.get("model") or "")) is not None
    chooses = match

    def ask(body: Mapping[str, Any]) -> bool:
        try:
            return bool(chooses(MappingProxyType(cast(dict[str, Any], body))))
        except Exception as error:  # the user's function; what it cannot judge is left alone
            faults.trouble("match", error)
            return False

    return ask
