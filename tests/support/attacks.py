"""What an attacker sends to the servers of art_patch, each request byte by byte, and how to tell that it succeeded.

An attack succeeds if it changes the server's state, if it is answered with success although it is `forbidden`, or if
the answer holds the `SECRET`. A 500 and a server that no longer answers are counted apart.
"""

from __future__ import annotations

import gzip
import json
import socket
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from http.client import HTTPException, HTTPResponse
from typing import Any

SECRET = "secret-that-nobody-may-read"
JSON = ("content-type", "application/json")
Headers = Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Attack:
    """One attack.

    Attributes:
        name: of the attack, for the report.
        data: what is sent.
        forbidden: whether an answer of success is a success of the attack.
        waits: whether the server may wait for more without answering.
    """

    name: str
    data: bytes
    forbidden: bool = True
    waits: bool = False


@dataclass
class Tally:
    """What came of the attacks on a server."""

    attacks: int = 0
    succeeded: list[str] = field(default_factory=list)
    answers_500: list[str] = field(default_factory=list)
    crashed: list[str] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        return not (self.succeeded or self.answers_500 or self.crashed)


def request(method: str, path: str, headers: Headers, body: bytes | str = b"", host: str | None = "127.0.0.1") -> bytes:
    """A request as bytes; `host` is left out if it is `None`, and the length where `headers` name one."""
    content = body.encode("utf-8", "surrogatepass") if isinstance(body, str) else body
    lines = [f"{method} {path} HTTP/1.1"] + ([f"Host: {host}"] if host is not None else [])
    lines += [f"{name}: {value}" for name, value in headers]
    if not {"content-length", "transfer-encoding"} & {name.lower() for name, _ in headers}:
        lines.append(f"Content-Length: {len(content)}")
    return "\r\n".join([*lines, "", ""]).encode("utf-8", "surrogateescape") + content


def answers(port: int, attack: Attack, *, timeout_s: float = 20.0) -> list[tuple[int, bytes]]:
    """Status and body of each answer to the attack; a second one comes where one request was taken for two."""
    found: list[tuple[int, bytes]] = []
    with socket.create_connection(("127.0.0.1", port), timeout=timeout_s) as sock:
        with suppress(OSError):  # refused before it was read
            sock.sendall(attack.data)
        sock.settimeout(1.0 if attack.waits else timeout_s)
        for _ in range(3):
            try:
                answer = HTTPResponse(sock)
                answer.begin()
                found.append((answer.status, answer.read()))
            except (OSError, HTTPException, ValueError):
                break
            if answer.will_close:
                break
            sock.settimeout(
                0.2 if attack.waits else 0.001
            )  # what it took for a second request is answered at once, or is waited for
    return found


def attempt(port: int, attacks: Sequence[Attack], state: Callable[[], Any]) -> Tally:
    """Send the attacks, some at once; `state` is asked after each lot, and also shows that the server answers."""
    tally, before = Tally(), state()
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        for start in range(0, len(attacks), _AT_ONCE):
            lot = attacks[start : start + _AT_ONCE]
            for attack, got in zip(lot, pool.map(partial(answers, port), lot), strict=True):
                tally.attacks += 1
                statuses = [status for status, _ in got]
                told = any(SECRET.encode() in body for _, body in got)
                # The first answer is to the request that was sent, all others to what was hidden in it.
                if told or any(status < 400 for status in statuses[0 if attack.forbidden else 1 :]):
                    tally.succeeded.append(f"{attack.name}: {statuses}")
                if any(status >= 500 and status != 503 for status in statuses):
                    tally.answers_500.append(f"{attack.name}: {statuses}")
            try:
                now = state()
            except OSError:
                tally.crashed.append(f"after one of {[attack.name for attack in lot]}")
                return tally
            if now != before:
                tally.succeeded.append(f"{now} after one of {[attack.name for attack in lot]}")
            before = now
    return tally


_AT_ONCE = 16

