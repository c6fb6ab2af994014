"""Serving: OpenAI requests to tokens, by policy name, with one of two engines behind one HTTP contract.

`contract` describes the HTTP routes and `client` calls them; both import neither torch nor transformers. `server`
answers the routes. Behind it is `embedded`, which computes in the server's process, or `vllm`, which keeps vLLM
processes alive and forwards to them. `choice` picks one of the two for this machine. `guard` keeps web pages and
callers without a key out, `request_checks` refuses parameters that no engine here honours, `exact_route` adds exact
tokens.
"""

# pyright: reportUnusedImport=false
from __future__ import annotations

from typing import TYPE_CHECKING

from art_patch._lib.lazy import lazily

if TYPE_CHECKING:
    from art_patch.serving.choice import Choice, choose, share_out
    from art_patch.serving.client import EngineClient
    from art_patch.serving.contract import Engine, Served
    from art_patch.serving.embedded.engine import EmbeddedEngine
    from art_patch.serving.embedded.scheduler import EngineLimits
    from art_patch.serving.exact_route import exact_url
    from art_patch.serving.guard import PageGuard
    from art_patch.serving.request_checks import error_body
    from art_patch.serving.server import run_server
    from art_patch.serving.vllm.command import VllmOptions, check_extra, check_rank
    from art_patch.serving.vllm.engine import VllmEngine
    from art_patch.serving.vllm.environment import BUILD, Found, build, built, find_vllm, gpus, home_of
else:
    __getattr__ = lazily(
        __name__,
        {
            "choice": "Choice choose share_out",
            "client": "EngineClient",
            "contract": "Engine Served",
            "embedded.engine": "EmbeddedEngine",
            "embedded.scheduler": "EngineLimits",
            "exact_route": "exact_url",
            "guard": "PageGuard",
            "request_checks": "error_body",
            "server": "run_server",
            "vllm.command": "VllmOptions check_extra check_rank",
            "vllm.engine": "VllmEngine",
            "vllm.environment": "BUILD Found build built find_vllm gpus home_of",
        },
    )
