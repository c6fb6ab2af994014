"""Every way to call the SDK, before and after the patch: same types, same values, same bytes, one whole record.

Two tables. `SHAPES` are calls: what is asked of a client. `DOORS` are clients and what hangs on them: made before or
after the patch, of every kind. Each is run without the patch and then with it, synchronously and asynchronously, in
modes `record` and `route`. What the installed SDK does not have is skipped, and says so.

A shape is written once, as a coroutine. The synchronous run drives it by hand: nothing in it ever waits.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import importlib.util
import inspect
import json
import threading
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel

from tests.support.patched_sdk import CHAMPION
from tests.support.sdk_samples import ASK, LOCAL, LOCAL_BODY, TOOLS, UPSTREAM, settled, streamed
from tests.support.servers import Answer, ReceivedRequest, chunks, completion, response, response_items

SDK = f"openai {openai.__version__}"
MODES = pytest.mark.parametrize("mode", ["record", "route"])
SIDES = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])


PATIENCE = {"timeout_s": 20.0, "first_token_timeout_s": 20.0, "connect_timeout_s": 20.0}
"""Deadlines have their own tests; here a busy machine must not look like an engine that fails."""


class Wire(bytes):
    """Bytes as the server sent them; a champion's answer is written anew and only says the same."""


class Sky(BaseModel):
    colour: str


