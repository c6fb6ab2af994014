"""`art-patch run` with a program that asks a model without the OpenAI SDK: it is told once, with the cure."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.servers import StubServer, serving

BODY = '{"model": "m", "messages": [{"role": "user", "content": "hi"}]}'
SEND = {
    "requests": "requests.post(url, data=body).json()",
    "httpx": "httpx.post(url, content=body).json()",
    "httpx async": """
async def ask():
    async with httpx.AsyncClient() as client:
        return (await client.post(url, content=body)).json()
asyncio.run(ask())
""",
    "aiohttp": """
async def ask():
    async with aiohttp.ClientSession() as client, client.post(url, json=json.loads(body)) as answer:
        return await answer.json()
asyncio.run(ask())
""",
}


ENVIRONMENT = {key: value for key, value in os.environ.items() if not key.startswith(("ART_PATCH_", "PYTHON"))}


def run(home: Path, *program: str, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """`art-patch run` with a program of Python."""
    command = [sys.executable, "-m", "art_patch", "run", "--home", str(home), *options, "--", sys.executable, *program]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=ENVIRONMENT)


@pytest.fixture(scope="module")
def upstream() -> Iterator[StubServer]:
    with serving() as server:
        yield server


def program(how: str, url: str, *before: str) -> str:
    library = how.partition(" ")[0]
    known = [f"import asyncio, json, {library}", f"url, body = {url!r}, {BODY!r}"]
    return "\n".join([*before, *known, SEND[how], "print('done')"])


@pytest.mark.parametrize("how", SEND)
def test_a_program_on_an_http_library_is_told_at_its_exit(how: str, tmp_path: Path, upstream: StubServer):
    result = run(tmp_path, "-c", program(how, f"{upstream.url}/chat/completions?k=secret"))
    assert (result.returncode, result.stdout) == (0, "done\n")
    library = how.partition(" ")[0]
    (line,) = result.stderr.splitlines()
    assert line.startswith(
        "art-patch: no call of the OpenAI SDK was seen, but 1 to a model by other means "
        f"({library}, 127.0.0.1/v1/chat/completions): "
    )
    assert "`art-patch proxy`" in line
    assert "secret" not in line


@pytest.mark.parametrize("how", SEND)
def test_calls_that_ask_no_model_are_not_told(how: str, tmp_path: Path, upstream: StubServer):
    result = run(tmp_path, "-c", program(how, f"{upstream.url}/embeddings"))
    assert (result.returncode, result.stdout, result.stderr) == (0, "done\n", "")


SDK = """
import sys, openai
with openai.OpenAI(api_key="sk-x", base_url=sys.argv[1], max_retries=0) as client:
    client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
"""


@pytest.mark.parametrize("mode", ["record", "off"])
def test_a_program_on_the_openai_sdk_is_told_nothing(mode: str, tmp_path: Path, upstream: StubServer):
    code = program("httpx", f"{upstream.url}/chat/completions", SDK)
    result = run(tmp_path, "-c", code, upstream.url, options=("--mode", mode))
    assert (result.returncode, result.stdout, result.stderr) == (0, "done\n", "")


# Nobody listens there, and it is no address of a proxy on this machine.
ELSEWHERE = "http://127.0.0.2:9"
HI = 'messages=[{"role": "user", "content": "hi"}]'
OTHERS = {
    "anthropic": f"""
from contextlib import suppress
import anthropic
client = anthropic.Anthropic(api_key="sk-x", base_url={ELSEWHERE!r}, max_retries=0)
for messages in (client.messages, client.beta.messages):
    with suppress(anthropic.APIConnectionError):
        messages.create(model="m", max_tokens=5, {HI})
with suppress(anthropic.APIConnectionError), client.messages.stream(model="m", max_tokens=5, {HI}):
    pass
""",
    "google-genai": f"""
