"""Sends a store to MLflow and reads it back; run in an environment that has MLflow. Prints one line of JSON."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from mlflow import MlflowClient  # pyright: ignore[reportMissingImports]
from typer.testing import CliRunner

from art_patch.cli.app import app
from tests.trackers.policies import filled, run


def send(home: Path, *options: str) -> dict[str, Any]:
    words = ["send", "mlflow", "--uri", uri(home), "--project", "shop", "--home", str(home), "--json", *options]
    return json.loads(CliRunner().invoke(app, words, catch_exceptions=False).stdout)


def uri(home: Path) -> str:
    return f"sqlite:///{home}/mlflow.db"


def read(home: Path) -> dict[str, Any]:
    client: Any = MlflowClient(uri(home))
    experiment = client.get_experiment_by_name("shop")
    found: dict[str, Any] = {}
    for one in client.search_runs([experiment.experiment_id]):
        key = one.info.run_id
        tags = {name: value for name, value in one.data.tags.items() if name.startswith("art_patch.")}
        files = {
            file.path: Path(client.download_artifacts(key, file.path)).read_text()
            for file in client.list_artifacts(key)
        }
        history = {
            name: [(point.step, point.value) for point in client.get_metric_history(key, name)]
            for name in one.data.metrics
        }
        found[one.info.run_name] = {
            "status": one.info.status, "start_ms": one.info.start_time, "metrics": history,
            "params": dict(one.data.params), "tags": tags, "files": files,
        }  # fmt: skip
    return found


def main(home: Path) -> None:
    os.chdir(home)  # artifacts of a database are put into the working directory
    store = filled(home)
    first, whole, second = send(home), read(home), send(home)
    run(store, "d", "agent@1", 0.0)
    third, last = send(home), read(home)["agent@1"]["metrics"]["reward/mean"]
    store.close()
    print(json.dumps({"first": first, "whole": whole, "second": second, "third": third, "last": last}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