class World:
    """One run of a shape: who is called, synchronously or not, and what must be closed afterwards."""

    def __init__(self, bench: Any, asynchronous: bool) -> None:
        self.bench = bench
        self.asynchronous = asynchronous
        self._open: list[Any] = []

    def client(self, kind: type | None = None, **options: Any) -> Any:
        """A client of upstream."""
        kind = kind or (openai.AsyncOpenAI if self.asynchronous else openai.OpenAI)
        given = {"api_key": "sk-upstream-secret", "base_url": self.bench.upstream.url, "max_retries": 0}
        return self.keep(kind(**given | options))

    def keep(self, client: Any) -> Any:
        """Close `client` at the end."""
        self._open.append(client)
        return client

    def run(self, body: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """Run a coroutine on this side of the SDK."""

        async def whole() -> Any:
            try:
                return await body()
            finally:
                gc.collect()  # streams that the shape dropped are closed while their connection still is there
                if self.asynchronous:
                    await asyncio.sleep(0.01)
                for client in self._open:
                    await now(client.close() if hasattr(client, "close") else client.aclose())

        if self.asynchronous:
            return asyncio.run(whole())
        coroutine = whole()
        try:
            coroutine.send(None)
        except StopIteration as stop:
            return stop.value
        raise AssertionError("a synchronous shape waited")


async def now(value: Any) -> Any:
    """The value, or what it becomes."""
    return await value if isinstance(value, Awaitable) else value


async def every(stream: Any) -> list[Any]:
    """All that a stream or page brings."""
    return [item async for item in stream] if hasattr(stream, "__aiter__") else list(stream)


async def inside(manager: Any, body: Callable[[Any], Awaitable[Any]]) -> Any:
    """`with manager as value: return body(value)`."""
    if hasattr(manager, "__aenter__"):
        async with manager as value:
            return await body(value)
    with manager as value:
        return await body(value)


def find(client: Any, path: str) -> Any:
    """The attribute of the client, or a skipped test."""
    for name in path.split("."):
        if not hasattr(client, name):
            pytest.skip(f"{SDK} has no {path}")
        client = getattr(client, name)
    return client


# What is asked.

Body = Callable[[World, Any], Coroutine[Any, Any, Any]]


RESPOND: dict[str, Any] = {"model": "gpt-x", "input": "hi", "store": False}
CONTINUE: dict[str, Any] = {"model": "gpt-x", "prompt": "hi"}


def question(path: str) -> dict[str, Any]:
    """The same question in the words of each surface."""
    return RESPOND if "responses" in path else CONTINUE if path.startswith("completions") else ASK


def create(path: str = "chat.completions.create", **arguments: Any) -> Body:
    async def call(world: World, client: Any) -> Any:
        return await result_of(find(client, path), **{**question(path), **arguments})

    return call


async def result_of(function: Callable[..., Any], **arguments: Any) -> list[Any]:
    """What a `create` gives, a stream read to its end."""
    result = await now(function(**arguments))
    return [result, *await every(result)] if isinstance(result, openai.Stream | openai.AsyncStream) else [result]


def helper(path: str, **arguments: Any) -> Body:
    """The `.stream()` helpers: a context manager that makes events out of chunks, and the whole answer in the end."""

    async def call(world: World, client: Any) -> Any:
        async def read(stream: Any) -> list[Any]:
            events = await every(stream)
            final = stream.get_final_completion if "chat" in path else stream.get_final_response
            return [type(stream), *events, await now(final())]

        return await inside(find(client, path)(**{**question(path), **arguments}), read)

    return call


def raw(path: str = "chat.completions.with_raw_response.create", **arguments: Any) -> Body:
    async def call(world: World, client: Any) -> Any:
        response = await now(find(client, path)(**{**question(path), **arguments}))
        head = [type(response), response.status_code, type(response.http_response), sorted(response.headers.keys())]
        parsed = await now(response.parse())
        assert await now(response.parse()) is parsed
        if arguments.get("stream"):
            return [*head, parsed, *await every(parsed)]
        assert int(response.headers["content-length"]) == len(response.content)
        return [*head, parsed, Wire(response.content), Wire(response.http_response.read())]

    return call


def unread(path: str = "chat.completions.with_streaming_response.create", read: str = "read", **arguments: Any) -> Body:
    """`with_streaming_response`: the app reads the body itself."""

    async def call(world: World, client: Any) -> Any:
        async def body(response: Any) -> list[Any]:
            head = [type(response), response.status_code, type(response.http_response)]
            method = getattr(response, read)
            if read == "parse":
                parsed = await now(method())
                return [*head, parsed, *(await every(parsed) if arguments.get("stream") else ())]
            if read == "iter_bytes":
                return [*head, Wire(b"".join(await every(method())))]
            if read == "iter_lines":
                return [*head, Wire("\n".join(await every(method())).encode())]
            return [*head, Wire(await now(method()))]

        return await inside(find(client, path)(**{**question(path), **arguments}), body)

    return call


def post(path: str = "/chat/completions", **options: Any) -> Body:
    async def call(world: World, client: Any) -> Any:
        if options.get("stream"):
            kind = openai.AsyncStream if world.asynchronous else openai.Stream
            extra = {"stream": True, "stream_cls": kind[ChatCompletionChunk]}
            return await result_of(client.post, path=path, body=ASK | {"stream": True}, cast_to=ChatCompletion, **extra)
        return await result_of(client.post, path=path, body=ASK, cast_to=ChatCompletion)

    return call


def says(content: str) -> Callable[[Any], Answer]:
    return lambda body: Answer(body=json.dumps(completion(body, content=content)).encode())


def responds(content: str) -> Callable[[Any], Answer]:
    def answer(body: Any) -> Answer:
        if body is LOCAL_BODY:  # the champion is asked for a chat completion
            return says(content)(body)
        (item,) = response_items(RESPOND)
        item["content"][0]["text"] = content
        return Answer(body=json.dumps(response(RESPOND, output=[item])).encode())

    return answer


BLUE = '{"colour": "blue"}'


@dataclass(frozen=True)
class Shape:
    """A call.

    Attributes:
        call: makes it; what it returns is compared.
        api: surface in the record.
        n: choices in the record.
        stream: it is streamed.
        usage: upstream is asked for the usage, although it is streamed.
        answer: what the server says instead of the usual.
        routed: the champion is asked in mode `route`.
        whole: the record is as in the samples to the last field.
    """

    call: Body
    api: str = "chat"
    n: int = 1
    stream: bool = False
    usage: bool = False
    answer: Callable[[Any], Answer] | None = None
    routed: bool = True
    whole: bool = True

    @property
    def but(self) -> frozenset[str]:
        """The fields by which the champion's answer may differ."""
        return MADE_UP if self.api == "responses" else FINGERPRINT


RAW = "chat.completions.with_raw_response."
BETA = "beta.chat.completions."

SHAPES: dict[str, Shape] = {
    "create": Shape(create()),
    "create n=2": Shape(create(n=2), n=2, whole=False),
    "create tools": Shape(create(tools=TOOLS), whole=False),
    "create tools n=2": Shape(create(tools=TOOLS, n=2), n=2, whole=False),
    "create stream=False": Shape(create(stream=False)),
    "create with extras": Shape(create(extra_headers={"X-A": "b"}, extra_query={"c": "d"}, timeout=9.0)),
    "stream": Shape(create(stream=True), stream=True),
    "stream n=2": Shape(create(stream=True, n=2), n=2, stream=True, whole=False),
    "stream tools n=2": Shape(create(stream=True, tools=TOOLS, n=2), n=2, stream=True, whole=False),
    "stream with usage": Shape(create(stream=True, stream_options={"include_usage": True}), stream=True, usage=True),
    "parse": Shape(create("chat.completions.parse", response_format=Sky), answer=says(BLUE), whole=False),
    "beta parse": Shape(create(BETA + "parse", response_format=Sky), answer=says(BLUE), whole=False),
    "stream helper": Shape(helper("chat.completions.stream"), stream=True),
    "beta stream helper": Shape(helper(BETA + "stream"), stream=True),
    "raw": Shape(raw()),
    "raw stream": Shape(raw(stream=True), stream=True),
    "raw parse": Shape(raw(RAW + "parse", response_format=Sky), answer=says(BLUE), whole=False),
    "raw beta parse": Shape(raw(BETA + "with_raw_response.parse", response_format=Sky), answer=says(BLUE), whole=False),
    # Handed out unread, so that its bytes could not be checked first: recorded, and left to upstream.
    "streaming response read": Shape(unread(read="read"), routed=False),
    "streaming response iter_bytes": Shape(unread(read="iter_bytes"), routed=False),
    "streaming response iter_lines": Shape(unread(read="iter_lines"), routed=False),
    "streaming response parse": Shape(unread(read="parse"), routed=False),
    "streaming response stream, bytes": Shape(unread(read="iter_bytes", stream=True), stream=True),
    "streaming response stream, lines": Shape(unread(read="iter_lines", stream=True), stream=True),
    "streaming response stream, parse": Shape(unread(read="parse", stream=True), stream=True),
    "completions": Shape(create("completions.create"), api="completions", routed=False),
    "completions n=2": Shape(create("completions.create", n=2), api="completions", n=2, routed=False, whole=False),
    "completions stream": Shape(
        create("completions.create", stream=True), api="completions", stream=True, routed=False
    ),
    "completions raw": Shape(raw("completions.with_raw_response.create"), api="completions", routed=False),
    "responses": Shape(create("responses.create"), api="responses"),
    "responses stored": Shape(create("responses.create", store=True), api="responses", routed=False),
    "responses stream": Shape(create("responses.create", stream=True), api="responses", stream=True, usage=True),
    "responses parse": Shape(
        create("responses.parse", text_format=Sky), api="responses", answer=responds(BLUE), whole=False
    ),
    "responses stream helper": Shape(helper("responses.stream"), api="responses", stream=True, usage=True),
    "responses raw": Shape(raw("responses.with_raw_response.create"), api="responses"),
    "responses raw stream": Shape(
        raw("responses.with_raw_response.create", stream=True), api="responses", stream=True, usage=True
    ),
    "responses, streaming response": Shape(
        unread("responses.with_streaming_response.create"), api="responses", routed=False
    ),
    "post": Shape(post()),
    "post with a query": Shape(post("/chat/completions?a=b")),
    "post stream": Shape(post(stream=True), stream=True),
}


@MODES
@SIDES
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_shape(bench, shape, asynchronous, mode):
    async def call(world: World, client: Any) -> Any:
        return await shape.call(world, client)

    compare(bench, asynchronous, mode, shape, call, World.client)


def compare(
    bench: Any,
    asynchronous: bool,
    mode: str,
    shape: Shape,
    call: Callable[[World, Any], Awaitable[list[Any]]],
    make: Callable[[World], Any],
    before: bool = False,
) -> None:
    """Call without the patch and with it, and look for differences.

    Args:
        bench: the patch and the servers.
        asynchronous: side of the SDK.
        mode: of the patch.
        shape: what is expected.
        call: makes the call with what `make` made; returns all that it got.
        make: makes a client, or what stands for one.
        before: what was made, and used, before the patch is used again.
    """
    routed = mode == "route" and shape.routed
    world = World(bench, asynchronous)

    async def both() -> tuple[list[Any], Any, list[Any]]:
        if shape.answer is not None:
            bench.upstream.will(shape.answer(ASK))
        made = make(world)
        plain = await call(world, made)
        (asked,) = bench.upstream.seen
        bench.upstream.seen.clear()
        bench.patch(mode=mode, **PATIENCE)
        if shape.answer is not None:
            server, body = (bench.local, LOCAL_BODY) if routed else (bench.upstream, ASK)
            server.will(shape.answer(body))
        return plain, asked, await call(world, made if before else make(world))

    plain, asked, ours = world.run(both)
    same(ours, plain, shape.but if routed else frozenset())
    check_requests(bench, asked, routed)
    check_record(bench, shape, routed)


FINGERPRINT = frozenset({"system_fingerprint"})
"""By which a champion's chat completion may be told."""

MADE_UP = FINGERPRINT | {
    *("id", "item_id", "created_at"),
    *("background", "max_output_tokens", "max_tool_calls", "metadata", "previous_response_id", "prompt_cache_key"),
    *("reasoning", "safety_identifier", "service_tier", "store", "temperature", "top_logprobs", "top_p", "truncation"),
    *("user", "format"),
}
"""What a response that was made of a chat completion has anew, or has although the test's upstream leaves it out."""


def same(ours: Any, plain: Any, but: frozenset[str] = frozenset()) -> None:
    """Same types, same values, but for the fields named `but`; same bytes too if that is none."""
    assert [look(value, but) for value in ours] == [look(value, but) for value in plain]


def look(value: Any, but: frozenset[str]) -> Any:
    """What the app can tell about a value."""
    if isinstance(value, openai.Stream | openai.AsyncStream):
        return type(value), type(value.response), type(value._client)
    if isinstance(value, BaseModel):
        return type(value), without(but, value.model_dump(exclude_unset=True, warnings=False))
    if isinstance(value, Wire) and but:
        lines = [line.removeprefix(b"data: ") for line in value.splitlines() if line]
        return [without(but, json.loads(line)) if line.startswith(b"{") else line for line in lines]
    return type(value), value


def without(but: frozenset[str], value: Any) -> Any:
    if isinstance(value, dict):
        assert not but or value.get("system_fingerprint") in (None, CHAMPION)
        return {key: without(but, inner) for key, inner in value.items() if key not in but}
    return [without(but, inner) for inner in value] if isinstance(value, list) else value


def check_requests(bench: Any, asked: ReceivedRequest, routed: bool) -> None:
    """One request, and to upstream the very same one."""
    (seen,) = bench.local.seen if routed else bench.upstream.seen
    assert not (bench.upstream.seen if routed else bench.local.seen)
    if routed:
        assert seen.path == "/v1/chat/completions"
    else:
        assert seen == asked


def check_record(bench: Any, shape: Shape, routed: bool) -> None:
    """One record, with all choices."""
    call = bench.sink.call
    expected = replace(LOCAL if routed else UPSTREAM, api=shape.api)
    if shape.api == "completions":
        expected = replace(expected, untrainable="a completion is not a chat")
    elif routed and "response_format" in call.params:
        expected = replace(expected, untrainable="response_format constrains the answer")
    if shape.stream or (shape.api != "chat" and not routed):  # only a whole chat completion tells of a refusal
        expected = streamed(expected)
    if shape.stream and not shape.usage and not routed:
        expected = replace(expected, prompt_tokens=0, completion_tokens=0)
    for field in ("api", "status", "policy", "fallback", "requested_model", "untrainable", "messages"):
        assert getattr(call, field) == getattr(expected, field)
    assert [choice.index for choice in call.choices] == list(range(shape.n))
    for choice in call.choices:
        assert choice.finish_reason in ("stop", "tool_calls")
        assert choice.message.get("content") or choice.message.get("tool_calls")
        assert (choice.token_ids is not None) is routed
    if shape.whole:
        assert settled(call) == expected


# Who is asked.


def through(client: Any) -> Callable[..., Any]:
    """Look everything up at the time of the call."""
    return lambda **arguments: client.chat.completions.create(**arguments)


class Mine(openai.OpenAI):
    def request(self, *args: Any, **kwargs: Any) -> Any:
        return super().request(*args, **kwargs)


class AsyncMine(openai.AsyncOpenAI):
    async def request(self, *args: Any, **kwargs: Any) -> Any:
        return await super().request(*args, **kwargs)


def subclass(world: World) -> Callable[..., Any]:
    return through(world.client(AsyncMine if world.asynchronous else Mine))


def azure(world: World, **options: Any) -> Callable[..., Any]:
    kind = openai.AsyncAzureOpenAI if world.asynchronous else openai.AzureOpenAI
    place = {"base_url": None, "azure_endpoint": world.bench.upstream.url, "api_version": "2024-06-01"}
    return through(world.client(kind, **place | options))


def callable_key(world: World) -> Callable[..., Any]:
    async def key() -> str:
        return "sk-upstream-secret"

    if "Callable" not in str(inspect.signature(openai.OpenAI.__init__).parameters["api_key"].annotation):
        pytest.skip(f"{SDK} takes no function for a key")
    return through(world.client(api_key=key if world.asynchronous else lambda: "sk-upstream-secret"))


def module_level(world: World) -> Callable[..., Any]:
    openai._reset_client()
    openai.http_client = None  # the module's client keeps it here
    openai.api_key, openai.base_url = "sk-upstream-secret", world.bench.upstream.url
    openai.max_retries = 0

    world.keep(_Module())
    return through(openai)


class _Module:
    def close(self) -> None:
        if openai.api_key is not None:
            openai._load_client().close()
            openai._reset_client()
            openai.api_key = openai.base_url = openai.http_client = None


def bound_raw(world: World) -> Callable[..., Any]:
    raw = world.client().chat.completions.with_raw_response
    if not world.asynchronous:
        return lambda **arguments: raw.create(**arguments).parse()

    async def create(**arguments: Any) -> Any:
        return await now((await raw.create(**arguments)).parse())

    return create


def library(name: str) -> Any:
    """httpx or httpx2, or a skipped test."""
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    return importlib.import_module(name)


def with_http_client(world: World, http_client: Any) -> Callable[..., Any]:
    try:
        return through(world.client(http_client=world.keep(http_client)))
    except TypeError as error:
        pytest.skip(f"{SDK}: {str(error).partition('`; ')[0]}")


def own_http_client(name: str) -> Callable[[World], Callable[..., Any]]:
    def make(world: World) -> Callable[..., Any]:
        http = library(name)
        return with_http_client(world, http.AsyncClient() if world.asynchronous else http.Client())

    return make


def mock_transport(name: str) -> Callable[[World], Callable[..., Any]]:
    """The app's own tests: no network at all."""

    def make(world: World) -> Callable[..., Any]:
        http, bench = library(name), world.bench

        def answer(request: Any) -> Any:
            server = bench.local if str(request.url).startswith(bench.local.url) else bench.upstream
            body, path = json.loads(request.content), request.url.raw_path.decode()
            server.seen.append(ReceivedRequest(path, dict(request.headers), body))
            found = server.answer(body, path)
            kind = "application/json" if found.events is None else "text/event-stream"
            content = found.body if found.events is None else b"".join(found.events)
            return http.Response(found.status, headers={"content-type": kind}, content=content)

        kind = http.AsyncClient if world.asynchronous else http.Client
        return with_http_client(world, kind(transport=http.MockTransport(answer)))

    return make


def default_http_client(world: World) -> Callable[..., Any]:
    kind = openai.DefaultAsyncHttpxClient if world.asynchronous else openai.DefaultHttpxClient
    return with_http_client(world, kind())


def aiohttp(world: World) -> Callable[..., Any]:
    if not hasattr(openai, "DefaultAioHttpClient"):
        pytest.skip(f"{SDK} has no aiohttp extra")
    try:
        return with_http_client(world, openai.DefaultAioHttpClient())
    except RuntimeError as error:
        pytest.skip(f"openai[aiohttp] is not installed: {error}")


@dataclass(frozen=True)
class Door:
    """A client, or what hangs on it.

    Attributes:
        make: returns a function like `create`.
        before: it was made before the patch, and used too.
        sides: asynchronous or not.
    """

    make: Callable[[World], Callable[..., Any]]
    before: bool = False
    sides: tuple[bool, ...] = (False, True)


DOORS: dict[str, Door] = {
    "client before": Door(lambda world: through(world.client()), before=True),
    "bound method before": Door(lambda world: world.client().chat.completions.create, before=True),
    "bound raw method before": Door(bound_raw, before=True),
    "bound raw method": Door(bound_raw),
    "with_options": Door(lambda world: through(world.client().with_options(timeout=3))),
    "with_options before": Door(lambda world: through(world.client().with_options(max_retries=1)), before=True),
    "copy": Door(lambda world: through(world.client().copy())),
    "subclass": Door(subclass),
    "subclass before": Door(subclass, before=True),
    "function for a key": Door(callable_key),
    "module": Door(module_level, sides=(False,)),
    "module before": Door(module_level, before=True, sides=(False,)),
    "Azure": Door(azure),
    "Azure before": Door(azure, before=True),
    "Azure deployment": Door(lambda world: azure(world, azure_deployment="d")),
    "Azure token": Door(lambda world: azure(world, api_key=None, azure_ad_token_provider=lambda: "token")),
    "default http_client": Door(default_http_client),
    "httpx client": Door(own_http_client("httpx")),
    "httpx client before": Door(own_http_client("httpx"), before=True),
    "httpx2 client": Door(own_http_client("httpx2")),
    "httpx2 client before": Door(own_http_client("httpx2"), before=True),
    "httpx mock": Door(mock_transport("httpx")),
    "httpx2 mock": Door(mock_transport("httpx2")),
    "aiohttp": Door(aiohttp, sides=(True,)),
    "aiohttp before": Door(aiohttp, before=True, sides=(True,)),
}


@MODES
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("door", "asynchronous"),
    [
        pytest.param(door, side, id=f"{name}-{'async' if side else 'sync'}")
        for name, door in DOORS.items()
        for side in door.sides
    ],
)
def test_door(bench, door, asynchronous, stream, mode):
    async def call(world: World, create: Any) -> list[Any]:
        return await result_of(create, **ASK, stream=stream)

    compare(bench, asynchronous, mode, Shape(create(), stream=stream), call, door.make, door.before)