import asyncio
from google import genai
client = genai.Client(api_key="k", http_options={{"base_url": {ELSEWHERE!r}, "timeout": 60000}})
for ask in (client.models.generate_content, client.models.generate_content_stream):
    try:
        list(ask(model="m", contents="hi"))
    except Exception as error:
        assert "onnect" in type(error).__name__, error
try:
    asyncio.run(client.aio.models.generate_content(model="m", contents="hi"))
except Exception as error:
    assert "onnect" in type(error).__name__, error
""",
}


@pytest.mark.slow
@pytest.mark.parametrize("package", OTHERS)
def test_another_sdk_is_told_once_and_counted(package: str, tmp_path: Path):
    if find_spec({"google-genai": "google"}.get(package, package)) is None:
        pytest.skip(f"{package} is not installed")
    more = "\nimport art_patch, json\nprint(json.dumps(dict(art_patch.status().bypasses)))"
    result = run(tmp_path, "-c", OTHERS[package] + more)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == {package: 3}
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"art_patch: a call went past the patch ({package}), neither recorded nor routed: ")
    told = run(tmp_path, "-m", "art_patch", "status", "--home", str(tmp_path))
    assert f"calls went past the patch by {package}" in " ".join(told.stdout.split())


def test_what_it_wraps_is_there_and_stays_what_it_was(tmp_path: Path):
    from art_patch.autostart import PLACES

    code = """
import importlib, inspect, json
from art_patch.autostart import PLACES
print(json.dumps({
    module: [[*inspect.signature(function).parameters], hasattr(function, "__wrapped__")]
    for module, (owner, name) in PLACES.items()
    for function in [vars(getattr(importlib.import_module(module), owner))[name]]
}))
"""
    watched = run(tmp_path, "-c", code)
    bare = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=ENVIRONMENT)
    found, original = json.loads(watched.stdout), json.loads(bare.stdout)
    assert found.keys() == PLACES.keys()
    assert found == {name: [known[0], True] for name, known in original.items()}


FAILS = {
    "requests": "requests.post(url, data=body)",
    "httpx": "httpx.post(url, content=body)",
    "aiohttp": """
async def ask():
    async with aiohttp.ClientSession() as client, client.post(url, json={}):
        pass
asyncio.run(ask())
""",
}


@pytest.mark.parametrize("how", FAILS)
def test_the_traceback_of_a_call_that_fails_is_the_same(how: str, tmp_path: Path):
    code = f"import asyncio, {how}\nurl, body = 'http://127.0.0.1:9/v1/messages', '{{}}'\n{FAILS[how]}"
    bare = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=ENVIRONMENT)
    watched = run(tmp_path, "-c", code)
    (told,) = (line for line in watched.stderr.splitlines() if line.startswith("art-patch: "))
    assert "by other means" in told
    at = [re.sub(r" at 0x\w+", "", text) for text in (bare.stderr, watched.stderr.replace(told + "\n", ""))]
    assert at[1] == at[0]


def test_anthropic_through_a_proxy_on_this_machine_is_not_told(tmp_path: Path, upstream: StubServer):
    pytest.importorskip("anthropic")
    code = OTHERS["anthropic"].replace(ELSEWHERE, "http://127.0.0.1:9")
    result = run(tmp_path, "-c", code)
    (line,) = result.stderr.splitlines()
    assert "by other means (httpx" in line
    assert "unless they go to `art-patch proxy`" in line


def test_a_warning_of_anthropics_sdk_names_the_line_of_the_program(tmp_path: Path):
    pytest.importorskip("anthropic")
    code = (
        OTHERS["anthropic"]
        .replace(ELSEWHERE, "http://127.0.0.1:9")
        .replace('model="m"', "model=min(anthropic.resources.messages.messages.DEPRECATED_MODELS)")
    )
    bare = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=ENVIRONMENT)
    warnings = [line for line in bare.stderr.splitlines() if "DeprecationWarning" in line]
    assert any(line.startswith("<string>:") for line in warnings)
    patched = run(tmp_path, "-c", code)
    assert [line for line in patched.stderr.splitlines() if "DeprecationWarning" in line] == warnings
