"""The log of `serve`, `proxy` and `retrain`: a line for each event, as text and as JSON, and nothing that is secret."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import socket
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from art_patch._lib.events import event, written
from art_patch.cli.logs import Log
from art_patch.errors import ConfigError, JudgeError
from art_patch.patching.routing.target import Breaker
from art_patch.policies import base_fingerprint
from art_patch.store import open_store
from art_patch.types import Policy
from tests.support.command_line import Serving, art_patch
from tests.support.proxies import Proxy, until
from tests.support.run_samples import fill
from tests.support.servers import Answer, serving
from tests.support.tiny import make_tiny_adapter


def url_of(home: Path) -> str:
    return f"sqlite:///{home}/default/store.db"


def events(stderr: str) -> list[dict[str, Any]]:
    """The lines of a log in JSON; each must be one."""
    lines = [json.loads(line) for line in stderr.splitlines()]
    for line in lines:
        assert line["host"] == socket.gethostname()
        assert line["process"] > 1
        assert line["time"].endswith("Z") and line["level"] in ("info", "warning", "error")
        assert line["logger"].startswith("art_patch") and line["message"]
    return lines


def test_a_server_tells_what_it_loads_and_what_others_decide(tmp_path: Path, base: Path):
    """Decisions are made by other processes, and are in the server's log all the same."""
    path = make_tiny_adapter(tmp_path / "default" / "adapters", base, "agent", 1)
    server = Serving(base, tmp_path, "--log-format", "json")
    with closing(open_store(url_of(tmp_path))) as store:
        policy = Policy("agent@1", str(base), base_fingerprint(base), "candidate", 1.0, str(path), "agent@0")
        store.ledger.add_candidate(policy, trained_on=[], who="test")
        for words in (
            ["promote", "agent@1", "--reason", "try it", "--who", "ada"],
            ["rollback", "--who", "ada"],
            ["mode", "record"],
        ):
            done = art_patch(*words, home=tmp_path)
            assert done.returncode == 0, done.stderr
    server.process.terminate()
    _, stderr = server.process.communicate(timeout=60)
    assert server.process.returncode == 0
    found = events("\n".join(line for line in stderr.splitlines() if line.startswith("{")))
    kinds = [line["event"] for line in found]
    assert (kinds[0], kinds[-1]) == ("ready", "end")
    assert {"load", "promotion", "rollback", "route"} <= set(kinds)
    promoted = next(line for line in found if line["event"] == "promotion")
    assert (promoted["policy"], promoted["from_state"], promoted["who"].split()[0]) == ("agent@1", "candidate", "ada")
    assert promoted["message"].endswith(": try it")
    loaded = next(line for line in found if line["event"] == "load")
    assert loaded["policy"] == "agent@1" and loaded["took_s"] > 0


def test_a_proxy_tells_when_its_breaker_opens_and_closes(tmp_path: Path):
    with serving() as provider, serving() as engine:
        with closing(open_store(url_of(tmp_path))) as store:
            store.ledger.add_base("agent@0", "tiny", "0" * 64, who="test")
            store.ledger.set_engine(engine.url, who="test")
        proxy = Proxy(tmp_path, provider.url, "--log-format", "json")
        try:
            engine.will(*[Answer(500, b"no")] * 5)
            for _ in range(5):
                assert proxy.chat()[0] == 200
            until(lambda: "breaker opened" in proxy.errors.read_text())
            with closing(open_store(url_of(tmp_path))) as store:
                store.ledger.set_mode("record", who="test")
            until(lambda: proxy.errors.read_text().count('"event": "route"') == 2)
        finally:
            assert proxy.stop() == 0
    kinds = [line["event"] for line in events(proxy.errors.read_text()) if "event" in line]
    # `patch()` reads the route for the first time before the proxy is ready.
    assert kinds == ["route", "ready", "breaker opened", "route", "end"]


def test_a_cycle_tells_when_it_begins_and_ends(tmp_path: Path):
    with closing(open_store(url_of(tmp_path))) as store:
        fill(store)
    done = art_patch("retrain", "--log-format", "json", "--json", home=tmp_path)
    assert json.loads(done.stdout)["outcome"] == "nothing to do"
    found = [line for line in done.stderr.splitlines() if line.startswith("{")]
    began, ended = events("\n".join(found))
    assert (began["event"], ended["event"], ended["outcome"]) == ("cycle begins", "cycle ended", "nothing to do")
    assert ended["took_s"] >= 0


def test_a_cycle_that_fails_ends_with_its_exit_code(tmp_path: Path):
    with closing(open_store(url_of(tmp_path))) as store:
        fill(store)
        store.ledger.add_base("agent@0", "tiny", "0" * 64, who="test")
    variables = {"ART_PATCH_LOG_FORMAT": "json", "ART_PATCH_JUDGE": "openai/none"}
    done = art_patch("retrain", home=tmp_path, **variables)
    assert done.returncode == 6, done.stderr
    found = events("\n".join(line for line in done.stderr.splitlines() if line.startswith("{")))
    assert [line.get("event") for line in found] == ["cycle begins", "cycle failed", "failed"]
    assert (found[1]["exit_code"], found[2]["exit_code"], found[2]["error"]) == (6, 6, "EngineError")
    assert "art-patch: " not in done.stderr.splitlines()[-1]
    quiet = art_patch("retrain", "--log-level", "error", home=tmp_path, ART_PATCH_JUDGE="openai/none")
    lines = [
        line for line in quiet.stderr.splitlines() if "art_patch.cycle: " in line or line.startswith("art-patch: ")
    ]
    assert [line.split()[1] for line in lines] == ["ERROR", "no"]


