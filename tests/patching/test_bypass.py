"""Calls that go past the patch are reported once for each bypass, counted, and otherwise left alone."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import openai
import pytest

from art_patch.context import suppress
from art_patch.patching import status, unpatch, wrap
from art_patch.patching.sdk.bypass import WATCHED, cure_of, detector

# The SDK opens its websockets in a way that newer `websockets` deprecate.
pytestmark = pytest.mark.filterwarnings("ignore:connect.. must be used:DeprecationWarning")

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def nothing_seen() -> Iterator[None]:
    detector.clear()
    yield
    detector.clear()


@pytest.fixture
def websocket_server() -> Iterator[str]:
    server = pytest.importorskip("websockets.sync.server", reason="websockets is not installed")

    def until_closed(connection: Any) -> None:
        for _ in connection:
            pass

    with server.serve(until_closed, "127.0.0.1", 0) as running:

        def serve() -> None:
            # A test that is skipped at once closes the socket before the loop has begun.
            with contextlib.suppress(OSError):
                running.serve_forever()

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{running.socket.getsockname()[1]}/v1"
        running.shutdown()
        thread.join()


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    ("bypass", "resource", "arguments"),
    [("openai responses websocket", "responses", {}), ("openai realtime", "realtime", {"model": "m"})],
)
def test_websockets(bench, caplog, websocket_server, bypass, resource, arguments):
    bench.patch()
    # openai 1 speaks TLS unless it is told the whole address.
    socket_url = websocket_server.replace("http", "ws", 1)
    urls: dict[str, Any] = {"api_key": "k", "base_url": websocket_server, "websocket_base_url": socket_url}

    async def run() -> None:
        async with openai.AsyncOpenAI(**urls) as client:
            async with getattr(client, resource).connect(**arguments):
                pass
            await (await getattr(client, resource).connect(**arguments).enter()).close()

    with openai.OpenAI(**urls) as client:
        if not hasattr(getattr(client, resource, None), "connect"):
            pytest.skip(f"openai {openai.__version__} has no {resource}.connect()")
        with getattr(client, resource).connect(**arguments):
            pass
        getattr(client, resource).connect(**arguments).enter().close()
    asyncio.run(run())
    assert status().bypasses == {bypass: 4}
    (told,) = warnings_in(caplog)
    assert bypass in told
    assert cure_of(next(each for each in WATCHED if each.name == bypass)) in told


@pytest.mark.parametrize("why", ["off", "suppress", "wrap", "unpatch"])
def test_where_it_does_not_matter(bench, client, caplog, websocket_server, why):
    bench.patch(mode="off" if why == "off" else "record")
    if why in ("unpatch", "wrap"):
        unpatch()
    if why == "wrap":
        wrap(client, mode="record", home=".")
    with openai.OpenAI(api_key="k", base_url=websocket_server) as other:
        if not hasattr(other.responses, "connect"):
            pytest.skip(f"openai {openai.__version__} has no responses.connect()")
        if why == "suppress":
            with suppress(), other.responses.connect():
                pass
        else:
            with other.responses.connect():
                pass
    assert status().bypasses == {}
    assert warnings_in(caplog) == []


def test_undone_by_identity(bench):
    from openai.resources.responses import responses

    manager = getattr(responses, "ResponsesConnectionManager", None)
    if manager is None:
        pytest.skip(f"openai {openai.__version__} has no websocket for Responses")
    originals = [manager.__dict__[name] for name in ("__enter__", "enter")]
    for _ in range(2):
        bench.patch()
        bench.patch()
        wrappers = [manager.__dict__[name] for name in ("__enter__", "enter")]
        assert [each.__wrapped__ for each in wrappers] == originals
        unpatch()
        assert [manager.__dict__[name] for name in ("__enter__", "enter")] == originals


def python(script: str, *args: str, path: Path | None = None) -> Any:
    """What the script prints last, as JSON."""
    command = [sys.executable, "-W", "ignore", "-c", script, *args]
    environment = {"PYTHONPATH": f"{path or ''}:{ROOT}", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "HOME": args[0]}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


STAND_IN = """
class LM15Engine:
    def complete(self, request): return [request, "whole"]
    def stream(self, request): yield request
class AsyncLM15Engine:
    async def complete(self, request): return [request, "async"]
