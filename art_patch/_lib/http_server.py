"""Opens a listening socket and runs a uvicorn server that shuts down cleanly; all HTTP servers of art_patch use it.

uvicorn by itself would raise the signal again after its shutdown, so that the caller's clean-up would not run. It would
also wait without end for a caller who is slow, and take any number of connections.
"""

import asyncio
import contextlib
import errno
import ipaddress
import resource
import signal
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Generator
from functools import partial
from pathlib import Path
from typing import Any, Literal

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from art_patch.errors import ConfigError, PortInUse

_BACKLOG = 2048  # connections that the kernel accepts for us while the event loop is busy

_HEADER_S = 10.0  # within which a whole header must have arrived
_PART_BYTES = 64 << 10  # largest header; and the part of a body, or of an answer, that must get on within `_PART_S`
_PART_S = 60.0
_MOST_CONNECTIONS = 4096
_MAY_CLOSE_S = 10.0  # a server that was told to stop accepts connections for at most so long

_Hook = Callable[[], Awaitable[None]] | None


def bind(host: str, port: int, *, key: str | None, what: str) -> socket.socket:
    """Bind a socket to an address without listening; until `listen`, connections are refused instead of waiting.

    Raises `PortInUse` if another process listens there, and `ConfigError` if the address is not of this machine, or is
    beyond loopback without a `key`. `what` names the server in that message.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except OSError as error:
        raise ConfigError(f"{host} is not an address ({error}); use 127.0.0.1") from error
    if not key and not is_loopback(str(address[0])):
        raise ConfigError(f"listening on {host} would open {what} to the network; name a key file, or use 127.0.0.1")
    # The protocol is named because asyncio sets TCP_NODELAY only then; without it each answer waits 40 ms for an ACK.
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        # A server that was stopped a moment ago leaves connections in TIME_WAIT, which must not block its successor.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise _cannot_listen(host, port, error) from error
    return sock


def listen(host: str, port: int, *, key: str | None, what: str) -> socket.socket:
    """Bind a socket like `bind`, and start listening."""
    sock = bind(host, port, key=key, what=what)
    _begin(sock)
    return sock


def _begin(sock: socket.socket) -> None:
    try:
        sock.listen(_BACKLOG)
    except OSError as error:  # another process was quicker
        host, port = sock.getsockname()[:2]
        sock.close()
        raise _cannot_listen(host, port, error) from error


def _cannot_listen(host: str, port: int, error: OSError) -> ConfigError | PortInUse:
    if error.errno == errno.EADDRINUSE:
        return PortInUse(
            f"another process listens on {host}:{port}; stop it, or choose another port (0 takes a free one)"
        )
    return ConfigError(f"cannot listen on {host}:{port} ({error.strerror}); choose another address")


def is_loopback(address: str) -> bool:
    """Whether an IP address is a loopback address, which only programs on this machine can reach."""
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def url_of(host: str, sock: socket.socket) -> str:
    """Return the URL `http://HOST:PORT` at which programs on this machine reach a bound socket."""
    # 0.0.0.0 and :: stand for every interface: addresses to listen on, not to connect to.
    here = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    shown = f"[{here}]" if ":" in here else here
    return f"http://{shown}:{sock.getsockname()[1]}"


def serve(
    app: Callable[..., Any],
    sock: socket.socket,
    *,
    drain_s: float,
    on_ready: Callable[[], None] | None = None,
    stop: threading.Event | None = None,
    before: _Hook = None,
    may_close: Callable[[], bool] = lambda: True,
    after: _Hook = None,
    keep_alive_s: int = 5,
    lifespan: Literal["on", "off"] = "off",
    log_level: str | None = "critical",
    date_header: bool = False,
    certificate: tuple[Path, Path] | None = None,
) -> None:
    """Serve an ASGI application until SIGTERM, SIGINT or `stop`; then finish running requests and return.

    Args:
        drain_s: seconds within which running requests may finish after the server was told to stop; at least 1.
        stop: the server ends when this event is set; for a server in a thread, which signals do not reach. A server
            that a signal ends sets it, before it closes any connection.
        before: runs on the event loop before the first request; `serve` raises its errors.
        may_close: asked again and again once the server was told to stop. Until it returns true, new connections are
            still accepted and requests answered, for ten seconds at most, or until a second interrupt.
        after: runs on the event loop after the last request, and also if `before` failed.
        certificate: the files of a certificate and of its key, for TLS.

    Raises:
        KeyboardInterrupt: SIGINT stopped the server; raised after running requests have finished.
    """
    serving: Any = partial(_Connection, {}, _connections())
    config = uvicorn.Config(
        _to_callers(app),
        http=serving,
        log_config=None,  # the process configures logging, not uvicorn
        log_level=log_level,
        access_log=False,  # addresses may hold secrets, such as the signed links of feedback
        proxy_headers=False,
        lifespan=lifespan,
        ws="none",
        server_header=False,
        date_header=date_header,
        timeout_graceful_shutdown=max(1, round(drain_s)),
        timeout_keep_alive=keep_alive_s,
        backlog=_BACKLOG,
        ssl_certfile=certificate[0] if certificate else None,
        ssl_keyfile=certificate[1] if certificate else None,
    )
    server = _Server(config, on_ready, stop or threading.Event(), may_close, before, after)
    server.run(sockets=[sock])
    if server.interrupted:
        raise KeyboardInterrupt


def _to_callers(app: Callable[..., Any]) -> Callable[..., Any]:
    """Return the application; what it sends to a caller who leaves at this very moment is dropped, and is no error."""

    async def served(scope: Any, receive: Any, send: Any) -> None:
        async def to_caller(message: Any) -> None:
            try:
                await send(message)
            except RuntimeError as error:
                if "the handler is closed" not in str(error):  # uvloop's words; uvicorn hears of it a moment later
                    raise
                send.__self__.disconnected = True  # of uvicorn's request, which then expects no more

        await app(scope, receive, to_caller)

    return served


def _connections() -> int:
    """Return how many connections may be open; raise this process's limit of open files, if it is low."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 < soft < 4 * _MOST_CONNECTIONS:
        soft = min(4 * _MOST_CONNECTIONS, hard) if hard > 0 else soft
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    # A request may need two more: a connection to upstream and one to the engine.
    return min(soft // 4, _MOST_CONNECTIONS) if soft > 0 else _MOST_CONNECTIONS


class _Connection(HttpToolsProtocol):
    """A caller's connection. One that answers no request just now makes room for others, the oldest first."""

    def __init__(self, idle: dict[Any, None], most: int, **given: Any) -> None:
        super().__init__(**given)
        self._idle, self._most = idle, most
        self._timer: asyncio.TimerHandle | None = None  # ends the connection
        self._in_header, self._received = True, 0

    def _must_go_on_within(self, seconds: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds is None else self.loop.call_later(seconds, self.transport.abort)

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._must_go_on_within(_HEADER_S)
        self._idle[self] = None
        if len(self.connections) > self._most:
            # Not a refusal of the newest: half a header on every connection would keep all others out.
            oldest = next(iter(self._idle))
            del self._idle[oldest]
            oldest.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._idle.pop(self, None)
        self._must_go_on_within(None)
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if not self._in_header:  # else the time runs since the connection was opened
            self._in_header, self._received = True, 0
            self._must_go_on_within(_HEADER_S)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._received += len(data)
        if self._received > _PART_BYTES and not self.transport.is_closing():
            if self._in_header:
                return self.send_400_response("The header is too large.")
            self._received = 0
            if self._timer is not None:
                self._must_go_on_within(_PART_S)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_header:  # else it is one behind the body, of which there may be any number
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if sum(len(name) + len(value) for name, value in self.headers) + len(self.url) > _PART_BYTES:
            raise ValueError("the header is too large")  # uvicorn answers 400
        self._in_header, self._received = False, 0
        self._must_go_on_within(_PART_S)
        self._idle.pop(self, None)
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._must_go_on_within(None)
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.transport.is_closing() and self.cycle.response_complete:
            self._idle[self] = None

    def pause_writing(self) -> None:
        super().pause_writing()
        self._must_go_on_within(_PART_S)  # a caller who does not read its answer

    def resume_writing(self) -> None:
        super().resume_writing()
        self._must_go_on_within(None)


class _Server(uvicorn.Server):
    """uvicorn that reports when it is up, returns on SIGTERM and can be stopped from another thread."""

    def __init__(
        self, config: uvicorn.Config, on_ready: Callable[[], None] | None, stop: threading.Event,
        may_close: Callable[[], bool], *hooks: _Hook,
    ) -> None:  # fmt: skip
        super().__init__(config)
        self.interrupted = False
        self._on_ready, self._stop, self._may_close = on_ready, stop, may_close
        self._before, self._after = hooks

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Run `before`, listen, and report that requests are answered."""
        try:
            await self._prepare()
        except BaseException:
            await self._wind_up()
            raise
        if self.should_exit:
            await self._wind_up()
            return
        for sock in sockets or ():
            _begin(sock)
        await super().startup(sockets)
        if self.started and self._on_ready is not None:
            self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Set `stop`, answer until `may_close`, finish running requests, then run `after`."""
        self._stop.set()
        try:
            until = time.monotonic() + _MAY_CLOSE_S
            while not self.force_exit and time.monotonic() < until and not self._may_close():
                await asyncio.sleep(0.05)
            await super().shutdown(sockets)
        finally:
            await self._wind_up()

    async def _prepare(self) -> None:
        if self._before is None:
            return
        # uvicorn looks at its flags only once it serves. Until then a signal must end `before`, which may take minutes.
        task = asyncio.ensure_future(self._before())
        while not task.done():
            await asyncio.wait((task,), timeout=0.1)
            if not task.done() and (self.should_exit or self._stop.is_set()):
                self.should_exit = True
                task.cancel()
        if not task.cancelled():
            task.result()

    async def _wind_up(self) -> None:
        if self._after is not None:
            await self._after()

    async def on_tick(self, counter: int) -> bool:
        """Take over `stop`; uvicorn calls this ten times a second."""
        self.should_exit |= self._stop.is_set()
        return await super().on_tick(counter)

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        """Handle SIGTERM and SIGINT; uvicorn's own version raises them again after draining and ends the process."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {sig: signal.signal(sig, self._on_signal) for sig in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for sig, handler in before.items():
                signal.signal(sig, handler)

    def _on_signal(self, sig: int, frame: Any) -> None:
        self.interrupted |= sig == signal.SIGINT
        self.handle_exit(sig, frame)
