"""`art-patch send`: copies runs and policies from the store to trackers such as W&B, Langfuse and MLflow."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from art_patch import trackers
from art_patch.cli import output
from art_patch.cli.commands.feedback import LANGFUSE_URL, langfuse_keys
from art_patch.cli.options import SINCE, ActingProject, RunFilter, conditions, extra
from art_patch.cli.typed_options import Option, command

if TYPE_CHECKING:
    from art_patch.settings import Settings
    from art_patch.trackers import Tracker


@dataclass(frozen=True, slots=True)
class Sending:
    """The option of all `send` commands: send items again that were sent before."""

    again: Annotated[bool, Option(help="Also send items that were sent before, if the tracker has lost them.")] = False


@dataclass(frozen=True, slots=True)
class SendingRuns(Sending):
    """The options of `send` commands that send runs of the agent as well as policies."""

    content: Annotated[bool, Option(help="Also send the text of people, tools and models.")] = False
    settle: Annotated[
        float, Option(least=0.0, help="Seconds without a call after which a run counts as finished and is sent.")
    ] = 600.0
    since: Annotated[str | None, SINCE] = None


@command
def otlp(
    sending: SendingRuns,
    project: ActingProject,
    endpoint: Annotated[
        str,
        Option(env="OTEL_EXPORTER_OTLP_ENDPOINT", help="Address for OTLP over HTTP, without the path /v1/traces."),
    ] = "http://localhost:4318",
) -> None:
    """Send each run of the agent as one OpenTelemetry trace, with its scores as evaluation events."""

    def tracker(settings: Settings) -> Tracker:
        return trackers.Otlp(endpoint, service=settings.project, content=sending.content)

    _send(tracker, "otlp", sending, project)


@command
def langfuse(
    sending: SendingRuns,
    project: ActingProject,
    base_url: Annotated[str, LANGFUSE_URL] = "https://cloud.langfuse.com",
) -> None:
    """Send runs of the agent to Langfuse as traces with sessions, users and scores, and a trace for each policy.

    LANGFUSE_PUBLIC_KEY and LANGFUSE_SECRET_KEY choose the project in Langfuse.
    """
    public_key, secret_key = langfuse_keys()

    def tracker(settings: Settings) -> Tracker:
        return trackers.Langfuse(
            base_url, public_key=public_key, secret_key=secret_key, service=settings.project, content=sending.content
        )

    _send(tracker, "langfuse", sending, project)


@command
def tensorboard(
    directory: Annotated[Path, typer.Argument(help="Directory for `tensorboard --logdir`.")],
    sending: Sending,
    project: ActingProject,
) -> None:
    """Write the metrics of each policy, and of each optimizer step of its update, as TensorBoard scalars."""
    _send(lambda _: trackers.TensorBoard(directory), "tensorboard", sending, project)


@command
def mlflow(
    uri: Annotated[
        str,
        Option(env="MLFLOW_TRACKING_URI", help="Address of MLflow's server, or sqlite:////absolute/path/mlflow.db."),
    ],
    sending: Sending,
    project: ActingProject,
    experiment: Annotated[str | None, Option(help="Name of the experiment. Default: the project's name.")] = None,
) -> None:
    """Send each policy to MLflow as a run with its metrics, settings, state and the adapter's manifest, not weights."""
    _send(lambda chosen: trackers.Mlflow(uri, experiment=experiment or chosen.project), "mlflow", sending, project)


@command
def wandb(
    sending: SendingRuns,
    project: ActingProject,
    wandb_project: Annotated[
        str | None, Option(env="WANDB_PROJECT", help="Project in W&B. Default: the name of this project.")
    ] = None,
    entity: Annotated[str | None, Option(env="WANDB_ENTITY", help="Team or user in W&B.")] = None,
    offline: Annotated[
        Path | None, Option(help="Write to this directory and send nothing; `wandb sync` sends it later.")
    ] = None,
    weights: Annotated[bool, Option(help="Upload all files of each adapter. Default: only its manifest.")] = False,
) -> None:
    """Send policies, updates and runs of the agent to Weights & Biases.

    The metrics of each policy and update become runs of W&B, the runs and tool calls of the agent become tables. Each
    adapter becomes a version of one artifact: only its manifest, or with --weights all its files. WANDB_API_KEY or
    `wandb login` identifies the sender. WANDB_MODE=offline is the same as --offline.
    """

    def tracker(settings: Settings) -> Tracker:
        return trackers.Wandb(
            wandb_project or settings.project, group=settings.project, entity=entity, offline=offline,
            content=sending.content, weights=weights,
        )  # fmt: skip

    _send(tracker, "wandb", sending, project)


def _send(made: Callable[[Settings], Tracker], name: str, sending: Sending, project: ActingProject) -> None:
    """Send everything that the tracker does not have yet, and print the result."""
    now = time.time()
    runs = sending if isinstance(sending, SendingRuns) else None
    settle, since = (runs.settle, runs.since) if runs else (0.0, None)
    # A run that goes on is not sent: trackers take each item once and it would stay incomplete there.
    wanted = replace(RunFilter(since=since).chosen(now=now), until=now - settle)
    with project.opened() as (settings, opened):
        with extra(f"sending to {name}", name):
            tracker = made(settings)
        with output.bars(quiet=project.as_json) as progress:
            done = trackers.feed(
                opened, tracker, wanted, who=project.actor(f"send {name}"), progress=progress, now=now,
                adapters=settings.adapters, filters=conditions(wanted), again=sending.again,
            )  # fmt: skip
    if project.as_json:
        return output.answer(asdict(done))
    there = f"; {done.already_there} were there already" if done.already_there else ""
    source = f"{done.steps} policies"
    # Trackers of metrics alone, such as TensorBoard, get policies and no runs.
    if isinstance(tracker, trackers.TraceTracker):
        source = f"{done.episodes} runs and {source}"
    return output.say(f"{done.written} new items of {source} written to {done.target}{there}")