HOSTS = (
    *("evil.example", "evil.example:80", "127.0.0.1.evil.example", "localhost.evil.example", "0.0.0.0", "10.0.0.1"),
    *("[::2]", "[", "", "a@127.0.0.1", "localhost@evil.example", "127.0.0.1 evil", "localhost:80:80", "2130706433"),
    *("127.1", "0x7f000001", "localhost.", "localhost/evil", "evil.example#127.0.0.1", "127.0.0.1\\@evil.example"),
    *("[::1", "[::ffff:10.0.0.1]", "localhost?evil", "evil.example%00.localhost", "loca\u017fhost", "*"),
)
ORIGINS = (
    *("https://evil.example", "null", "http://localhost:3000", "http://127.0.0.1:3000", "http://user@127.0.0.1", ""),
    *("http://127.0.0.1.evil.example", "http://[::1]", "file://", "chrome-extension://abc", "http://localhost", "*"),
    *("http://127.0.0.1@evil.example", "HTTP://EVIL.EXAMPLE", "http://127.0.0.1/", "http://127.0.0.1#", "127.0.0.1"),
    *("http://127.0.0.1:80", "about:blank", "data:text/html,x"),
)
SITES = ("cross-site", "same-site", "evil", "Cross-Site")
TYPES = (
    *("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "", "text/json", "*/*"),
    *("text/plain; application/json", "application/json, text/plain", "application/jsonp", "application/octet-stream"),
    *("text/plain;charset=application/json", "application/xml", "json"),
)
METHODS = (
    *("GET", "HEAD", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "PROPFIND", "MOVE", "PURGE", "LOCK"),
    *("post", "POST1", "P OST", "\x00POST"),
)
PATHS = (
    *("/../etc/passwd", "/..%2fetc/passwd", "/%2e%2e/etc/passwd", "/..%5cetc%5cpasswd", "/%252e%252e/etc/passwd"),
    *("/....//etc/passwd", "/..;/etc/passwd", "//evil.example/x", "/.%00./etc/passwd", "/%c0%ae%c0%ae/etc/passwd"),
    *("/./../etc/passwd", "/\\..\\etc\\passwd", "/%2e%2e%2f%2e%2e%2fetc%2fpasswd", "/.", "/..", "/%2e", "/a/%2E%2E/b"),
    *("/static/../../app.py", "/.git/config", "/.env", "/admin.key", "/engine.key", "/feedback.key", "/store.db"),
    *("/docs", "/openapi.json", "/debug", "/server-status", "/%", "/%zz", "/%e2%80%ae", "/?a=../../x"),
)


def keys(right: str, scheme: str = "Bearer ") -> tuple[str | None, ...]:
    """What is sent in place of the right key."""
    return (
        *(
            None,
            "",
            scheme.strip(),
            scheme,
            f"{scheme}{right[:-1]}",
            f"{scheme}{right}x",
            f"{scheme}{right.swapcase()}",
        ),
        *(f"{scheme}none", f"{scheme}null", f"{scheme}undefined", f"{scheme}*", f"{scheme}%00", f"x{scheme}{right}"),
        *(f"{scheme}' OR 1=1", f"{scheme}{right[0]}", f"{scheme}\u00e9", f"{scheme}{right}, {scheme}x", f"{scheme}0"),
        *(f"Basic {right}", f"{scheme.strip()}{right}x", f"{scheme}{right}\x7f", f"{scheme}{'a' * 4000}"),
    )


def garbage(valid: Callable[..., bytes], second: bytes) -> list[Attack]:
    """Bytes that are no proper HTTP; `valid(headers, body)` makes a request, and `second` is one that is forbidden.

    `second` hides where one reader sees the end of a request and another does not.
    """
    hidden = b"%x\r\n%b\r\n0\r\n\r\n" % (len(second), second)
    chunked = ("transfer-encoding", "chunked")
    raws = {
        "no http": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 20,
        "http2 preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        "ssh": b"SSH-2.0-OpenSSH_9.9\r\n",
        "http 0.9": b"GET /\r\n\r\n",
        "http 9.9": b"GET / HTTP/9.9\r\nHost: 127.0.0.1\r\n\r\n",
        "no version": b"GET / \r\nHost: 127.0.0.1\r\n\r\n",
        "nul in path": b"GET /\x00 HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
        "bytes in path": b"GET /\xff\xfe HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
        "absolute evil": b"GET http://evil.example/ HTTP/1.1\r\nHost: evil.example\r\n\r\n",
        "authority": b"CONNECT evil.example:443 HTTP/1.1\r\nHost: evil.example:443\r\n\r\n",
        "asterisk": b"OPTIONS * HTTP/1.1\r\nHost: evil.example\r\n\r\n",
        "space before colon": b"GET / HTTP/1.1\r\nHost : 127.0.0.1\r\n\r\n",
        "folded header": b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX: a\r\n b\r\n\r\n",
        "header without colon": b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nnonsense\r\n\r\n",
        "empty header name": b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n: x\r\n\r\n",
        "two hosts": b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nHost: evil.example\r\n\r\n",
        "cr alone": b"GET / HTTP/1.1\rHost: 127.0.0.1\r\r",
        "only newlines": b"\r\n" * 4000,
        "long method": b"G" * 20_000 + b" / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
        "long url": b"GET /" + b"a" * 900_000 + b" HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
        "long header": b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX: " + b"a" * 300_000 + b"\r\n\r\n",
        "many headers": b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n" + b"X: a\r\n" * 60_000 + b"\r\n",
        "websocket": b"GET / HTTP/1.1\r\nHost: evil.example\r\nUpgrade: websocket\r\nConnection: upgrade\r\n\r\n",
        "h2c": b"GET / HTTP/1.1\r\nHost: evil.example\r\nUpgrade: h2c\r\nConnection: upgrade, http2-settings\r\n\r\n",
        "half a header": b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nX: ",
        "half a body": valid([("content-length", "1000")], b"{"),
        "length and chunked": valid([("content-length", "5"), chunked], b"0\r\n\r\n" + second),
        "chunked and length": valid([chunked, ("content-length", str(len(hidden)))], hidden),
        "two lengths": valid([("content-length", "0"), ("content-length", str(len(second)))], second),
        "lengths in a list": valid([("content-length", f"0, {len(second)}")], second),
        "negative length": valid([("content-length", "-1")], second),
        "plus length": valid([("content-length", "+0")], second),
        "hex length": valid([("content-length", "0x10")], second),
        "huge length": valid([("content-length", "9" * 40)], second),
        "17 MiB announced": valid([("content-length", str(17 << 20))], b"{"),
        "identity and chunked": valid([("transfer-encoding", "identity, chunked")], b"0\r\n\r\n" + second),
        "xchunked": valid([("transfer-encoding", "xchunked")], b"0\r\n\r\n" + second),
        "chunked twice": valid([chunked, ("transfer-encoding", "identity")], b"0\r\n\r\n" + second),
        "tab chunked": valid([("transfer-encoding", "\tchunked")], b"0\r\n\r\n" + second),
        "chunk of minus one": valid([chunked], b"-1\r\n" + second),
        "chunk too large": valid([chunked], b"ffffffffffffffffff\r\n" + second),
        "chunk extension": valid([chunked], b"2;" + b"a" * 100_000 + b"\r\n{}\r\n0\r\n\r\n"),
        "chunk with lf": valid([chunked], b"0\n\n" + second),
        "key behind the body": valid([chunked], b"2\r\n{}\r\n0\r\nauthorization: Bearer x\r\n\r\n"),
        "endless trailer": valid([chunked], b"2\r\n{}\r\n0\r\n" + b"x: y\r\n" * 20_000),
        "gzip body": valid([("content-encoding", "gzip")], gzip.compress(b"{}")),
        "gzip bomb": valid([("content-encoding", "gzip")], gzip.compress(bytes(20 << 20))),
        "pipelined": valid([], b"{}") + second,
    }
    return [Attack(f"http: {name}", data, forbidden=False, waits=True) for name, data in raws.items()]


DEEP = 100_000
BODIES: dict[str, bytes] = {
    "empty": b"",
    "space": b" " * 10,
    "null": b"null",
    "number": b"1",
    "string": b'"text"',
    "list": b"[]",
    "object": b"{}",
    "half": b'{"a": ',
    "trailing": b'{"a": 1} x',
    "comma": b'{"a": 1,}',
    "single quotes": b"{'a': 1}",
    "comment": b'{"a": 1 /* x */}',
    "nan": b'{"temperature": NaN}',
    "infinity": b'{"temperature": -Infinity}',
    "deep lists": b"[" * DEEP,
    "deep lists closed": b"[" * DEEP + b"]" * DEEP,
    "deep objects": b'{"a":' * DEEP,
    "just deep": b'{"a":' + b"[" * 180 + b"]" * 180 + b"}",
    "long number": b'{"seed": ' + b"9" * 5_000 + b"}",
    "exponent": b'{"temperature": 1e99999}',
    "utf-16": '{"a": 1}'.encode("utf-16"),
    "utf-32": '{"a": 1}'.encode("utf-32"),
    "bom": b"\xef\xbb\xbf{}",
    "bad utf-8": b'{"a": "\xff"}',
    "overlong": b'{"a": "\xc0\xae"}',
    "raw surrogate": b'{"a": "\xed\xa0\x80"}',
    "surrogate": b'{"a": "\\ud800"}',
    "surrogate key": b'{"\\udfff": 1}',
    "nul": b'{"a": "\x00"}',
    "escaped nul": b'{"\\u0000": "\\u0000"}',
    "control": b'{"a": "\x01"}',
    "same key": b'{"a": 1, "a": 2}',
    "proto": b'{"__proto__": {"admin": true}, "__class__": "x"}',
    "yaml": b"!!python/object/apply:os.system ['id']",
    "pickle": b"cos\nsystem\n(S'id'\ntR.",
    "xml": b'<?xml version="1.0"?><!DOCTYPE x [<!ENTITY e SYSTEM "file:///etc/passwd">]><x>&e;</x>',
    "template": b'{"a": "{{7*7}}${7*7}<%= 7*7 %>"}',
    "commas": b"[" + b"[]," * 600_000 + b"[]]",
    "gzip": gzip.compress(b"{}"),
    "html": b"<script>alert(1)</script>",
}