# How a stream ends.


class Gone(Exception):
    """The app's own."""


async def first(stream: Any) -> Any:
    """The next chunk."""
    return await anext(stream) if hasattr(stream, "__anext__") else next(stream)


async def first_of_loop(stream: Any) -> Any:
    """The first chunk, by a loop that is left."""
    if hasattr(stream, "__aiter__"):
        async for chunk in stream:
            return chunk
    for chunk in stream:
        return chunk


async def start(client: Any) -> Any:
    return await now(client.chat.completions.create(**ASK, stream=True))


async def end_break(client: Any) -> list[Any]:
    return [await first_of_loop(await start(client))]


async def end_break_in_with(client: Any) -> list[Any]:
    async def body(stream: Any) -> list[Any]:
        return [await first_of_loop(stream)]

    return await inside(await start(client), body)


async def end_error_in_with(client: Any) -> list[Any]:
    async def body(stream: Any) -> list[Any]:
        await first(stream)
        raise Gone

    with pytest.raises(Gone) as caught:
        await inside(await start(client), body)
    return [type(caught.value), type(caught.value.__context__)]


async def end_close(client: Any) -> list[Any]:
    stream = await start(client)
    found = await first(stream)
    await now(stream.close())
    await now(stream.close())
    return [found]


async def end_close_response(client: Any) -> list[Any]:
    stream = await start(client)
    found = await first(stream)
    await now(stream.response.aclose() if hasattr(stream, "__anext__") else stream.response.close())
    return [found, stream.response.is_closed]


