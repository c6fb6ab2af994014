"""The servers of art_patch as they are run by a user, and the attacks on each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from art_patch._lib.key_files import admin_key
from art_patch.feedback.links import Link, secret_of, url_of
from art_patch.serving import EngineClient
from art_patch.settings import Settings
from art_patch.store import open_store
from art_patch.types import TrajectoryInfo
from tests.support.attacks import (
    BODIES,
    CHAT_FIELDS,
    HOSTS,
    JSON,
    METHODS,
    ODD,
    ORIGINS,
    PATHS,
    SITES,
    TYPES,
    Attack,
    garbage,
    keys,
    request,
    with_fields,
)
from tests.support.servers import completion

PROXY_KEY = "key-of-the-proxy"
CHAT = "/v1/chat/completions"
ASK: dict[str, Any] = {"model": "agent@0", "messages": [{"role": "user", "content": "plum"}], "max_tokens": 1}
LATER = 99_999_999_999


@dataclass
class Attacked:
    """A running server: its port and process, what it says on stderr, its state, a proper request, and the attacks."""

    name: str
    port: int
    process: subprocess.Popen[str]
    errors: Path
    state: Callable[[], Any]
    proper: bytes
    attacks: list[Attack]


@contextmanager
def command(home: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any], Path]]:
    """A command that serves, as a process; yields it, what it printed when it was ready, and the file of its stderr."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("ART_PATCH_", "OPENAI_"))}
    errors = home / f"{arguments[0]}.stderr"
    with errors.open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "art_patch", *arguments, "--port", "0", "--json", "--home", str(home)],
            stdout=subprocess.PIPE, stderr=stderr, text=True, env=clean | {"ART_PATCH_POLL_INTERVAL_S": "0.1"},
        )  # fmt: skip
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line, errors.read_text()
            yield process, json.loads(line), errors
        finally:
            process.terminate()
            process.communicate(timeout=60)


def _port(ready: dict[str, Any]) -> int:
    return int(ready["base_url"].split(":")[2].split("/")[0])


def _bodies(path: str, headers: list[tuple[str, str]], valid: dict[str, Any]) -> list[Attack]:
    bodies = BODIES | with_fields(valid, CHAT_FIELDS)
    return [Attack(f"body: {name}", request("POST", path, headers, body), False) for name, body in bodies.items()]


def _pages(path: str, headers: list[tuple[str, str]], body: str) -> list[Attack]:
    """What a page in a browser of this machine may send; the right key changes nothing."""
    made = [Attack(f"host {host!r}", request("POST", path, [*headers, JSON], body, host)) for host in (*HOSTS, None)]
    for name, values in (("origin", ORIGINS), ("sec-fetch-site", SITES)):
        made += [
            Attack(f"{name} {value!r}", request("POST", path, [*headers, JSON, (name, value)], body))
            for value in values
            if value not in ("http://127.0.0.1", "HTTP://127.0.0.1")
        ]
    made += [
        Attack(f"type {kind!r}", request("POST", path, [*headers, ("content-type", kind)], body)) for kind in TYPES
    ]
    return [*made, Attack("no type", request("POST", path, headers, body))]


def _methods(path: str, headers: list[tuple[str, str]], body: str) -> list[Attack]:
    return [Attack(f"method {method!r:.20}", request(method, path, headers, body), waits=True) for method in METHODS]


