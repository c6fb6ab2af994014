"""Serving: an engine answers OpenAI chat requests with the tokens of the policy that the request names.

There are two engines behind one HTTP contract. `contract` describes the HTTP routes and has the client that calls them,
without torch or transformers. `server` answers the routes. It hands each request to `embedded`, which runs the model in
the server's own process, or to `vllm`, which keeps vLLM processes alive and forwards requests to them.
"""

from art_patch._lib.lazy import TYPE_CHECKING, lazily

if TYPE_CHECKING:
    from art_patch.serving.contract import EngineClient, exact_url
    from art_patch.serving.embedded.engine import EmbeddedEngine
    from art_patch.serving.embedded.scheduler import EngineLimits
    from art_patch.serving.request_checks import POLICY
    from art_patch.serving.server import Served, run_server
    from art_patch.serving.vllm.engine import VllmEngine
    from art_patch.serving.vllm.environment import (
        BUILD, Choice, Found, build, built, choose, find_vllm, gpus, home_of, share_out,
    )
    from art_patch.serving.vllm.process import LORAS_AT_ONCE, VllmOptions, check_extra, check_rank
else:
    __getattr__ = lazily()