async def end_dropped(client: Any) -> list[Any]:
    stream = await start(client)
    found = await first(stream)
    del stream
    return [found]


async def end_never_iterated(client: Any) -> list[Any]:
    return [type(await start(client))]


async def end_closed_at_once(client: Any) -> list[Any]:
    stream = await start(client)
    await now(stream.close())
    return [type(stream)]


async def end_raw_never_parsed(client: Any) -> list[Any]:
    return [type(await now(client.chat.completions.with_raw_response.create(**ASK, stream=True)))]


async def end_unread(client: Any) -> list[Any]:
    async def body(response: Any) -> list[Any]:
        return [type(response)]

    return await inside(client.chat.completions.with_streaming_response.create(**ASK, stream=True), body)


async def end_helper(client: Any) -> list[Any]:
    async def body(stream: Any) -> list[Any]:
        return [await first_of_loop(stream)]

    helpers = client.chat.completions if hasattr(client.chat.completions, "stream") else client.beta.chat.completions
    return await inside(helpers.stream(**ASK), body)


async def end_cancelled(client: Any) -> list[Any]:
    began, got = asyncio.Event(), list[Any]()

    async def read() -> None:
        async for chunk in await start(client):
            got.append(chunk)
            began.set()

    task = asyncio.create_task(read())
    await began.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    return got[:1]  # the champion's first two come together