@contextmanager
def attacked_serve(base: Path, adapters: Path, home: Path) -> Iterator[Attacked]:
    """`art-patch serve` without a key, with agent@1 loaded."""
    (home / "default").mkdir(parents=True, mode=0o700)
    (home / "default" / "adapters").symlink_to(adapters)
    with command(home, "serve", "--base", str(base)) as (process, ready, errors):
        key = admin_key(home / "default") or ""
        client = EngineClient(ready["base_url"], admin_key=key)
        client.load("agent@1")
        right, unload = [("authorization", f"Bearer {key}")], "/v1/unload_lora_adapter"
        name = json.dumps({"lora_name": "agent@1"})
        attacks = [*_pages(unload, right, name), *_methods(unload, [*right, JSON], name)]
        for path in (unload, "/v1/load_lora_adapter"):
            body = json.dumps({"lora_name": "agent@1" if path == unload else "agent@2"})
            attacks += [
                Attack(
                    f"{path} key {given!r:.40}", request("POST", path, [JSON, *_header("authorization", given)], body)
                )
                for given in keys(key)
            ]
        names = ("../agent@1", "/etc/passwd", "agent@1/../agent@2", "agent@0", "\ud800", "agent@2\x00", *ODD)
        bodies = [{"lora_name": one} for one in names]
        bodies += [{"lora_name": "agent@2", "lora_path": path} for path in ("/etc", "../agent@2", "\x00", 1, [], {})]
        bodies += [{"lora_name": "agent@2", "base_model_name": "x"}, {"lora_name": "agent@2", "load_inplace": True}]
        attacks += [
            Attack(f"load {body!r:.60}", request("POST", "/v1/load_lora_adapter", [*right, JSON], json.dumps(body)))
            for body in bodies
        ]
        attacks += [
            Attack(f"load body {kind}", request("POST", "/v1/load_lora_adapter", [*right, JSON], body))
            for kind, body in BODIES.items()
        ]
        attacks += [Attack(f"path {path}", request("GET", path, [])) for path in PATHS]
        attacks += garbage(
            lambda headers, body=b"": request("POST", CHAT, [JSON, *headers], body), _second(unload, name)
        )
        attacks += _bodies(CHAT, [JSON], ASK)
        attacks += [
            Attack(f"exact {kind}", request("POST", f"/exact{CHAT}", [JSON], BODIES[kind]), False) for kind in BODIES
        ]
        proper = request("POST", CHAT, [JSON], json.dumps(ASK))
        try:
            yield Attacked("serve", _port(ready), process, errors, client.models, proper, attacks)
        finally:
            client.close()


def _climbs(path: str) -> bool:
    plain = unquote(unquote(unquote(path.partition("?")[0]))).replace("\\", "/").replace(";", "/")
    return not {".", ".."}.isdisjoint(plain.split("/"))


def _second(path: str, body: str) -> bytes:
    return request("POST", path, [JSON], body)


def _header(name: str, value: str | None) -> list[tuple[str, str]]:
    return [] if value is None else [(name, value)]


