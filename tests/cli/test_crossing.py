"""Two projects share a store, and no command of one reaches the other: every command that opens a store tries it.

Each command runs for `mine` in a store that `theirs` shares, and in one where `mine` is alone.
`tests/support/crossing.py` says when an attempt has crossed; a command returns what it prints, writes and sends.
"""

from __future__ import annotations

import gzip
import json
import re
import shlex
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from typer.testing import CliRunner

from art_patch.cli.app import app
from art_patch.store import open_store
from tests.support.command_line import commands_with
from tests.support.crossing import MARK, fill, rows_of
from tests.support.postgres import new_server

COMMANDS = (
    "status", "groups", "groups show zebra-run-group", "groups show shared-group", "history", "report", "analytics",
    "policies", "policies show zebra@1", "policies show agent@1",
    "reproduce zebra@1", "reproduce agent@1", "cycles", "cycles show c1", "days", "scenarios", "config --json",
    "trajectories list", "trajectories list --user u",
    "trajectories list --search okapi --sort latency", "trajectories list --search same --tool lookup",
    "trajectories list --sort reward", "trajectories list --model okapi-1.5 --slower-than 1ms --error x",
    "trajectories list --policy agent@0", "trajectories list --group zebra-run-group", "trajectories show zebra-run",
    "trajectories show zebra", "trajectories show shared", "trajectories show --session m",
    "diff agent@0 zebra@1", "diff agent@0 agent@1",
    "export out/all.jsonl", "export out/whole.jsonl --format trajectories --user u",
    "export out/good.jsonl --min-reward 0", "send tensorboard out/runs", "send wandb --offline out/wandb",
    "send otlp --endpoint {sink}", "send langfuse --base-url {sink}", "send mlflow --uri {sink}",
    "erase --user u --dry-run", "erase --trajectory zebra-run --dry-run", "store prune --keep 0 --dry-run",
    "store grant mine_app",
    "mode record", "promote zebra@1", "reject zebra@1 --reason bad", "policies export zebra@1 out/adapter",
    "policies push zebra@1 me/agent",
    "policies import out", "policies fork zebra@1 --as other", "train runs.jsonl", "watch --once",
    "feedback import scores.json", "import runs.jsonl",
    "feedback pull langfuse --base-url {sink}", "feedback pull langsmith --endpoint {sink}",
    "consent --user u --withdraw", "consent --user u --give",
    "evaluate zebra@1 --judge openai/x", "score --judge openai/x", "retrain", "reject agent@1 --reason bad",
    "promote agent@1", "rollback", "erase --trajectory zebra-run --yes", "erase --session nobody --yes",
    "erase --user u --yes", "store prune --keep 0 --yes",
)  # fmt: skip

OF_THE_STORE = ("store verify", "store stats", "store vacuum", "store backup copies/copy.db", "projects")
"""Their numbers, and the copy, are of all projects on purpose."""

STAYS = {"run", "proxy", "serve", "web", "feedback serve", "doctor", "cron install"}
"""Commands that run on, or only write down what will run."""

ON_A_SERVER = (
    "status", "history", "trajectories list", "trajectories show zebra-run", "export out/all.jsonl",
    "export out/whole.jsonl --format trajectories", "mode off", "promote zebra@1", "reject agent@1 --reason bad",
    "rollback", "feedback import scores.json", "erase --trajectory zebra-run --yes", "erase --user u --yes",
    "store prune --keep 0 --yes",
)  # fmt: skip

KEYS = ("LANGFUSE_PUBLIC_KEY", "LANGFUSE_SECRET_KEY", "LANGSMITH_API_KEY", "HF_TOKEN", "OPENAI_API_KEY")


class Sink:
    """A server that takes everything, and keeps what it was sent."""

    def __init__(self) -> None:
        received = self.received = [b""]

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                received.append(gzip.decompress(body) if body.startswith(b"\x1f\x8b") else body)
                self.send_response(200)
                self.send_header("content-length", "2")
                self.end_headers()
                self.wfile.write(b"{}")

            do_GET = do_POST

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()
        self.address = f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def sink() -> Iterator[Sink]:
    sink = Sink()
    yield sink
    sink.close()


