"""What can be wrong when the server starts is one line that says what to do; what goes wrong later is a page."""

from __future__ import annotations

import socket
import sqlite3
import subprocess
from contextlib import closing
from pathlib import Path

import pytest

from art_patch.settings import Settings, load_settings
from art_patch.store import open_store
from art_patch.types import Policy
from tests.support.command_line import art_patch, says
from tests.support.web import csrf_of, served


@pytest.fixture
def shop(tmp_path: Path) -> Settings:
    settings = load_settings(home=tmp_path, project="shop")
    settings.directory.mkdir(parents=True)
    with closing(open_store(settings.store_url, project="shop")) as store:
        store.ledger.add_base("agent@0", "base", "0" * 64, who="ada")
        made = Policy("agent@1", "base", "0" * 64, "candidate", 1.0, "/nowhere", "agent@0")
        store.ledger.add_candidate(made, trained_on=[], who="ada")
    return settings


def web(settings: Settings, *more: str, project: str = "shop") -> subprocess.CompletedProcess[str]:
    known = ("web", "--project", project, "--port", "0", "--no-browser")
    return art_patch(*known, *more, home=settings.directory.parent)


def test_a_project_that_is_not_there(shop: Settings):
    says(web(shop, project="typo"), 18, "'typo'", "but of: shop; name one")
    says(web(shop, "--also", "typo"), 18, "'typo'", "but of: shop; name one")


def test_a_store_that_cannot_be_opened(shop: Settings):
    file = shop.directory / "store.db"
    file.write_bytes(b"no database at all " * 1_000)
    says(web(shop), 8, str(file))


@pytest.mark.parametrize(("revision", "code", "words"), [("9999", 12, "newer release"), ("0001", 8, "move it away")])
def test_a_store_of_another_release(shop: Settings, revision: str, code: int, words: str):
    with closing(sqlite3.connect(shop.directory / "store.db")) as raw, raw:
        raw.execute("UPDATE alembic_version SET version_num = ?", (revision,))
        if revision == "0001":  # of before the first release, which had other tables
            raw.execute("DROP TABLE projects")
    says(web(shop), code, words)


def test_a_port_that_is_taken(shop: Settings):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        says(web(shop, "--port", str(taken.getsockname()[1])), 10, "stop it, or choose another port")


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--host", "0.0.0.0"], "give --certificate and --certificate-key, or put a proxy"),
        (["--host", "no.such.name.invalid"], "is not an address"),
        (["--certificate", "cert.pem"], "belong together"),
        (["--certificate", "cert.pem", "--certificate-key", "key.pem"], "there is no file cert.pem"),
        (["--advertise", "http://art.example.com"], "is not an address with TLS"),
    ],
)
def test_an_address_that_would_not_be_safe(shop: Settings, more: list[str], words: str):
    says(web(shop, *more), 2, words)


def test_without_an_engine_the_pages_say_how_to_start_one(shop: Settings):
    with served(shop) as running, running.entered() as client:
        assert "<code>art-patch serve</code> starts one" in client.get("/p/shop/system/engine").text
        page = client.get("/p/shop/decide?what=shadow&policy=agent@1").text
        assert "no engine is running, so the policy cannot be proven; start `art-patch serve`" in page
        form = {"csrf": csrf_of(client.get("/p/shop/")), "who": "Ada", "what": "shadow", "policy": "agent@1"}
        refused = client.post("/p/shop/decide", data=form)
        assert (refused.status_code, "start `art-patch serve`" in refused.text) == (409, True)
        with socket.socket() as gone, closing(open_store(shop.store_url, project="shop")) as store:
            gone.bind(("127.0.0.1", 0))  # nothing listens there
            store.ledger.set_engine(f"http://127.0.0.1:{gone.getsockname()[1]}", who="ada")
            for path in ("", "system", "policies", "cycles", "decide?what=promote&policy=agent@1"):
                assert client.get(f"/p/shop/{path}").status_code == 200, path
            assert client.get("/status").json()["engine"]["healthy"] is False


def test_a_store_that_breaks_meanwhile_is_told_on_each_page(shop: Settings):
    with served(shop) as running, running.entered() as client:
        for file in shop.directory.glob("store.db*"):
            file.write_bytes(b"no database at all " * 1_000)
        for path in ("/p/shop/runs", "/p/shop/policies", "/api/v1/shop/groups", "/status"):
            answer = client.get(path)
            assert (answer.status_code, "store" in answer.text) == (503, True), (path, answer.text)
        assert client.get("/health").status_code == 200
