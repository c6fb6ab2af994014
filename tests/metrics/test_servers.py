"""`/metrics`, `/livez` and `/readyz` of real `art-patch serve` and `proxy` processes."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from art_patch.metrics import CATALOGUE, ServerMetrics, StoreWatch
from art_patch.policies import base_fingerprint
from art_patch.serving import POLICY
from art_patch.settings import load_settings
from art_patch.store import Store, open_store
from art_patch.types import Policy, Route
from tests.support.command_line import Serving, warned
from tests.support.postgres import Server, new_server
from tests.support.proxies import Proxy, until
from tests.support.servers import serving
from tests.support.tiny import make_tiny_adapter

ASK = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}


def get(url: str, path: str, body: Any = None, **headers: str) -> tuple[int, str]:
    """Answer of the server at `url`, whose path is left out."""
    address = f"http://{url.split('/')[2]}{path}"
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        address, data, headers | ({} if body is None else {"content-type": "application/json"})
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def samples(url: str, **headers: str) -> dict[str, dict[str, float]]:
    """Samples by name, without the prefix, and by the values of their labels."""
    status, page = get(url, "/metrics", **headers)
    assert status == 200, page
    found: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(page):
        for each in family.samples:
            if each.name.startswith("art_patch_"):
                names = [value for key, value in sorted(each.labels.items()) if key != "project"]
                found.setdefault(each.name.removeprefix("art_patch_"), {})[" ".join(names)] = each.value
    return found


def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "api.key"
    path.write_text("of-the-callers\n")
    path.chmod(0o600)
    return path


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = new_server()
    yield server
    server.end()


@pytest.mark.slow
def test_a_scrape_of_a_server_goes_on_while_the_database_is_down(
    tmp_path: Path, base: Path, server: Server, monkeypatch: pytest.MonkeyPatch
):
    url = server.url(server.new_database())
    with closing(open_store(url, project="default")) as store:
        store.ledger.add_base("agent@0", str(base.absolute()), base_fingerprint(base), who="test")
    serve = Serving(base, tmp_path, "--store", url, "--api-key-file", str(key_file(tmp_path)))
    try:
        here, key = serve.ready["base_url"], {"authorization": "Bearer of-the-callers"}
        for path in ("/livez", "/readyz"):
            assert get(here, path) == (200, "ok\n"), "a kubelet has no key"
        assert get(here, "/metrics")[0] == 401
        for body in (
            ASK | {"model": "agent@0"},
            ASK | {"model": "agent@0"},
            ASK | {"model": "agent@7"},
            {"model": "é"},
        ):
            get(here, "/v1/chat/completions", body, **key)
        get(here, "/v1/chat/completions", ASK)
        found = until(lambda: each if "calls_total" in (each := samples(here, **key)) else None)
        assert found["server_requests_total"] == {"200 agent@0": 2.0, "404 ": 1.0, "400 ": 1.0, "401 ": 1.0}
        assert found["server_request_duration_seconds_count"] == {"agent@0": 2.0, "": 3.0}
        assert found["server_policy_loaded"] == {"agent@0": 1.0}
        assert (found["server_ready"], found["server_running"], found["server_waiting"]) == ({"": 1}, {"": 0}, {"": 0})
        assert (found["store_up"], found["engine_up"], found["policies"]) == ({"": 1}, {"": 1}, {"champion": 1})
        assert found["store_age_seconds"][""] < 60
        known = {name for metric in CATALOGUE.values() for name in metric.exposed}
        assert {f"art_patch_{name}" for name in found} <= known, "every name is in the catalogue"
        server.stop("immediate")
        found = until(lambda: each if not (each := samples(here, **key))["store_up"][""] else None)
        assert "calls_total" not in found
        assert found["server_requests_total"]["200 agent@0"] == 2.0
        age = found["store_age_seconds"][""]
        until(lambda: samples(here, **key)["store_age_seconds"][""] > age)
        assert get(here, "/readyz") == (200, "ok\n"), "calls are answered all the same"
        server.start()
        found = until(lambda: each if "calls_total" in (each := samples(here, **key)) else None)
        assert found["store_up"] == {"": 1}
    finally:
        code, said = serve.stop()
    assert code == 0
    assert said.count("the store cannot be read for metrics") == 1, said


@pytest.mark.slow
def test_a_proxy_tells_of_itself(tmp_path: Path):
    with serving() as upstream:
        proxy = Proxy(tmp_path, upstream.url, "--key-file", str(key_file(tmp_path)))
        try:
            for path in ("/livez", "/readyz"):
                assert get(proxy.url, path) == (200, "ok\n")
            key = {"x-art-key": "of-the-callers"}
            assert get(proxy.url, "/metrics")[0] == 401
            assert get(proxy.url, "/metrics", authorization="Bearer sk-of-a-provider")[0] == 401
            get(proxy.url, "/v1/chat/completions", ASK | {"model": "gpt-x"}, **key)
            get(proxy.url, "/v1/models", **key)
            get(proxy.url, "/v1/chat/completions", ASK)
            bearer = {"authorization": "Bearer of-the-callers"}
            found = until(
                lambda: each if 1.0 in (each := samples(proxy.url, **bearer))["app_recorded_total"].values() else None
            )
            assert samples(proxy.url, **key).keys() == found.keys()
            chat = "/v1/chat/completions"
            paths = {key: value for key, value in found["proxy_requests_total"].items() if "other" not in key}
            assert paths == {f"200 {chat}": 1.0, f"401 {chat}": 1.0}
            assert found["proxy_request_duration_seconds_count"] == {chat: 2.0, "other": 1.0}
            (process,) = found["app_queued"]
            assert process.endswith(f":{proxy.process.pid}"), "as it reports to the store"
            assert found["app_breaker_open"] == {f"challenger {process}": 0.0, f"engine {process}": 0.0}
            known = {name for metric in CATALOGUE.values() for name in metric.exposed}
            assert {f"art_patch_{name}" for name in found} <= known
        finally:
            assert proxy.stop() == 0
    assert not warned(proxy.errors.read_text())


class OneEngine:
    """A stand-in for an engine, which says what a test wants."""

    healthy = True

    def __init__(self) -> None:
        self.loaded = ["agent@0"]

    def policies(self) -> list[str]:
        return self.loaded

    def stats(self) -> dict[str, int]:
        return {"running": 2, "ready": 1, "starting": 1, "restarts": 3}


def test_why_a_server_is_not_ready_without_any_name(tmp_path: Path):
    engine, watch, stop = OneEngine(), StoreWatch(load_settings(home=tmp_path)), Event()
    monitor = ServerMetrics("default", engine, watch, stop)
    assert monitor.why_not_ready() is None, "the store was not read yet, and the base answers"
    watch.route = Route(champion="agent@3")
    assert monitor.why_not_ready() == "the policy that must serve is not loaded here"
    engine.loaded.append("agent@3")
    assert monitor.why_not_ready() is None
    engine.healthy = False
    assert monitor.why_not_ready() == "the engine does not answer"
    stop.set()
    assert monitor.why_not_ready() == "the server stops"
    page = monitor.text().decode()
    for line in (
        'art_patch_server_ready{project="default"} 0.0',
        'art_patch_server_policy_loaded{policy="agent@3",project="default"} 1.0',
        'art_patch_server_replicas{project="default",state="starting"} 1.0',
        'art_patch_server_replica_restarts_total{project="default"} 3.0',
    ):
        assert f"{line}\n" in page
    assert "store_up" not in page, "nobody has looked yet"


def test_a_caller_makes_no_series(tmp_path: Path):
    monitor = ServerMetrics("default", OneEngine(), StoreWatch(load_settings(home=tmp_path)), Event())
    for number in range(100):
        monitor.observe({"path": "/v1/chat/completions", POLICY: f"agent@9{number}"}, 404, 0.1)
        monitor.observe({"path": f"/{number}"}, 404, 0.1)
    monitor.observe({"path": "/v1/chat/completions", POLICY: "agent@0"}, 0, 0.1)  # who left before the answer
    lines = [
        line for line in monitor.text().decode().splitlines() if line.startswith("art_patch_server_requests_total")
    ]
    assert lines == [
        'art_patch_server_requests_total{code="404",policy="",project="default"} 100.0',
        'art_patch_server_requests_total{code="499",policy="agent@0",project="default"} 1.0',
    ]


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


@pytest.mark.slow
def test_a_server_that_lacks_the_champion_is_not_ready(tmp_path: Path, base: Path, store: Store):
    serve = Serving(base, tmp_path)
    try:
        here = serve.ready["base_url"]
        assert get(here, "/readyz") == (200, "ok\n")
        broken = Policy(
            "agent@2", str(base), base_fingerprint(base), "candidate", 2.0, str(tmp_path / "none"), "agent@1"
        )
        store.ledger.add_candidate(broken, trained_on=[], who="test")
        store.ledger.move("agent@2", "champion", who="test", reason="by a mistake")
        assert until(lambda: answer if (answer := get(here, "/readyz"))[0] != 200 else None) == (
            503,
            "the policy that must serve is not loaded here\n",
        )
        assert get(here, "/livez") == (200, "ok\n")
    finally:
        serve.stop()