def run(command: str, url: str, place: Path, sink: Sink, project: str = "mine") -> str:
    """What the command prints, its error, and what it wrote and sent, without what is another one each time."""
    sink.received.clear()
    words = [
        str(place / word) if word.startswith(("out/", "copies/")) or word in ("runs.jsonl", "scores.json") else word
        for word in shlex.split(command.format(sink=sink.address))
    ]
    options = ["--home", str(place), "--store", url, "--project", project]
    environment = dict.fromkeys(KEYS, "hf_x") | {"ART_PATCH_JUDGE_BASE_URL": "http://127.0.0.1:9/v1"}
    result = CliRunner().invoke(app, [*words, *options], env=environment)
    text = f"{result.output}{result.exception!r}".replace(str(place), "PLACE").replace(url, "STORE")
    written = [path.read_bytes() for path in sorted(place.glob("out/**/*")) if path.is_file()]
    mark = [what for what in (*written, *sink.received) if MARK.encode() in what]
    text = re.sub(r"[0-9.]+ (s|min|h|ms) ago|after [0-9.]+ s|[0-9]{4}-[0-9-]+[T ][0-9:.]+Z?", "then", text)
    return f"{text}{mark}"


def crossings(commands: tuple[str, ...], shared: str, tmp_path: Path, sink: Sink) -> tuple[dict[str, str], int]:
    """The commands that crossed, and how, and the number that were tried."""
    alone = f"sqlite:///{tmp_path}/alone.db"
    theirs = open_store(shared, project="theirs")
    fill(theirs, "zebra", MARK)
    for url in (shared, alone):
        mine = open_store(url, project="mine")
        fill(mine, "own", "mine")
        mine.close()
    sample = open_store(f"sqlite:///{tmp_path}/sample.db", project="mine")
    fill(sample, "zebra", "mine")  # runs with the ids of theirs
    sample.close()
    places = {url: tmp_path / name for url, name in ((shared, "shared"), (alone, "alone"))}
    for place in places.values():
        for folder in ("out", "copies"):
            (place / folder).mkdir(parents=True)
        (place / "scores.json").write_text(
            json.dumps([{"id": "1", "run_id": "zebra-run", "key": "thumbs", "score": 1}])
        )
        runs = ["export", str(place / "runs.jsonl"), "--format", "trajectories"]
        options = ["--home", str(place), "--store", f"sqlite:///{tmp_path}/sample.db", "--project", "mine"]
        assert CliRunner().invoke(app, [*runs, *options]).exit_code == 0
    assert MARK in run("trajectories list", shared, places[shared], sink, "theirs"), "or nothing could be found"
    before, found, calls = rows_of(theirs, "theirs"), dict[str, str](), theirs.read.counts()["calls"]
    for command in commands:
        here, there = (run(command, url, place, sink) for url, place in places.items())
        if MARK in here and command not in OF_THE_STORE:
            found[command] = f"it says {here}"
        elif here != there and command not in OF_THE_STORE:
            found[command] = f"{here} and not {there}"
        elif rows_of(theirs, "theirs") != before:
            found[command] = "rows of theirs are changed"
    assert theirs.read.counts()["calls"] == calls
    theirs.close()
    return found, len(commands)


def test_every_command_with_a_store_is_tried():
    tried = {" ".join(words) for command in (*COMMANDS, *OF_THE_STORE) for words in _beginnings(command)}
    assert commands_with("store") - STAYS <= tried


def _beginnings(command: str) -> Iterator[list[str]]:
    words = command.split()
    return (words[:length] for length in (1, 2, 3))


def test_no_command_reaches_another_project(tmp_path: Path, sink: Sink, record_property):
    shared = f"sqlite:///{tmp_path}/shared.db"
    found, number = crossings((*OF_THE_STORE, *COMMANDS), shared, tmp_path, sink)
    assert found == {}
    record_property("figure", [f"commands that crossed, of {number}", "0", "0"])


def test_no_command_reaches_another_project_on_a_server(tmp_path: Path, sink: Sink, record_property):
    server = new_server()
    try:
        found, number = crossings(ON_A_SERVER, server.url(server.new_database()), tmp_path, sink)
    finally:
        server.end()
    assert found == {}
    record_property("figure", [f"commands that crossed on PostgreSQL, of {number}", "0", "0"])