class Upstream:
    """A provider that answers every chat, and notes what it is asked for."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.answer: Callable[[BaseHTTPRequestHandler], bytes] | None = None
        upstream = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                upstream.paths.append(self.path)
                length = self.headers.get("content-length")
                self.rfile.read(int(length)) if length else self._chunks()
                body = upstream.answer(self) if upstream.answer else json.dumps(completion({"model": "m"})).encode()
                if not upstream.answer:
                    self.send_response(200)
                    self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_GET = do_PUT = do_DELETE = do_PATCH = do_POST

            def _chunks(self) -> None:
                if "chunked" in self.headers.get("transfer-encoding", ""):
                    while size := int(self.rfile.readline().split(b";")[0] or b"0", 16):
                        self.rfile.read(size + 2)
                    self.rfile.readline()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 512

            def handle_error(self, request: Any, client_address: Any) -> None:
                """Callers that go away are part of the game."""

        self._server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@contextmanager
def attacked_proxy(home: Path, upstream: Upstream) -> Iterator[Attacked]:
    """`art-patch proxy` with a key; its upstream has an API below `/v1`, and a secret beside it."""
    key_file = home / "proxy.key"
    key_file.touch(mode=0o600)
    key_file.write_text(PROXY_KEY)
    with command(home, "proxy", "--upstream", f"{upstream.url}/v1", "--key-file", str(key_file)) as started:
        process, ready, errors = started
        right, body = [("x-art-key", PROXY_KEY)], json.dumps(ASK)

        def state() -> Any:
            # What came below /v1 is the proxy's service; all else is harm.
            return [path for path in upstream.paths if not path.startswith("/v1/") or _climbs(path)]

        attacks = _pages(CHAT, right, body)
        attacks += [
            Attack(f"key {given!r:.40}", request(method, path, [JSON, *_header("x-art-key", given)], body))
            for method, path in (("POST", CHAT), ("GET", "/v1/models"))
            for given in (*keys(PROXY_KEY, ""), f"Bearer {PROXY_KEY}")
            if given not in (PROXY_KEY, f"{PROXY_KEY}\x7f")
        ]
        attacks += [Attack(f"path {path}", request("GET", path, right), path.startswith("/..")) for path in PATHS]
        attacks += [Attack(f"path /v1{path}", request("GET", f"/v1{path}", right), _climbs(path)) for path in PATHS]
        attacks += [
            Attack(f"path {path}", request("GET", path, right))
            for path in (
                "/v1%2f@evil.example/",
                "/v1@evil.example/",
                "/%76%31%2f..%2fx",
                "/v1/..%255c..%255cx",
                "/V1/models",
            )
        ]
        second = request("GET", "/v1/models", [])
        attacks += garbage(lambda headers, body=b"": request("POST", CHAT, [*right, JSON, *headers], body), second)
        attacks += _bodies(CHAT, [*right, JSON], ASK)
        attacks += [
            Attack(f"header {name} {value!r:.20}", request("POST", CHAT, [*right, JSON, (name, value)], body), False)
            for name in ("x-art-trajectory-id", "x-art-user-id", "x-art-group", "traceparent", "cookie", "connection")
            for value in ("", "\u00e9", "\x7f", "a" * 5_000, "00-zz-zz-01", "../../x", "x-art-key", "\x01")
        ]
        proper = request("POST", CHAT, [*right, JSON], body)
        yield Attacked("proxy", _port(ready), process, errors, state, proper, attacks)


@contextmanager
def attacked_feedback(home: Path) -> Iterator[Attacked]:
    """`art-patch feedback serve` for one run, t1."""
    settings = Settings(home=home)
    store = open_store(settings.store_url)
    store.write([TrajectoryInfo("t1", 1.0)])
    with command(home, "feedback", "serve") as (process, ready, errors):
        secret = secret_of(settings)

        def link(trajectory: str = "t1", name: str = "thumbs", expires: int = LATER, project: str = "default") -> str:
            return url_of(Link(trajectory, name, expires), "", secret, project)

        def state() -> Any:
            return [(score.value, score.comment) for run in store.read.trajectories(["t1"]) for score in run.scores]

        right, body = link(), json.dumps({"value": 1})
        attacks = [Attack(f"host {host!r}", request("POST", right, [JSON], body, host)) for host in (*HOSTS, None)]
        attacks += [
            Attack(f"method {method!r:.20}", request(method, right, [JSON], body), method not in ("GET", "HEAD"), True)
            for method in METHODS
        ]
        tampered = {
            f"{place} {change!r}": right[:place] + change + right[place + 1 :]
            for place in range(10, len(right), 3)
            for change in "x"
        }
        tampered |= {part: right.replace(part, "") for part in right.partition("?")[2].split("&")}
        tampered |= {
            "expired": link(expires=1), "other project": link(project="other"),
            "other run": right.replace("=t1", "=t2"), "other name": right.replace("thumbs", "reward"),
            "twice": f"{right}&trajectory=t2", "no signature": right.rpartition("=")[0] + "=", "half": right[:-5],
            "swapped": right.replace("trajectory=", "name=").replace("name=thumbs", "trajectory=thumbs"),
            "upper": right.upper(), "nothing": "/feedback",
        }  # fmt: skip
        tampered = {name: path for name, path in tampered.items() if path != right}
        attacks += [Attack(f"link {name}", request("POST", path, [JSON], body)) for name, path in tampered.items()]
        attacks += [
            Attack(f"form {name}", request("POST", path, [_FORM], "value=1")) for name, path in tampered.items()
        ]
        values = [value for value in ODD if value not in (0, 1, "x")]
        bodies = BODIES | {
            f"value {value!r}": json.dumps({"value": value}).encode() for value in (*values, "NaN", "-0.5", 2)
        }
        bodies |= {
            "long": json.dumps({"value": 1, "comment": "x" * 3_000}).encode(),
            "large": b'{"value": 1, "comment": "' + b"x" * 20_000,
        }
        attacks += [
            Attack(f"{kind[1][-4:]} {name}", request("POST", right, [kind], content))
            for name, content in bodies.items()
            for kind in (JSON, _FORM)
        ]
        attacks += [
            Attack(f"type {kind!r}", request("POST", right, [("content-type", kind)], body))
            for kind in TYPES
            if kind != _FORM[1]
        ]
        attacks += [Attack(f"path {path}", request("GET", path, [])) for path in PATHS]
        attacks += garbage(
            lambda headers, content=b"": request("POST", right, [JSON, *headers], content),
            request("POST", right.replace("t1", "t2"), [JSON], body),
        )
        yield Attacked("feedback", _port(ready), process, errors, state, request("GET", right, []), attacks)
    store.close()


_FORM = ("content-type", "application/x-www-form-urlencoded")
