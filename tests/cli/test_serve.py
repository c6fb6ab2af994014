"""`art-patch serve` beside others of its kind, and beside those who do it harm: real processes, a real store."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
from typer.testing import CliRunner

from art_patch._lib.key_files import admin_key
from art_patch._lib.process import owning
from art_patch.cli.app import app
from art_patch.pipeline import ServingUpkeep
from art_patch.pipeline.serving_upkeep import EVERY_S, MISSES
from art_patch.policies import base_fingerprint
from art_patch.serving import EmbeddedEngine, EngineClient
from art_patch.store import Store, open_store
from art_patch.types import UNREACHABLE, Call, Policy, Route, TrajectoryInfo
from tests.support.command_line import ENVIRONMENT, Serving, art_patch
from tests.support.engines import serve
from tests.support.proxies import until
from tests.support.servers import serving
from tests.support.tiny import make_tiny_adapter

OWN = "http://127.0.0.1:8/v1"
HELLO = [{"role": "user", "content": "hi"}]


@pytest.fixture
def store(tmp_path: Path, base: Path) -> Iterator[Store]:
    """Of a project whose champion is agent@1."""
    path = make_tiny_adapter(tmp_path / "default" / "adapters", base, "agent", 1)
    with closing(open_store(f"sqlite:///{tmp_path}/default/store.db")) as opened:
        sha256 = base_fingerprint(base)
        opened.ledger.add_base("agent@0", str(base.absolute()), sha256, who="test")
        candidate = Policy("agent@1", str(base.absolute()), sha256, "candidate", 1.0, str(path), "agent@0")
        opened.ledger.add_candidate(candidate, trained_on=[], who="test")
        opened.ledger.move("agent@1", "champion", who="test", reason="test")
        yield opened


def client(home: Path, server: Serving) -> EngineClient:
    """The job's."""
    return EngineClient(server.ready["base_url"], admin_key=admin_key(home / "default"))


def blind_post(url: str, path: str, body: dict[str, Any]) -> int:
    """What a web page may send without asking first."""
    headers = {"origin": "https://evil.example", "content-type": "text/plain"}
    request = urllib.request.Request(f"{url.removesuffix('/v1')}{path}", json.dumps(body).encode(), headers)
    with pytest.raises(urllib.error.HTTPError) as refusal, urllib.request.urlopen(request, timeout=30):
        pass
    with refusal.value:
        return refusal.value.code


@pytest.mark.slow
def test_who_must_serve_stays_or_comes_back(tmp_path: Path, base: Path, store: Store):
    """A web page changes nothing; what somebody with the key unloads is loaded again; promotions go on as before."""
    path = make_tiny_adapter(tmp_path / "default" / "adapters", base, "agent", 2, seed=2)
    candidate = Policy("agent@2", str(base), base_fingerprint(base), "candidate", 2.0, str(path), "agent@1")
    store.ledger.add_candidate(candidate, trained_on=[], who="test")
    server = Serving(base, tmp_path)
    try:
        url = server.ready["base_url"]
        assert blind_post(url, "/v1/unload_lora_adapter", {"lora_name": "agent@1"}) == 403
        with client(tmp_path, server) as job, EngineClient(url) as caller:
            assert caller.chat(model="agent@1", messages=HELLO, max_tokens=1)["model"] == "agent@1"
            job.unload("agent@1")
            until(lambda: "agent@1" in job.models())
            assert caller.chat(model="agent@1", messages=HELLO, max_tokens=1)["model"] == "agent@1"
            result = art_patch("promote", "agent@2", "--canary", "5", "--json", home=tmp_path)
            assert result.returncode == 0, result.stderr
            job.unload("agent@2")
            until(lambda: "agent@2" in job.models())
            result = art_patch("promote", "agent@2", "--json", home=tmp_path)
            assert (result.returncode, store.ledger.route().champion) == (0, "agent@2"), result.stderr
            assert job.models() == ["agent@0", "agent@1", "agent@2"]
        again = "must serve and was not loaded; it is loaded now"
        code, said = server.stop()
        assert (code, said.splitlines()) == (0, [f"agent@1 {again}", f"agent@2 {again}"])
    finally:
        server.stop()