def with_fields(valid: dict[str, Any], fields: dict[str, Iterable[Any]]) -> dict[str, bytes]:
    """The valid body with one field changed at a time."""
    return {
        f"{name} = {value!r:.60}": json.dumps({**valid, name: value}).encode()
        for name, values in fields.items()
        for value in values
    }


ODD: tuple[Any, ...] = (
    *(None, [], {}, "", 0, -1, True, 1.5, "x", [[]], [{}], {"a": 1}, 10**30, -(10**30), "\ud800", "\x00", 1e308),
)
CHAT_FIELDS: dict[str, Iterable[Any]] = {
    "model": (*ODD, "agent@999", "../../etc/passwd", "agent@1\n", "agent@" + "9" * 400),
    "messages": (
        *(None, [], {}, "x", 1, [None], [[]], ["x"], [{}], [{"role": []}], [{"role": {}}], [{"role": "user"}]),
        *([{"role": role, "content": "x"}] for role in ODD if role != "x"),
        *(
            [{"role": "user", "content": content}]
            for content in (1, {}, [1], [[]], [{}], [{"type": []}], "\ud800", 1.5)
        ),
        *(
            [{"role": "user", "content": [part]}]
            for part in ({"type": "text"}, {"type": "text", "text": []}, None, "x")
        ),
        *([{"role": "assistant", "tool_calls": calls}] for calls in (1, {}, [1], [{}], [{"function": []}])),
        *(
            [{"role": "assistant", "tool_calls": [{"function": call}]}]
            for call in ({}, {"name": 1}, {"name": "\ud800"})
        ),
        [{"role": "tool", "content": "x", "tool_call_id": []}],
        [{"role": "user", "content": "x", "audio": {}}],
        [{"role": "user", "content": "a" * 200_000}],
        [{"role": "user", "content": ""}] * 20_000,
    ),
    "tools": (*ODD, [1], [{"type": []}], [{"type": "function", "function": {"name": []}}]),
    "tool_choice": ODD,
    "temperature": ODD,
    "top_p": ODD,
    "n": (*ODD, 129),
    "max_tokens": (*(value for value in ODD if value not in (None, 1.5)), 1 << 62),
    "stop": (*ODD, ["x"] * 17, [1], "\ud800"),
    "seed": ODD,
    "stream": [value for value in ODD if value not in (True, None)],
    "stream_options": ODD,
    "chat_template_kwargs": (
        {"chat_template": "{{ 1/0 }}"},
        {"tokenize": True},
        [],
        1,
        "x",
        {"messages": []},
        {"x": []},
    ),
    "logit_bias": ODD,
    "response_format": [value for value in ODD if value is not None],
    "chat_template": ("{{ cycler.__init__.__globals__.os.popen('id').read() }}",),
}