async def end_closed_by_another_task(client: Any) -> list[Any]:
    stream = await start(client)
    found = await first(stream)
    await asyncio.create_task(stream.close())
    return [found]


ENDS: dict[str, tuple[Callable[[Any], Awaitable[list[Any]]], str, tuple[bool, ...]]] = {
    "break": (end_break, "abandoned", (False, True)),
    "break in with": (end_break_in_with, "abandoned", (False, True)),
    "error in with": (end_error_in_with, "abandoned", (False, True)),
    "close": (end_close, "abandoned", (False, True)),
    "close the response": (end_close_response, "abandoned", (False, True)),
    "dropped half-way": (end_dropped, "abandoned", (False, True)),
    "never iterated": (end_never_iterated, "abandoned", (False, True)),
    "closed at once": (end_closed_at_once, "abandoned", (False, True)),
    "raw, never parsed": (end_raw_never_parsed, "abandoned", (False, True)),
    "streaming response, unread": (end_unread, "abandoned", (False, True)),
    "helper, break": (end_helper, "abandoned", (False, True)),
    "task cancelled": (end_cancelled, "cancelled", (True,)),
    "closed by another task": (end_closed_by_another_task, "abandoned", (True,)),
}
"""How the app stops reading after the first event, what the record says, and on which sides."""


