"""Training steps as MLflow's runs: one run a policy, in an experiment of the project's name.

A run has the policy's name, and the tag `art_patch.policy`, by which it is found again. It holds

- metrics: those of the policy at its step, and `update/...` of each optimizer step,
- parameters: the settings of the update; tags: base, parent and state,
- an artifact: the adapter's manifest, which names the base and the hash of every file.

A metric that changed is logged once more, and MLflow shows the later value. Runs of the agent go to MLflow as traces,
over OTLP. `uri` is MLflow's: an address of its server, or `sqlite:////absolute/mlflow.db`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlflow import MlflowClient  # pyright: ignore[reportMissingImports] - not in the tests' own environment
from mlflow.entities import Metric, Param, RunTag  # pyright: ignore[reportMissingImports]
from mlflow.exceptions import MlflowException  # pyright: ignore[reportMissingImports]

from art_patch.errors import TrackerError
from art_patch.policies import MANIFEST
from art_patch.trackers.episodes import Item, TrainingStep, without_login
from art_patch.types import Policy

POLICY_TAG = "art_patch.policy"

_BATCH = 100  # parameters and tags that MLflow takes at once; of metrics it takes more


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of one of MLflow's runs; `metrics` are name, value, step."""

    policy: Policy
    metrics: Sequence[tuple[str, float, int]] = ()
    params: dict[str, str] = field(default_factory=dict[str, str])
    tags: dict[str, str] = field(default_factory=dict[str, str])
    files: Sequence[Path] = ()


class Mlflow:
    """An MLflow tracking server or database."""

    name = "mlflow"

    def __init__(self, uri: str, *, experiment: str, clock: Callable[[], float] = time.time) -> None:
        """Make the client; the experiment is made when there is something to write.

        Args:
            uri: an address, or the URL of a database.
            experiment: name of the experiment, here that of the project.
            clock: seconds since the epoch; of two values at the same step MLflow shows the later one.
        """
        self.target = f"mlflow {without_login(uri)} {experiment}"
        self._experiment = experiment
        self._clock = clock
        self._client: Any = MlflowClient(tracking_uri=uri)

    def of_step(self, step: TrainingStep) -> Iterable[Item]:
        """Return the metrics, the history, the settings, the state and the manifest."""
        policy, key = step.policy, f"policy:{step.policy.name}"
        yield Item(f"{key}:run", "", _Part(policy, params=dict(step.params), tags=_about(policy)))
        yield Item(f"{key}:state", policy.state, _Part(policy, tags={"art_patch.state": policy.state}))
        for name, value in step.metrics.items():
            yield Item(f"{key}:{name}", repr(value), _Part(policy, metrics=[(name, value, policy.step)]))
        if step.history:
            rows = [(f"update/{name}", value, at) for at, row in enumerate(step.history) for name, value in row.items()]
            yield Item(f"history:{policy.name}", str(len(step.history)), _Part(policy, metrics=rows))
        manifest = None if policy.path is None else Path(policy.path) / MANIFEST
        if manifest is not None and manifest.is_file():
            yield Item(f"{key}:manifest", "", _Part(policy, files=[manifest]))

    def write(self, items: Sequence[Item]) -> None:
        """Log items.

        Raises:
            TrackerError: MLflow cannot be reached, or refused.
        """
        parts: dict[str, list[_Part]] = {}
        for item in items:
            part: _Part = item.payload
            # By run, because finding a run takes a request.
            parts.setdefault(part.policy.name, []).append(part)
        try:
            experiment = self._found_experiment()
            for name, some in parts.items():
                self._log(self._found_run(experiment, name, some[0].policy), some)
        except (MlflowException, OSError) as error:
            raise TrackerError(f"{self.target} refused: {error}; look at the address, then send again") from error

    def _found_experiment(self) -> str:
        known = self._client.get_experiment_by_name(self._experiment)
        return self._client.create_experiment(self._experiment) if known is None else known.experiment_id

    def _found_run(self, experiment: str, name: str, policy: Policy) -> str:
        # The name stands in a filter of MLflow's own query language.
        quoted = name.replace("'", "\\'")
        known = self._client.search_runs([experiment], f"tags.`{POLICY_TAG}` = '{quoted}'", max_results=1)
        if known:
            return known[0].info.run_id
        at_ms = int(policy.created_at * 1000)
        run = self._client.create_run(experiment, start_time=at_ms, tags={POLICY_TAG: name}, run_name=name)
        # At once, because MLflow shows an open run as running until somebody ends it.
        self._client.set_terminated(run.info.run_id, end_time=at_ms)
        return run.info.run_id

    def _log(self, run: str, parts: Sequence[_Part]) -> None:
        at_ms = int(self._clock() * 1000)
        metrics = [Metric(name, value, at_ms, step) for part in parts for name, value, step in part.metrics]
        params = [Param(name, value) for part in parts for name, value in part.params.items()]
        tags = [RunTag(name, value) for part in parts for name, value in part.tags.items()]
        # One loop for all three lists: a slice beyond the end of the shorter ones is empty.
        for start in range(0, max(len(metrics), len(params), len(tags)), _BATCH):
            some = slice(start, start + _BATCH)
            self._client.log_batch(run, metrics=metrics[some], params=params[some], tags=tags[some])
        for file in (file for part in parts for file in part.files):
            self._client.log_artifact(run, str(file))


def _about(policy: Policy) -> dict[str, str]:
    found = {"base": policy.base, "base_sha256": policy.base_sha256, "parent": policy.parent, "path": policy.path}
    return {f"art_patch.{name}": value for name, value in found.items() if value is not None}
