"""Writes policies, updates and runs of the agent to Weights & Biases, as W&B runs in a group with the project's name.

| name of the W&B run | job type | content |
|---|---|---|
| `NAME` | `policies` | plots with a point for each policy at its `policy_step`: reward, gate, KL, loss; the champion |
| `NAME@STEP` | `update` | plots with a point for each optimizer step of the update; its settings; the adapter |
| the project's name | `episodes` | table `episodes` with a row for each run of the agent; `actions`, a row per tool |

Each adapter is uploaded as a version of the artifact `NAME`, of the type `model`, with the alias `step-STEP`. The
version holds the adapter's manifest, which names the base model and the hash of every file; with `weights` it also
holds the weights. If a metric has changed, a second point is written at the same step, and W&B shows the later one.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, TypeAlias, cast

import wandb  # pyright: ignore[reportMissingImports] - not in the tests' own environment

from art_patch import policies
from art_patch.errors import TrackerError
from art_patch.trackers import episodes as records
from art_patch.trackers.episodes import Cell, Episode, Item, TrainingStep
from art_patch.types import JSON, Policy

MOST_ROWS = 200_000  # limit of W&B for one table; the newest runs are kept

_FINISH_S = 600.0  # W&B sends in the background; if its queue is not empty after this time, the export fails
_Job: TypeAlias = Literal["policies", "update", "episodes"]
_AXES: Mapping[_Job, str] = {"policies": "policy_step", "update": "update_step"}


@dataclass(frozen=True, slots=True)
class _Part:
    job: _Job
    run: str
    points: Sequence[Mapping[str, float]] = ()
    config: JSON = field(default_factory=dict[str, Any])
    tables: Mapping[str, tuple[Sequence[str], Sequence[Sequence[Cell]]]] = field(default_factory=dict[str, Any])
    adapter: tuple[Policy, Sequence[Path]] | None = None


class Wandb:
    """The tracker that writes to a project in Weights & Biases, or to a directory that `wandb sync` sends later."""

    name = "wandb"

    def __init__(
        self,
        project: str,
        *,
        group: str,
        entity: str | None = None,
        offline: Path | None = None,
        content: bool = False,
        weights: bool = False,
    ) -> None:
        """Read W&B's own settings. Connections are made when something is written.

        Args:
            project: name of the project in W&B.
            group: name of the project in art_patch.
            entity: W&B's team or user; default: W&B's own setting.
            offline: directory for offline runs; default: W&B's mode and settings decide.
            content: whether the table of runs holds the messages of each run's last call.
            weights: whether all files of an adapter are sent, or only its manifest.
        """
        settings: Any = wandb.setup().settings
        if offline is None:
            # W&B itself would accept everything and keep nothing.
            if settings.mode == "disabled":
                raise TrackerError("WANDB_MODE is disabled, so W&B would take nothing; unset it, or say --offline DIR")
            if settings.mode in ("offline", "dryrun"):
                offline = Path(settings.root_dir)
        self._directory = None if offline is None else offline.absolute()
        place = records.without_login(settings.base_url) if self._directory is None else f"offline {self._directory}"
        entity = entity or settings.entity
        self.target = f"wandb {place} {project if entity is None else f'{entity}/{project}'}"
        self._project, self._entity, self._group = project, entity, group
        self._content, self._weights = content, weights
        self._summaries: dict[tuple[_Job, str], dict[str, Any]] = defaultdict(dict)
        self._rows: list[Sequence[Cell]] = []
        self._actions = records.ActionTable()

    def of_step(self, step: TrainingStep) -> Iterable[Item]:
        """Return items for the policy's metrics, update history, settings, state and adapter."""
        policy, key = step.policy, f"policy:{step.policy.name}"
        for name, value in step.metrics.items():
            point = {_AXES["policies"]: policy.step, name: value}
            yield Item(f"{key}:{name}", repr(value), self._part("policies", policy.model, points=[point]))
        if policy.state == "champion":
            self._summaries["policies", policy.model]["champion"] = policy.name
            yield Item(f"model:{policy.model}:champion", policy.name, self._part("policies", policy.model))
        if policy.parent is None:  # the base model, which no update made
            return
        self._summaries["update", policy.name]["state"] = policy.state
        train = cast("JSON", policy.metrics.get("train") or {})
        config = {**cast("JSON", train.get("config") or {}), **_about(policy)}
        yield Item(f"{key}:run", "", self._part("update", policy.name, config=config))
        yield Item(f"{key}:state", policy.state, self._part("update", policy.name))
        if step.history:
            points = [
                {_AXES["update"]: number, **{f"update/{name}": value for name, value in row.items()}}
                for number, row in enumerate(step.history)
            ]
            yield Item(f"history:{policy.name}", str(len(points)), self._part("update", policy.name, points=points))
        if files := records.files_of(policy, weights=self._weights):
            kind = "weights" if self._weights else "manifest"
            # Keyed by kind: after an export of manifests alone the weights can still be sent.
            yield Item(f"{key}:{kind}", "", self._part("update", policy.name, adapter=(policy, files)))

    def of_episode(self, episode: Episode) -> Iterable[Item]:
        """Return an item by which an erasure of the run finds W&B; `of_episodes` sends the row, with the table."""
        key, row = episode.trajectory.id, records.episode_row(episode, content=self._content)
        self._actions.add(episode)
        if len(self._rows) < MOST_ROWS:
            self._rows.append(row)
            yield Item(f"episode:{key}", _digest(row), None, key)

    def of_episodes(self) -> Iterable[Item]:
        """Return one item with the tables of runs and of tools; both are sent again if a row changed or is gone."""
        columns = (*records.EPISODE_COLUMNS, *(records.CONTENT_COLUMNS if self._content else ()))
        # Without rows, too: the rows that W&B has may have been erased here.
        tables = {"episodes": (columns, self._rows), "actions": (records.ACTION_COLUMNS, self._actions.rows())}
        yield Item("tables", _digest(list(tables.values())), self._part("episodes", self._group, tables=tables))

    def write(self, items: Sequence[Item]) -> None:
        """Write items to their runs in W&B."""
        # Opening a run of W&B's takes seconds, so all its parts are written at one opening.
        parts: defaultdict[tuple[_Job, str], list[_Part]] = defaultdict(list)
        for part in (item.payload for item in items if isinstance(item.payload, _Part)):
            parts[part.job, part.run].append(part)
        try:
            for (job, name), some in parts.items():
                with self._open(job, name) as run:
                    self._log(run, job, some)
                    # The whole summary each time. Offline, every export is a file of its own, and `wandb sync` takes
                    # the summary of the last file only. A part of it would hide the tables of earlier files.
                    run.summary.update(self._summaries[job, name])
        except (wandb.Error, OSError) as error:
            raise TrackerError(
                f"{self.target} refused: {error}; look at WANDB_API_KEY and WANDB_BASE_URL, or say --offline DIR; "
                "then send again"
            ) from error

    def _part(self, job: _Job, run: str, **holds: Any) -> _Part:
        """Return a part of a W&B run; the run's summary gets each metric's last value on the axis, in any order."""
        part = _Part(job, run, **holds)
        known = self._summaries[job, run]
        for point in part.points:
            axis = _AXES[job]
            later = point[axis] >= known.get(axis, point[axis])
            known |= point if later else {name: value for name, value in point.items() if name not in known}
        return part

    @contextmanager
    def _open(self, job: _Job, name: str) -> Generator[Any]:
        """Begin or resume a run of W&B. At the end of the block, wait until W&B has received everything."""
        with TemporaryDirectory(prefix="art_patch-wandb-", ignore_cleanup_errors=True) as passing:
            place = self._directory or Path(passing)
            # Private, because W&B writes its files there with the rights that the umask leaves.
            place.mkdir(parents=True, exist_ok=True, mode=0o700)
            run: Any = wandb.init(
                project=self._project,
                entity=self._entity,
                group=self._group,
                job_type=job,
                name=name,
                # The same id in every export, so a later export resumes the run.
                id=records.hash_of(f"{self._group}:{job}:{name}", 8).hex(),
                # Resumes or begins the run of this id. `create_new`: this process opens several runs in turn.
                resume="allow",
                reinit="create_new",
                dir=str(place),
                mode="online" if self._directory is None else "offline",
                settings=_quiet(),
            )
            try:
                yield run
            except BaseException:
                # W&B then shows the run as failed, and not as one that still runs.
                run.finish(exit_code=1)
                raise
            run.finish()

    def _log(self, run: Any, job: _Job, parts: Sequence[_Part]) -> None:
        axis = _AXES.get(job)
        if axis is not None:
            run.define_metric(axis)
            run.define_metric("*", step_metric=axis)
        # Each `log` makes a row, so all metrics of one place on the axis go into one.
        points: defaultdict[float, dict[str, float]] = defaultdict(dict)
        for point in (point for part in parts for point in part.points):
            points[point[cast("str", axis)]] |= point
        for _, point in sorted(points.items()):
            run.log(point)
        for part in parts:
            # A run that is resumed has its config already, and W&B refuses changes unless told otherwise.
            run.config.update(part.config, allow_val_change=True)
            for name, (columns, rows) in part.tables.items():
                run.log({name: wandb.Table(columns=list(columns), data=[list(row) for row in rows])})
            if part.adapter is not None:
                self._log_adapter(run, *part.adapter)

    def _log_adapter(self, run: Any, policy: Policy, files: Sequence[Path]) -> None:
        artifact: Any = wandb.Artifact(policy.model, type="model", metadata=_about(policy))
        for file in files:
            if file.name == policies.MANIFEST:
                with artifact.new_file(file.name, mode="w", encoding="utf-8") as copy:
                    copy.write(policies.manifest_to_share(file))
                continue
            # A policy's files never change, so W&B need not copy them before it sends them.
            artifact.add_file(str(file), name=file.name, policy="immutable", skip_cache=True)
        logged = run.log_artifact(artifact, aliases=[f"step-{policy.step}"])
        if self._directory is None:
            try:
                logged.wait()
            except Exception as error:  # ValueError where an upload failed; other kinds are W&B's private ones
                raise TrackerError(f"{self.target} did not take the adapter of {policy.name}: {error}") from error


def _about(policy: Policy) -> dict[str, Any]:
    return {"policy": policy.name, "parent": policy.parent, "base": policy.base, "base_sha256": policy.base_sha256}


def _quiet() -> Any:
    # W&B would also send the terminal's text, the script's code, git's state and figures of this machine.
    return wandb.Settings(
        silent=True,
        console="off",
        save_code=False,
        disable_code=True,
        disable_git=True,
        disable_job_creation=True,
        x_disable_machine_info=True,
        x_disable_meta=True,
        x_disable_stats=True,
        x_save_requirements=False,
        finish_timeout=_FINISH_S,
        finish_timeout_raises=True,
    )


def _digest(value: Any) -> str:
    return records.hash_of(json.dumps(value), 8).hex()