BOT = """
import sys
import time
import openai
import art_patch as art

art.patch()
client = openai.OpenAI(api_key="k", base_url=sys.argv[1], max_retries=0)
for number in range(int(sys.argv[2])):
    with art.trajectory(session_id=f"visit {sys.argv[3]} {number}"):
        question = {"role": "user", "content": f"question {number}"}
        client.chat.completions.create(model="gpt-x", messages=[question], max_tokens=4)
        if number % 5 == 0:  # which no policy can answer
            client.chat.completions.create(model="gpt-x", messages=[question], store=True)
end = time.monotonic() + 60
while (found := art.status()).shadowed + found.shadow_skipped + found.shadow_failed < int(sys.argv[4]):
    assert time.monotonic() < end, found
    time.sleep(0.05)
assert found.shadowed or not int(sys.argv[4]), found
assert art.flush(30)
"""


@pytest.mark.slow
def test_a_base_learns_beside_upstream_until_it_takes_over(tmp_path: Path, base: Path):
    """With `--take-over` every call that a policy can answer goes to it, from the first one on."""

    def ask(calls: int, what: str, copies: int = 0) -> None:
        command = [sys.executable, "-c", BOT, upstream.url, str(calls), what, str(copies)]
        # A busy machine may take longer than .25 s to connect, after which a call rightly goes upstream.
        variables = {"ART_PATCH_HOME": str(tmp_path), "ART_PATCH_CONNECT_TIMEOUT_S": "20"}
        subprocess.run(command, env=ENVIRONMENT | variables, check=True, timeout=120)

    def answered(what: str) -> Counter[str | None]:
        with closing(open_store(f"sqlite:///{tmp_path}/default/store.db")) as opened:
            runs = [
                run for run in opened.read.recent(limit=500) if (run.info.session_id or "").startswith(f"visit {what}")
            ]
        return Counter(call.policy for run in runs for call in run.calls if call.shadow_of is None)

    with serving() as upstream:
        ask(5, "before")
        server = Serving(base, tmp_path)
        try:
            assert (server.ready["champion"], server.ready["learner"]) == (None, "agent@0")
            ask(20, "learning", copies=20)
            assert answered("learning") == {None: 24}
        finally:
            server.stop()
        server = Serving(base, tmp_path, "--take-over")
        try:
            assert (server.ready["champion"], server.ready["learner"]) == ("agent@0", None)
            ask(50, "taken over")
            assert answered("taken over") == {"agent@0": 50, None: 10}
        finally:
            server.stop()
        with closing(open_store(f"sqlite:///{tmp_path}/default/store.db")) as opened:
            opened.ledger.move("agent@0", "learner", who="test", reason="worse than upstream")
        server = Serving(base, tmp_path, "--take-over")  # as a service does that is restarted
        try:
            assert (server.ready["champion"], server.ready["learner"]) == (None, "agent@0")
        finally:
            server.stop()


def test_status_says_that_the_champion_is_not_loaded(tmp_path: Path, base: Path, store: Store):
    with serve(EmbeddedEngine.from_pretrained(base, adapters_root=tmp_path / "default" / "adapters")) as running:
        store.ledger.set_engine(f"{running.url}/v1", who="test")
        result = CliRunner().invoke(app, ["status", "--home", str(tmp_path)], env={"COLUMNS": "300"})
        assert f"{running.url}/v1 does not have agent@1 loaded: calls go upstream" in result.stdout
        running.client.load("agent@1")
        result = CliRunner().invoke(app, ["status", "--home", str(tmp_path)], env={"COLUMNS": "300"})
        assert f"{running.url}/v1 healthy" in result.stdout


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_when_the_newer_server_ends_the_older_one_takes_the_route(
    how: signal.Signals, tmp_path: Path, base: Path, store: Store
):
    """The newer one has a key of its callers, which lies elsewhere; whose champion the older one has never loaded."""
    key = tmp_path / "api.key"
    key.write_text("of-the-callers\n")
    key.chmod(0o600)
    older = Serving(base, tmp_path)
    newer: Serving | None = None
    try:
        made = (tmp_path / "default" / "admin.key").read_text()
        newer = Serving(base, tmp_path, "--api-key-file", str(key), "--name", "agent")
        copy = str(tmp_path / "default" / "engine.key")
        assert (store.ledger.route().base_url, store.ledger.route().key_file) == (newer.ready["base_url"], copy)
        path = make_tiny_adapter(tmp_path / "default" / "adapters", base, "agent", 2, seed=2)
        candidate = Policy("agent@2", str(base), base_fingerprint(base), "candidate", 2.0, str(path), "agent@1")
        store.ledger.add_candidate(candidate, trained_on=[], who="test")
        result = art_patch("promote", "agent@2", "--json", home=tmp_path)
        assert result.returncode == 0, result.stderr
        since = store.ledger.route().engine_since
        time.sleep(2 * MISSES * EVERY_S)  # the older one has looked
        assert (store.ledger.route().base_url, store.ledger.route().engine_since) == (newer.ready["base_url"], since)
        newer.stop(how)
        route = until(lambda: found if (found := store.ledger.route()).base_url == older.ready["base_url"] else None)
        assert (route.champion, route.key_file) == ("agent@2", None)
        with client(tmp_path, older) as job:
            assert job.chat(model="agent@2", messages=HELLO, max_tokens=1)["model"] == "agent@2"
        assert (tmp_path / "default" / "admin.key").read_text() == made
        _, said = older.stop()
        (line,) = [line for line in said.splitlines() if "took the route" in line]
        assert line.startswith(older.ready["base_url"])
        assert store.ledger.route().base_url is None
        assert store.verify() == []
    finally:
        older.stop()
        if newer is not None:
            newer.stop()


