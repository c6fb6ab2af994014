"""Sends a store to W&B, offline and to a stand-in of its server, and reads it back. Prints one line of JSON.

Run in an environment that has W&B.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import wandb  # pyright: ignore[reportMissingImports]
from typer.testing import CliRunner

from art_patch.cli.app import app
from art_patch.types import SpanInfo
from tests.support.run_samples import tool_run
from tests.trackers.offline_runs import read_run
from tests.trackers.policies import filled, run
from tests.trackers.wandb_server import serving_wandb


def send(home: Path, *options: str) -> dict[str, Any]:
    words = ["send", "wandb", "--project", "shop", "--home", str(home), "--json", *options]
    return json.loads(CliRunner().invoke(app, words, catch_exceptions=False).stdout)


def anew(variables: dict[str, str]) -> None:
    """As in a new process: W&B reads its variables once."""
    wandb.teardown()
    os.environ.update(variables)


class Runs:
    """Offline runs below a directory, each read once."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._seen = directory / "wandb", set[Path]()

    def new(self) -> dict[str, dict[str, Any]]:
        found = {path for path in self._directory.glob("offline-run-*") if path not in self._seen}
        self._seen |= found
        runs = [read_run(path) for path in sorted(found)]
        assert len({one["name"] for one in runs}) == len(runs)
        return {one.pop("name"): one for one in runs}


def main(home: Path) -> None:
    with serving_wandb() as online, serving_wandb() as later:
        os.environ |= {"WANDB_BASE_URL": online.address, "WANDB_API_KEY": "a" * 40}
        told = sent(home)
        told["online"] = online.read()
        anew({"WANDB_BASE_URL": later.address})
        subprocess.run(
            [sys.executable, "-m", "wandb", "sync", "--yes"], cwd=home / "out", check=True, capture_output=True
        )
        told["synced"] = later.read()
        told["not answered"] = online.unknown + later.unknown
    anew({"WANDB_MODE": "offline", "WANDB_DIR": str(home / "by-mode"), "WANDB_PROJECT": "theirs"})
    told["by mode"] = send(home, "--entity", "team", "--content")
    told["texts"] = Runs(home / "by-mode").new()["shop"]
    anew({"WANDB_MODE": "disabled"})
    told["disabled"] = refused(home)
    anew({"WANDB_MODE": "online", "WANDB_API_KEY": ""})
    told["no key"] = refused(home)
    print(json.dumps(told))


def sent(home: Path) -> dict[str, Any]:
    """Send each state of the store to a directory and to a server."""
    store, out = filled(home), home / "out"
    fruit = tool_run("fruit", "plum", "31 cents", user_id="u1", started_at=80.0)
    step = SpanInfo("step", "fruit", "lookup", 80.5, ended_at=80.75, kind="tool", error="KeyError")
    store.write([fruit.info, *fruit.calls, step])
    runs, told, offline = Runs(out), dict[str, Any](), ("--offline", str(out))
    told["first"], told["whole"] = send(home, *offline), runs.new()
    told["first online"] = send(home)
    told["second"], told["nothing"] = send(home, *offline), runs.new()
    told["second online"] = send(home)
    run(store, "d", "agent@1", 0.0)
    told["third"], told["changed"] = send(home, *offline), runs.new()
    send(home)
    CliRunner().invoke(app, ["erase", "--user", "u1", "--yes", "--project", "shop", "--home", str(home)])
    told["after erasing"], told["left"] = send(home, *offline), runs.new()
    send(home)
    (home / "shop" / "adapters" / "agent@1" / "adapter_model.safetensors").write_text("weights")
    told["fourth"], told["weights"] = send(home, *offline, "--weights"), runs.new()
    send(home, "--weights")
    store.close()
    return told


def refused(home: Path) -> str:
    error = CliRunner().invoke(app, ["send", "wandb", "--project", "shop", "--home", str(home)]).exception
    return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