@pytest.mark.parametrize("option", ["--log-level", "--log-format"])
def test_an_unknown_word_is_a_usage_error(tmp_path: Path, option: str):
    done = art_patch("retrain", option, "loud", home=tmp_path)
    assert done.returncode == 2
    assert f"{option} 'loud' is not one of " in done.stderr


def lines_of(capsys: pytest.CaptureFixture[str], **options: str) -> list[str]:
    logger = logging.getLogger("art_patch.test")
    with Log(**options):
        logger.debug("of no use")
        logger.info("key sk-proj-abcdefghijklmnopqrstuvwx0123456789 and\x1b[31m red")
        logging.getLogger("elsewhere").info("what a library sends")
        try:
            try:
                raise ValueError("my card is 4111 1111 1111 1111")
            except ValueError as error:
                raise JudgeError("the judge is gone") from error
        except JudgeError:
            logger.exception("it failed")
    assert logging.getLogger("art_patch").level == logging.NOTSET
    return capsys.readouterr().err.splitlines()


def test_no_secret_and_no_text_of_a_user_is_in_a_line(capsys: pytest.CaptureFixture[str]):
    said = lines_of(capsys)
    text = "\n".join(said)
    assert "sk-proj" not in text and "4111" not in text and "\x1b" not in text
    assert "of no use" not in text and "what a library sends" not in text
    assert "JudgeError: the judge is gone" in text
    assert "\n    ValueError\n" in text
    (time, level, host, process, logger) = said[0].split()[:5]
    assert (time[-1], level, host, logger) == ("Z", "INFO", socket.gethostname(), "art_patch.test:")
    assert process.isdigit()
    for line in map(json.loads, lines_of(capsys, log_format="json")):
        assert "4111" not in str(line) and "sk-proj" not in str(line)
    assert len(lines_of(capsys, log_level="debug")) == len(said) + 1


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_an_exception_that_nobody_retrieved_is_logged_without_its_words(
    capsys: pytest.CaptureFixture[str], log_format: str
):
    async def forget() -> None:
        async def fail() -> None:
            raise ValueError("my card is 4111 1111 1111 1111")

        task = asyncio.create_task(fail(), name="fails")
        await asyncio.wait([task])

    with Log(log_format=log_format):
        asyncio.run(forget())
        gc.collect()
    said = capsys.readouterr().err
    assert "4111" not in said
    assert "Task exception was never retrieved" in said and "ValueError" in said


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        ('token is "abc123", not', 'token is "***", not'),
        ('password: hunter2", "event": "rollback', 'password: ***", "event": "rollback'),
        ("token: \nand \x1b[31m more", "token: \n*** \x1b[31m more"),
        ('api_key="abc', 'api_key="***'),
        ("it ends so: C:\\secret=\\", "it ends so: C:\\secret=***"),
    ],
)
def test_a_secret_in_a_reason_neither_breaks_a_line_in_json_nor_forges_a_field(
    capsys: pytest.CaptureFixture[str], reason: str, said: str
):
    """What an operator writes is in the line; a secret is taken out before it is quoted, not after."""
    with Log(log_format="json"):
        event(
            "test", "it is decided", event="decision", reason=reason, api_key="hunter2", secret=None, more=["Bearer x"]
        )
    (line,) = map(json.loads, capsys.readouterr().err.splitlines())
    assert (line["event"], line["reason"]) == ("decision", said)
    assert (line["api_key"], line["secret"], line["more"]) == ("***", None, ["Bearer ***"])


def test_a_breaker_tells_once_that_it_opens_and_that_it_closes(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    breaker = Breaker(failures=2, of="challenger")
    with written():
        breaker.succeeded()
        for now in (1.0, 2.0, 40.0):
            breaker.failed(now)
        breaker.succeeded()
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("WARNING", "the challenger fails; calls go upstream, and one tries it again in 30 s"),
        ("INFO", "the challenger answers again; it gets calls"),
    ]


def test_a_process_that_asked_for_no_log_gets_no_line(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.DEBUG)
    event("serve", "nobody asked")
    assert caplog.records == []
    with written():
        event("serve", "%s is loaded", "agent@1", policy="agent@1")
    assert [record.getMessage() for record in caplog.records] == ["agent@1 is loaded"]


def test_a_wrong_word_leaves_the_loggers_as_they_were():
    with pytest.raises(ConfigError), Log(log_level="loud"):
        pass
    assert logging.getLogger("art_patch").level == logging.NOTSET