class Project:
    """What a keeper sees: its own server, which is well or not, and a route; and the servers that answer."""

    def __init__(self, store: Store, own: EngineClient) -> None:
        self.ledger = store.ledger
        with owning() as owner:
            me = store.servers.announce(OWN, owner, now=0.0)
        self.keeper = ServingUpkeep(store, own, me, self.take, search=True)
        self.taken = 0

    def take(self, before: Route) -> bool:
        self.taken += 1
        return self.ledger.set_engine(OWN, before=before, who="keeper")

    def after(self, looks: int) -> str | None:
        for _ in range(looks):
            self.keeper.look()
        return self.ledger.route().base_url


def test_who_has_the_route(tmp_path: Path, base: Path, store: Store):
    dead = "http://127.0.0.1:9/v1"
    with serve(EmbeddedEngine.from_pretrained(base, adapters_root=tmp_path / "default" / "adapters")) as running:
        project = Project(store, running.client)
        store.write([TrajectoryInfo("t", 1.0), Call("c", "t", 1.0, "m", ())])
        assert project.after(1) == OWN, "nobody had it"
        assert store.search.lag() == 0, "the search index is extended"
        with serving() as other:  # not of ours, and well
            store.ledger.set_engine(other.url, who="by hand")
            assert project.after(2 * MISSES) == other.url
        store.ledger.set_engine(dead, who="another machine")
        assert project.after(MISSES - 1) == dead
        assert project.after(1) == OWN
        store.ledger.set_engine(dead, who="another machine")
        assert project.after(3 * MISSES) == dead, "it is alive, and cannot be reached from here"
        store.ledger.set_engine(None, who="another machine")
        assert project.after(1) == OWN
        before = store.ledger.route()
        store.ledger.set_engine(dead, who="another machine")
        assert not store.ledger.set_engine(OWN, before=before, who="too late")
    store.ledger.set_engine(None, who="test")
    assert (project.after(2 * MISSES), project.taken) == (None, 3), "a server that is not well takes nothing"


def test_whatever_a_look_raises_the_next_one_comes(
    tmp_path: Path, base: Path, store: Store, caplog: pytest.LogCaptureFixture
):
    class Faulty(Project):
        def take(self, before: Route) -> bool:
            if not self.taken:
                self.taken = 1
                raise RuntimeError("a fault of ours")
            return super().take(before)

    stop = Event()
    with serve(EmbeddedEngine.from_pretrained(base, adapters_root=tmp_path / "default" / "adapters")) as running:
        thread = Thread(target=Faulty(store, running.client).keeper.keep, args=(stop,))
        thread.start()
        until(lambda: store.ledger.route().base_url == OWN)
        stop.set()
        thread.join()
    assert [record.exc_info is not None for record in caplog.records if "a fault of ours" in record.message] == [True]


@contextmanager
def http_server() -> Iterator[str]:
    """A server that answers every request with 501."""
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}).start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()


