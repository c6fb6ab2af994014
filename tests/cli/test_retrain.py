"""`art-patch retrain` as cron starts it: many at once, and what each way to end says."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from typer.testing import CliRunner

from art_patch._lib.key_files import made_key
from art_patch.cli.app import app
from art_patch.demo.judge import STAND_IN_MODEL, serve_stand_in_judge
from art_patch.errors import ConfigError, JudgeError, StoreError
from art_patch.serving import EmbeddedEngine
from art_patch.store import open_store
from tests.cli import retraining
from tests.support.cycles import Place
from tests.support.engines import serve
from tests.support.postgres import new_server


@contextmanager
def served(directory: Path, base: Path, url: str | None = None) -> Iterator[Path]:
    """A home with an engine and with traffic."""
    project = directory / "default"
    engine = EmbeddedEngine.from_pretrained(base, adapters_root=project / "adapters")
    with serve(engine, admin_key=made_key(project / "admin.key")) as running:
        place = Place(project, base, running.client, url)
        place.traffic()
        place.store.ledger.set_engine(f"{running.url}/v1", who="test")
        place.store.close()
        yield directory


@pytest.fixture
def home(tmp_path: Path, base: Path) -> Iterator[Path]:
    with served(tmp_path, base) as directory:
        yield directory


@pytest.fixture
def postgres_url() -> Iterator[str]:
    server = new_server()
    yield server.url(server.new_database())
    server.end()


def run(home: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    result = CliRunner().invoke(app, ["retrain", "--json", "--home", str(home), *arguments])
    return result.exit_code, json.loads(result.stdout) if result.exit_code in (0, 4) else {}


@pytest.mark.slow
@pytest.mark.parametrize("where", ["one home", "ten homes"])
def test_of_ten_that_start_at_once_one_runs_and_nine_say_so(
    where: str, tmp_path: Path, base: Path, request: pytest.FixtureRequest
):
    """In one home, over SQLite, the file lock decides; in ten, as ten machines over PostgreSQL, the lease does."""
    if where == "one home":
        homes, url = [tmp_path] * 10, f"sqlite:///{tmp_path}/default/store.db"
    else:
        homes, url = [tmp_path, *(tmp_path / f"{n}" for n in range(1, 10))], request.getfixturevalue("postgres_url")
    done = Event()

    def rule(_messages: object) -> float:
        assert done.wait(200)  # the one that runs goes on until the others have ended
        return 0.5

    with served(tmp_path, base, url), serve_stand_in_judge(rule) as judge_url:
        processes = multiprocessing.get_context("forkserver")
        processes.set_forkserver_preload(["tests.cli.retraining"])
        judge = ("--judge", STAND_IN_MODEL, "--judge-base-url", judge_url)
        arguments = ("--store", url, *judge, "--json", "--resample", "0")
        started = [processes.Process(target=retraining.retrain, args=(str(home), *arguments)) for home in homes]
        for process in started:
            process.start()
        ended = 0
        while ended < 9:
            ended = sum(process.exitcode is not None for process in started)
            started[ended % 10].join(0.1)
        done.set()
        for process in started:
            process.join(120)
    assert sorted(process.exitcode or 0 for process in started) == [0] + [5] * 9
    store = open_store(url)
    assert (store.verify(), store.leases.read("cycle").token, store.leases.read("cycle").owner) == ([], 1, None)
    store.close()
    assert len(list(tmp_path.rglob("cycles/*.json"))) == 1


def test_idle_only_looks_at_the_calls_and_leaves_a_report(home: Path):
    judge = ("--judge", "openai/none")
    code, report = run(home, *judge, "--idle-only", "--idle-minutes", "1e9")
    assert (code, report["outcome"], report["metrics"]) == (0, "not idle", {})
    assert "72 calls" in report["reason"]
    (kept,) = (home / "default" / "cycles").glob("*.json")
    assert json.loads(kept.read_text())["outcome"] == "not idle"
    priced = ("--judge", "openai/gpt-4o", "--budget-usd", "0.5")
    assert run(home, *priced, "--idle-only", "--idle-minutes", "1e9")[0] == 0


def test_a_limit_in_money_on_a_judge_without_a_price_is_refused_before_any_work(home: Path):
    unpriced = ("--judge", "openai/none", "--max-usd", "1")
    gates = ("--judge", "openai/gpt-4o", "--gate-judge", "openai/none", "--max-usd", "1")
    for command in (["retrain"], ["score", "--dry-run"], ["evaluate", "agent@0"]):
        for judge in (unpriced, gates) if command != ["score", "--dry-run"] else (unpriced,):
            result = CliRunner().invoke(app, [*command, "--home", str(home), *judge])
            assert isinstance(result.exception, JudgeError), result.output
            assert "the price of openai/none is unknown" in str(result.exception)
    with closing(open_store(f"sqlite:///{home}/default/store.db")) as store:
        assert not store.read.counts()["groups"], "nothing was grouped"
    assert not list((home / "default").glob("cycles/*"))


def test_a_way_to_promote_that_is_none_is_refused(home: Path):
    result = CliRunner().invoke(app, ["retrain", "--home", str(home), "--promotion", "perhaps"])
    assert "promotion" in str(result.exception)
    assert "auto" in str(result.exception)


def test_where_replays_begin_asks_for_replays(tmp_path: Path):
    result = CliRunner().invoke(app, ["retrain", "--home", str(tmp_path), "--replay-from", "last"])
    assert isinstance(result.exception, ConfigError)
    assert "--replay asks for them, such as --replay 3" in str(result.exception)


@pytest.mark.parametrize("named", [None, "option", "variable"])
def test_the_providers_answers_are_imitated_only_if_its_model_is_named(
    named: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Without a name the command ends before it opens a store; with one it finds that there is none."""
    more = ("--imitate-models", "gpt-x, qwen*") if named == "option" else ()
    if named == "variable":
        monkeypatch.setenv("ART_PATCH_IMITATE_MODELS", "gpt-x,qwen*")
    result = CliRunner().invoke(app, ["retrain", "--home", str(tmp_path), "--imitate-from", "0.8", *more])
    assert isinstance(result.exception, StoreError if named else ConfigError)
    assert named or "--imitate-models" in str(result.exception)
    assert not list(tmp_path.iterdir())
