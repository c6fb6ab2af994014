"""A name that is mistyped is refused by every command that is not meant to begin a project, and makes nothing."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from typer.testing import CliRunner

from art_patch.cli.app import app
from art_patch.errors import ArtPatchError, WrongProject
from art_patch.store import open_store
from tests.support.command_line import commands_with

KNOWN = {
    "score": ["--judge", "openai/x"],
    "retrain": [],
    "status": [],
    "groups": [],
    "groups show": ["g1"],
    "cycles": [],
    "days": [],
    "scenarios": [],
    "cycles show": ["c1"],
    "mode": ["record"],
    "promote": ["agent@1"],
    "rollback": [],
    "reject": ["agent@1", "--reason", "bad"],
    "watch": ["--once"],
    "history": [],
    "diff": ["agent@0", "agent@1"],
    "consent": ["--user", "u1", "--withdraw"],
    "report": [],
    "analytics": [],
    "export": ["out.jsonl"],
    "erase": ["--user", "u1", "--yes"],
    "evaluate": ["agent@1", "--judge", "openai/x"],
    "store verify": [],
    "store stats": [],
    "store vacuum": [],
    "store backup": ["copy.db"],
    "store prune": ["--keep", "1", "--yes"],
    "store grant": ["billing_app"],
    "feedback import": ["scores.jsonl"],
    "feedback pull langfuse": ["--base-url", "http://127.0.0.1:9"],
    "feedback pull langsmith": ["--endpoint", "http://127.0.0.1:9"],
    "send otlp": ["--endpoint", "http://127.0.0.1:9"],
    "send langfuse": [],
    "send tensorboard": ["runs"],
    "send mlflow": ["--uri", "http://127.0.0.1:9"],
    "send wandb": ["--offline", "wandb"],
    "policies": [],
    "policies show": ["agent@1"],
    "reproduce": ["agent@1"],
    "policies export": ["agent@1", "adapter"],
    "policies import": ["adapter"],
    "policies push": ["agent@1", "me/agent"],
    "policies fork": ["agent@1", "--as", "other"],
    "train": ["runs.jsonl"],
    "trajectories list": [],
    "trajectories show": ["t1"],
    "web": ["--port", "0", "--no-browser"],
}
"""Commands of a project that is there, with arguments that let each come as far as the store."""

BEGINS = {"run", "proxy", "serve", "import", "feedback serve"}
"""Commands that may be the first of a project."""

ELSEWHERE = {"config", "doctor", "cron install", "projects"}
"""Commands that name a store and no project of it: they look and tell, or write down what will run."""


def refusal(command: str, *more: str) -> ArtPatchError:
    keys = dict.fromkeys(("LANGFUSE_PUBLIC_KEY", "LANGFUSE_SECRET_KEY", "LANGSMITH_API_KEY", "HF_TOKEN"), "hf_x")
    result = CliRunner().invoke(app, [*command.split(), *KNOWN[command], *more], env=keys)
    assert isinstance(result.exception, ArtPatchError), (result.exit_code, result.output, result.exception)
    return result.exception


def test_every_command_that_opens_a_store_is_looked_at():
    assert commands_with("store") == KNOWN.keys() | BEGINS | ELSEWHERE


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with the project `shop`; what a command reads is there, too."""
    open_store(f"sqlite:///{tmp_path}/home/shop/store.db").close()
    (tmp_path / "scores.jsonl").write_text('[{"id": "1", "run_id": "t1", "key": "thumbs", "score": 1}]')
    monkeypatch.chdir(tmp_path)
    return tmp_path / "home"


@pytest.mark.parametrize("command", KNOWN)
def test_a_project_that_is_not_there_is_not_made(command: str, home: Path):
    error = refusal(command, "--home", str(home), "--project", "typo")
    assert (error.exit_code, "'typo'" in str(error), "but of: shop; name one" in str(error)) == (18, True, True), error
    assert [path.name for path in home.iterdir()] == ["shop"]


@pytest.mark.parametrize("command", KNOWN)
def test_a_project_that_a_shared_store_does_not_have_is_not_added(command: str, home: Path):
    url = f"sqlite:///{home}/shop/store.db"
    open_store(url, project="shop").close()
    for project in ([], ["--project", "billing"]):
        error = refusal(command, "--home", str(home), "--store", url, *project)
        assert (type(error), error.exit_code) == (WrongProject, 18), error
        name = project[-1] if project else "default"
        assert f"has no project '{name}', but: shop; name one of these with --project" in str(error)
    assert [path.name for path in home.iterdir()] == ["shop"]
    with closing(sqlite3.connect(home / "shop" / "store.db")) as raw:
        assert raw.execute("SELECT name FROM projects").fetchall() == [("shop",)]


@pytest.mark.parametrize("command", ["mode", "retrain"])
def test_a_store_that_is_not_there_is_not_made(command: str, home: Path):
    error = refusal(command, "--store", f"sqlite:///{home}/other.db")
    assert (error.exit_code, "there is no store at" in str(error)) == (19, True)
    assert [path.name for path in home.iterdir()] == ["shop"]