"""

DSPY = """
import sys, json, logging, asyncio, inspect
import art_patch
logging.basicConfig()
art_patch.patch(mode="record", home=sys.argv[1])
assert "dspy" not in sys.modules
from dspy.clients.engines.lm15_engine import LM15Engine, AsyncLM15Engine
assert inspect.iscoroutinefunction(AsyncLM15Engine().complete)
assert inspect.isgeneratorfunction(LM15Engine().stream)
said = [LM15Engine().complete(1), list(LM15Engine().stream(2)), asyncio.run(AsyncLM15Engine().complete(3))]
print(json.dumps([said, dict(art_patch.status().bypasses)]))
"""


def test_a_library_that_is_imported_later_and_lacks_a_name(tmp_path):
    """A stand-in with dspy's names; `AsyncLM15Engine.stream` is missing."""
    package = tmp_path / "dspy/clients/engines"
    package.mkdir(parents=True)
    (package / "lm15_engine.py").write_text(STAND_IN)
    (said, seen), told = python(DSPY, str(tmp_path), path=tmp_path)
    assert said == [[1, "whole"], [2], [3, "async"]]
    assert seen == {"dspy": 3}
    assert told.count("\n") == 1
    assert 'engine="litellm"' in told


LITELLM = """
import sys, json, logging, asyncio, contextlib
import art_patch
from art_patch.patching.sdk import integrations
integrations.find_integrations = tuple  # without the one for litellm, which records these calls
home, url, order, responses = sys.argv[1:]
if order == "before":
    art_patch.patch(mode="record", home=home)
    assert "litellm" not in sys.modules
import litellm
if order == "after":
    art_patch.patch(mode="record", home=home)
told = []
handler = logging.Handler()
handler.emit = lambda record: told.append(record.getMessage())
logging.getLogger("art_patch").addHandler(handler)
ask = dict(messages=[{"role": "user", "content": "hi"}], api_base=url, api_key="k")

async def asynchronous(model):
    await litellm.acompletion(model=model, **ask)
    async for _ in await litellm.acompletion(model=model, stream=True, **ask):
        pass

def all_ways(model):
    litellm.completion(model=model, **ask)
    for _ in litellm.completion(model=model, stream=True, **ask):
        pass
    asyncio.run(asynchronous(model))
    return dict(art_patch.status().bypasses)

seen = [all_ways("openai/gpt-x"), all_ways("hosted_vllm/qwen")]
if responses == "responses":
    with contextlib.suppress(Exception):  # the server knows no Responses
        litellm.responses(model="openai/gpt-x", input="hi", api_base=url, api_key="k")
seen.append(dict(art_patch.status().bypasses))
with art_patch.suppress():
    litellm.completion(model="hosted_vllm/qwen", **ask)
assert dict(art_patch.status().bypasses) == seen[-1]
from litellm.llms.custom_httpx.llm_http_handler import BaseLLMHTTPHandler
wrapper = BaseLLMHTTPHandler.__dict__["completion"]
art_patch.flush()
recorded = art_patch.status().recorded
art_patch.unpatch()
assert BaseLLMHTTPHandler.__dict__["completion"] is wrapper.__wrapped__
print(json.dumps([seen, recorded, told]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("order", ["before", "after"])
def test_litellm(bench, tmp_path, order):
    if find_spec("litellm") is None:
        pytest.skip("litellm is not installed")
    (seen, recorded, told), _ = python(LITELLM, str(tmp_path), bench.upstream.url, order, "")
    assert seen == [{}, {"litellm": 4}, {"litellm": 4}]
    assert recorded == 4
    (line,) = told
    assert cure_of(WATCHED[0]) in line


@pytest.mark.slow
def test_litellm_responses(bench, tmp_path):
    for name in ("litellm", "mcp"):  # litellm.responses() imports mcp, and does not require it
        if find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
    (seen, _, told), _ = python(LITELLM, str(tmp_path), bench.upstream.url, "before", "responses")
    assert seen[-1] == {"litellm": 4, "litellm.responses": 1}
    assert len(told) == 2


def test_every_bypass_has_a_cure():
    assert len({(bypass.name, bypass.module) for bypass in WATCHED}) == len(WATCHED)
    assert all(cure_of(bypass) for bypass in WATCHED)
    assert all(place.count(".") == 1 for bypass in WATCHED for place in bypass.places)