def test_a_server_that_has_ended_or_leaves_loses_the_route_at_once(tmp_path: Path, base: Path, store: Store):
    """Also the server whose process lives, but which is not well; it has looks until it is well again."""
    with (
        serve(EmbeddedEngine.from_pretrained(base, adapters_root=tmp_path / "default" / "adapters")) as running,
        serving() as well,
        http_server() as unwell,
        owning() as owner,
    ):
        project, address = Project(store, running.client), well.url
        ended = store.servers.announce(address, replace(owner, id="ended", started="1"), now=1.0)
        store.ledger.set_engine(address, who="test")
        assert project.after(1) == OWN
        assert ended not in store.servers.all()
        lives = store.servers.announce(address, owner, now=2.0)
        store.ledger.set_engine(address, who="test")
        assert project.after(2 * MISSES) == address
        store.servers.renew(lives, leaving=True, now=3.0)
        assert project.after(1) == OWN
        assert [server.base_url for server in store.servers.all()] == [address, OWN], "it answers still"
        store.servers.announce(unwell, replace(owner, id="other", boot="another machine"), now=4.0)
        store.ledger.set_engine(unwell, who="test")
        assert project.after(MISSES - 1) == unwell
        assert project.after(1) == OWN


TALKER = """
import json
import pathlib
import sys
import time
import openai
import art_patch as art

art.patch()
client = openai.OpenAI(api_key="k", base_url=sys.argv[1], max_retries=0)
failed = 0
while not pathlib.Path(sys.argv[2]).exists():
    try:
        client.chat.completions.create(model="gpt-x", messages=[{"role": "user", "content": "hi"}], max_tokens=2)
    except openai.OpenAIError:
        failed += 1
    time.sleep(0.02)
assert art.flush(30)
print(failed)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("ends", ["the newer", "the older"])
def test_of_two_servers_either_may_end_under_traffic(
    ends: str, how: signal.Signals, tmp_path: Path, base: Path, store: Store
):
    """No call fails. If the server is told to stop, none finds that nobody is there."""

    def answered(server: Serving) -> None:
        since = time.time()
        until(lambda: store.ledger.route().base_url == server.ready["base_url"])
        until(lambda: [call for run in store.read.recent(limit=9) for call in run.calls if is_its(call, since)])

    def is_its(call: Any, since: float) -> bool:
        return call.started_at > since and call.policy == "agent@1"

    def states() -> dict[str, str]:
        facts = json.loads(art_patch("status", "--json", home=tmp_path).stdout)
        return {server["base_url"]: server["state"] for server in facts["servers"]}

    older, newer = Serving(base, tmp_path), Serving(base, tmp_path)
    enough, talker = tmp_path / "enough", None
    try:
        with serving() as upstream:
            talker = subprocess.Popen(
                [sys.executable, "-c", TALKER, upstream.url, str(enough)],
                env=ENVIRONMENT | {"ART_PATCH_HOME": str(tmp_path)}, stdout=subprocess.PIPE, text=True,
            )  # fmt: skip
            answered(newer)
            assert states() == {newer.ready["base_url"]: "has the route", older.ready["base_url"]: "stands by"}
            assert "stands by" in art_patch("status", home=tmp_path).stdout
            if ends == "the newer":
                newer.stop(how)
                answered(older)
            else:
                older.stop(how)
                answered(newer)
            left = older if ends == "the newer" else newer
            until(lambda: states() == {left.ready["base_url"]: "has the route"})
            enough.touch()
            said, _ = talker.communicate(timeout=60)
            assert said == "0\n"
            # A machine that is busy may time out, which is another reason.
            reasons = Counter(call.fallback for run in store.read.recent(limit=99_999) for call in run.calls)
            assert how is signal.SIGKILL or UNREACHABLE not in reasons, reasons
            left.stop()
            assert (store.ledger.route().base_url, store.servers.all(), store.verify()) == (None, (), [])
    finally:
        if talker is not None:
            talker.kill()
            talker.wait()
        older.stop()
        newer.stop()


def test_a_learner_whose_files_are_gone_keeps_no_server_from_starting(tmp_path: Path, base: Path, store: Store):
    """Nobody waits for its answers, and a canary beside it may be fine."""
    store.ledger.move("agent@1", "learner", who="test", reason="test")
    shutil.rmtree(tmp_path / "default" / "adapters" / "agent@1")
    server = Serving(base, tmp_path)
    try:
        assert (server.ready["champion"], server.ready["learner"], server.ready["models"]) == (
            None,
            "agent@1",
            ["agent@0"],
        )
        told = " ".join(art_patch("doctor", home=tmp_path).stdout.split())
        assert "does not serve agent@1, which learns" in told
    finally:
        server.stop()