@MODES
@pytest.mark.parametrize(
    ("end", "status", "asynchronous"),
    [
        pytest.param(end, status, side, id=f"{name}-{'async' if side else 'sync'}")
        for name, (end, status, sides) in ENDS.items()
        for side in sides
    ],
)
def test_end(bench, end, status, asynchronous, mode):
    gate = threading.Event()  # what comes after the first event is not sent before the app has stopped reading

    async def call(world: World) -> list[Any]:
        return await end(world.client())

    try:
        bench.upstream.will(Answer(events=chunks(ASK), gate=gate))
        world = World(bench, asynchronous)
        plain = world.run(lambda: call(world))
        bench.patch(mode=mode, **PATIENCE)
        if mode == "route":
            bench.local.will(Answer(events=chunks(LOCAL_BODY), gate=gate, gate_after=2))
        else:
            bench.upstream.will(Answer(events=chunks(ASK), gate=gate))
        world = World(bench, asynchronous)
        ours = world.run(lambda: call(world))
    finally:
        gate.set()
    same(ours, plain, FINGERPRINT if mode == "route" else frozenset())
    record = bench.sink.call
    assert (record.status, record.policy) == (status, CHAMPION if mode == "route" else None)
    assert record.untrainable is not None
    assert len(bench.local.seen) == (mode == "route")


