"""Writes the metrics of policies and of their updates to TensorBoard and MLflow; runs of the agent are not written.

A metric that has changed, such as the mean reward of a policy that still serves, is written again at the same step;
both tools show the later value.
"""

import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from art_patch import policies
from art_patch.errors import TrackerError
from art_patch.trackers.episodes import Item, TrainingStep, files_of, without_login
from art_patch.types import Policy


@dataclass(frozen=True, slots=True)
class _Scalar:
    run: str
    tag: str
    value: float
    step: int
    at: float


class TensorBoard:
    """The tracker that writes TensorBoard's event files to a directory.

    Its run `NAME` has one point for each policy: the metrics of `NAME@STEP` at STEP. Its run `NAME@STEP` has one point
    for each optimizer step of that policy's update, as `update/loss` and so on.
    """

    name = "tensorboard"

    def __init__(self, directory: Path) -> None:
        """Import TensorBoard. The directory is made when there is something to write."""
        from tensorboard.summary import Writer

        self._writer = Writer
        self._directory = directory.absolute()
        self.target = f"tensorboard {self._directory}"

    def of_step(self, step: TrainingStep) -> Iterable[Item]:
        """Return one item for each metric of the policy, and one for the metrics of all its optimizer steps."""
        policy = step.policy
        for name, value in step.metrics.items():
            scalar = _Scalar(policy.model, name, value, policy.step, policy.created_at)
            yield Item(f"policy:{policy.name}:{name}", repr(value), [scalar])
        if step.history:
            scalars = [
                _Scalar(policy.name, f"update/{name}", value, number, policy.created_at)
                for number, metrics in enumerate(step.history)
                for name, value in metrics.items()
            ]
            # An update's history only grows, so its length tells whether it changed.
            yield Item(f"history:{policy.name}", str(len(step.history)), scalars)

    def write(self, items: Sequence[Item]) -> None:
        """Write new event files beside the existing ones."""
        scalars: list[_Scalar] = [scalar for item in items for scalar in item.payload]
        try:
            with ExitStack() as stack:
                # Each `Writer` begins a new file, as event files are not appended to; TensorBoard reads all of them.
                # `@` and spaces stay readable; other characters that a file's name may not hold are quoted.
                runs = {
                    run: stack.enter_context(closing(self._writer(str(self._directory / quote(run, safe="@ ")))))
                    for run in sorted({scalar.run for scalar in scalars})
                }
                for one in scalars:
                    runs[one.run].add_scalar(one.tag, one.value, one.step, wall_time=one.at)
        except OSError as error:
            raise TrackerError(f"{self.target} cannot be written: {error}; choose another directory") from error


POLICY_TAG = "art_patch.policy"

_BATCH = 100  # parameters and tags that MLflow takes at once; of metrics it takes more


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of one run in MLflow; `metrics` are triples of name, value and step."""

    policy: Policy
    metrics: Sequence[tuple[str, float, int]] = ()
    params: dict[str, str] = field(default_factory=dict[str, str])
    tags: dict[str, str] = field(default_factory=dict[str, str])
    files: Sequence[Path] = ()


class Mlflow:
    """The tracker that writes to an MLflow server or database: one MLflow run for each policy.

    A run has the policy's name, and a tag `art_patch.policy`, by which it is found again. It holds the policy's metrics
    at its step, `update/...` for each optimizer step, the settings of the update as parameters, base, parent and state
    as tags, and the adapter's manifest as an artifact. Runs of the agent go to MLflow as traces over OTLP.
    """

    name = "mlflow"

    def __init__(self, uri: str, *, experiment: str) -> None:
        """Make MLflow's client. The experiment is made when there is something to write.

        `uri` is a server or a database such as `sqlite:////absolute/mlflow.db`. Of two values at a step, MLflow shows
        the later.
        """
        from mlflow import MlflowClient  # pyright: ignore[reportMissingImports] - not in the tests' own environment

        self.target = f"mlflow {without_login(uri)} {experiment}"
        self._experiment = experiment
        self._client: Any = MlflowClient(tracking_uri=uri)

    def of_step(self, step: TrainingStep) -> Iterable[Item]:
        """Return items for the policy's metrics, update history, settings, state and manifest."""
        policy, key = step.policy, f"policy:{step.policy.name}"
        about = {"base": policy.base, "base_sha256": policy.base_sha256, "parent": policy.parent, "path": policy.path}
        tags = {f"art_patch.{name}": value for name, value in about.items() if value is not None}
        yield Item(f"{key}:run", "", _Part(policy, params=dict(step.params), tags=tags))
        yield Item(f"{key}:state", policy.state, _Part(policy, tags={"art_patch.state": policy.state}))
        for name, value in step.metrics.items():
            yield Item(f"{key}:{name}", repr(value), _Part(policy, metrics=[(name, value, policy.step)]))
        if step.history:
            rows = [(f"update/{name}", value, at) for at, row in enumerate(step.history) for name, value in row.items()]
            yield Item(f"history:{policy.name}", str(len(step.history)), _Part(policy, metrics=rows))
        if files := files_of(policy):
            yield Item(f"{key}:manifest", "", _Part(policy, files=files))

    def write(self, items: Sequence[Item]) -> None:
        """Write items to the runs of their policies."""
        from mlflow.exceptions import MlflowException  # pyright: ignore[reportMissingImports]

        parts: defaultdict[str, list[_Part]] = defaultdict(list)
        for item in items:
            parts[item.payload.policy.name].append(item.payload)  # by run, because finding a run takes a request
        try:
            known = self._client.get_experiment_by_name(self._experiment)
            experiment = known.experiment_id if known else self._client.create_experiment(self._experiment)
            for some in parts.values():
                self._log(self._found_run(experiment, some[0].policy), some)
        except (MlflowException, OSError) as error:
            raise TrackerError(f"{self.target} refused: {error}; look at the address, then send again") from error

    def _found_run(self, experiment: str, policy: Policy) -> str:
        name, at_ms = policy.name, int(policy.created_at * 1000)
        # The name stands in a filter of MLflow's own query language.
        quoted = name.replace("'", "\\'")
        known = self._client.search_runs([experiment], f"tags.`{POLICY_TAG}` = '{quoted}'", max_results=1)
        if known:
            return known[0].info.run_id
        run = self._client.create_run(experiment, start_time=at_ms, tags={POLICY_TAG: name}, run_name=name)
        # At once, because MLflow shows an open run as running until somebody ends it.
        self._client.set_terminated(run.info.run_id, end_time=at_ms)
        return run.info.run_id

    def _log(self, run: str, parts: Sequence[_Part]) -> None:
        from mlflow.entities import Metric, Param, RunTag  # pyright: ignore[reportMissingImports]

        at_ms = int(time.time() * 1000)
        metrics = [Metric(name, value, at_ms, step) for part in parts for name, value, step in part.metrics]
        params = [Param(name, value) for part in parts for name, value in part.params.items()]
        tags = [RunTag(name, value) for part in parts for name, value in part.tags.items()]
        # One loop for all three lists: a slice beyond the end of the shorter ones is empty.
        for start in range(0, max(len(metrics), len(params), len(tags)), _BATCH):
            some = slice(start, start + _BATCH)
            self._client.log_batch(run, metrics=metrics[some], params=params[some], tags=tags[some])
        for manifest in (file for part in parts for file in part.files):
            self._client.log_text(run, policies.manifest_to_share(manifest), manifest.name)