# What is none of ours.

MP3 = Answer(body=bytes(range(256)) * 40, headers={"content-type": "audio/mpeg"})
PICTURE = Answer(body=b'{"created": 1, "data": [{"b64_json": "AAAA"}]}')
FILE = Answer(body=b'{"id": "f", "object": "file", "bytes": 3, "created_at": 1, "filename": "a", "purpose": "batch"}')
MODERATION = Answer(body=b'{"id": "m", "model": "o", "results": []}')
TEXT = Answer(body=b'{"text": "hello"}')
SPEECH: dict[str, Any] = {"model": "tts", "voice": "alloy", "input": "hello"}

OTHERS: dict[str, tuple[str, Answer | None, dict[str, Any]]] = {
    "embeddings": ("embeddings.create", None, {"model": "e", "input": "x", "encoding_format": "float"}),
    "files": ("files.create", FILE, {"file": ("a.jsonl", b"{}\n"), "purpose": "batch"}),
    "speech": ("audio.speech.create", MP3, SPEECH),
    "speech, streamed": ("audio.speech.with_streaming_response.create", MP3, SPEECH),
    "transcription": ("audio.transcriptions.create", TEXT, {"model": "w", "file": ("a.wav", b"RIFF")}),
    "picture": ("images.generate", PICTURE, {"prompt": "a cat"}),
    "picture, edited": ("images.edit", PICTURE, {"prompt": "a cat", "image": ("a.png", b"PNG")}),
    "moderation": ("moderations.create", MODERATION, {"input": "x"}),
    "models": ("models.list", None, {}),
    "models, raw": ("models.with_raw_response.list", None, {}),
    "stored chats": ("chat.completions.list", None, {}),
    "batch": ("batches.list", None, {}),
}


@MODES
@SIDES
@pytest.mark.parametrize(("path", "answer", "arguments"), OTHERS.values(), ids=OTHERS)
def test_others_pass(bench, path, answer, arguments, asynchronous, mode):
    async def call(world: World) -> list[Any]:
        function = find(world.client(), path)
        if "with_streaming_response" in path:

            async def body(response: Any) -> list[Any]:
                return [type(response), Wire(b"".join(await every(response.iter_bytes())))]

            return await inside(function(**arguments), body)
        result = function(**arguments)
        if path.endswith("s.list"):
            return [type(result), *await every(result)]
        result = await now(result)
        if "raw" in path:
            return [type(result), Wire(result.content)]
        return [type(result), Wire(result.read())] if path == "audio.speech.create" else [result]

    found: list[list[Any]] = []
    asked: list[list[Any]] = []
    for patched in (False, True):
        if patched:
            bench.patch(mode=mode, **PATIENCE)
        if answer is not None:
            bench.upstream.will(answer)
        world = World(bench, asynchronous)
        found.append(world.run(lambda world=world: call(world)))
        asked.append([(seen.path, unbound(seen)) for seen in bench.upstream.seen])
        bench.upstream.seen.clear()
    same(found[1], found[0])
    assert asked[0] == asked[1]
    assert bench.local.seen == []
    assert bench.sink.calls == []


def unbound(seen: ReceivedRequest) -> Any:
    """The body; the line that parts a form is drawn at random."""
    _, _, boundary = seen.headers.get("content-type", "").partition("boundary=")
    return seen.body.replace(boundary.encode(), b"") if boundary else seen.body


@pytest.mark.parametrize("path", ["beta.realtime.connect", "realtime.connect", "responses.connect"])
@SIDES
def test_sockets_are_left_alone(bench, path, asynchronous):
    world = World(bench, asynchronous)

    async def call() -> list[type]:
        connect = find(world.client(), path)
        arguments = {} if path.startswith("responses") else {"model": "r"}
        plain = connect(**arguments)
        bench.patch()
        return [type(plain), type(find(world.client(), path)(**arguments))]

    plain, ours = world.run(call)
    assert plain is ours
    assert bench.sink.calls == []
