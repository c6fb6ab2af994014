"""`art-patch send` copies runs and policies to other tools; `feedback import` and `pull` read scores from them."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from art_patch import feedback, trackers
from art_patch._lib.words import moment
from art_patch.cli import output
from art_patch.cli.options import SINCE, ActingProject, Project, RunFilter, conditions, extra
from art_patch.cli.typed_options import Option, command
from art_patch.errors import ConfigError
from art_patch.settings import Settings

LANGFUSE_URL = Option("Address of Langfuse.", env="LANGFUSE_BASE_URL")


@dataclass(frozen=True, slots=True)
class Sending:
    """The option of all `send` commands: send items again that were sent before."""

    again: Annotated[bool, Option("Also send items that were sent before, if the tracker has lost them.")] = False


@dataclass(frozen=True, slots=True)
class SendingRuns(Sending):
    """The options of `send` commands that send runs of the agent as well as policies."""

    content: Annotated[bool, Option("Also send the text of people, tools and models.")] = False
    settle: Annotated[
        float, Option("Seconds without a call after which a run counts as finished and is sent.", least=0.0)
    ] = 600.0
    since: Annotated[str | None, SINCE] = None


@command
def otlp(
    sending: SendingRuns,
    project: ActingProject,
    endpoint: Annotated[
        str, Option("Address for OTLP over HTTP, without the path /v1/traces.", env="OTEL_EXPORTER_OTLP_ENDPOINT")
    ] = "http://localhost:4318",
) -> None:
    """Send each run of the agent as one OpenTelemetry trace, with its scores as evaluation events."""
    _send(
        lambda chosen: trackers.Otlp(endpoint, service=chosen.project, content=sending.content),
        "otlp", sending, project,
    )  # fmt: skip


@command
def langfuse(
    sending: SendingRuns, project: ActingProject, base_url: Annotated[str, LANGFUSE_URL] = "https://cloud.langfuse.com"
) -> None:
    """Send runs of the agent to Langfuse as traces with sessions, users and scores, and a trace for each policy.

    LANGFUSE_PUBLIC_KEY and LANGFUSE_SECRET_KEY choose the project in Langfuse.
    """
    keys = langfuse_keys()
    _send(
        lambda chosen: trackers.Langfuse(base_url, **keys, service=chosen.project, content=sending.content),
        "langfuse", sending, project,
    )  # fmt: skip


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
        str, Option("Address of MLflow's server, or sqlite:////absolute/path/mlflow.db.", env="MLFLOW_TRACKING_URI")
    ],
    sending: Sending,
    project: ActingProject,
    experiment: Annotated[str | None, Option("Name of the experiment. Default: the project's name.")] = None,
) -> None:
    """Send each policy to MLflow as a run with its metrics, settings, state and the adapter's manifest, not weights."""
    _send(lambda chosen: trackers.Mlflow(uri, experiment=experiment or chosen.project), "mlflow", sending, project)


@command
def wandb(
    sending: SendingRuns,
    project: ActingProject,
    wandb_project: Annotated[
        str | None, Option("Project in W&B. Default: the name of this project.", env="WANDB_PROJECT")
    ] = None,
    entity: Annotated[str | None, Option("Team or user in W&B.", env="WANDB_ENTITY")] = None,
    offline: Annotated[
        Path | None, Option("Write to this directory and send nothing; `wandb sync` sends it later.")
    ] = None,
    weights: Annotated[bool, Option("Upload all files of each adapter. Default: only its manifest.")] = False,
) -> None:
    """Send policies, updates and runs of the agent to Weights & Biases.

    The metrics of each policy and update become runs of W&B, the runs and tool calls of the agent become tables. Each
    adapter becomes a version of one artifact: only its manifest, or with --weights all its files. WANDB_API_KEY or
    `wandb login` identifies the sender. WANDB_MODE=offline is the same as --offline.
    """
    _send(
        lambda chosen: trackers.Wandb(
            wandb_project or chosen.project, group=chosen.project, entity=entity, offline=offline,
            content=sending.content, weights=weights,
        ),
        "wandb", sending, project,
    )  # fmt: skip


def _send(made: Callable[[Settings], trackers.Tracker], name: str, sending: Sending, project: ActingProject) -> None:
    now = time.time()
    settle, since = (sending.settle, sending.since) if isinstance(sending, SendingRuns) else (0.0, None)
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
    if project.answered(asdict(done)):
        return
    there = f"; {done.already_there} were there already" if done.already_there else ""
    # Trackers of metrics alone, such as TensorBoard, get policies and no runs.
    runs = f"{done.episodes} runs and " if isinstance(tracker, trackers.TraceTracker) else ""
    output.say(f"{done.written} new items of {runs}{done.steps} policies written to {done.target}{there}")


# --- scores that people gave in other tools ---


RENAME = Option("New name of the scores, such as `reward`. Default: their name in the other tool.", name="as")


@dataclass(frozen=True, slots=True)
class Pulling:
    """The options of commands that read scores from a tracker's API."""

    rename: Annotated[str | None, RENAME] = None
    since: Annotated[
        str | None, Option("Scores given at or after this time: 2026-11-21, 2026-11-21T14:00, 7d, 12h.")
    ] = None


@command
def import_feedback(
    *,
    file: Annotated[
        Path, typer.Argument(help="File with Langfuse's scores or LangSmith's feedback: JSON, JSON lines or CSV.")
    ],
    rename: Annotated[str | None, RENAME] = None,
    project: ActingProject,
) -> None:
    """Read scores that people gave in Langfuse or LangSmith, from a file.

    Each score is added to the trajectory whose id, or whose trace id from `art-patch send`, the row names. If a file is
    imported again, only scores that people have changed in the other tool are updated. Scores that `art-patch send`
    has sent to that tool are not imported. If one row is wrong, nothing is imported.
    """
    try:
        found = feedback.read_feedback(file.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from None
    with project.opened() as (_, opened):
        who = project.actor("feedback import")
        metrics = feedback.write_feedback(opened, found, rename, source=str(file), who=who)
    _say(metrics, "path", str(file), project)


@command
def pull_langfuse(
    pulling: Pulling, project: ActingProject, base_url: Annotated[str, LANGFUSE_URL] = "https://cloud.langfuse.com"
) -> None:
    """Read scores from Langfuse.

    LANGFUSE_PUBLIC_KEY and LANGFUSE_SECRET_KEY choose the project in Langfuse. Each score is added to the trajectory
    with the id of its trace, or whose trace `art-patch send` sent. Scores that `art-patch send` has sent to Langfuse
    are not imported.
    """
    keys = langfuse_keys()
    _pull(lambda: feedback.LangfuseScores(base_url, **keys), "langfuse", pulling, project)


@command
def pull_langsmith(
    pulling: Pulling,
    project: ActingProject,
    endpoint: Annotated[
        str, Option("Address of LangSmith's API.", env="LANGSMITH_ENDPOINT")
    ] = "https://api.smith.langchain.com",
    langsmith_project: Annotated[
        str | None, Option("Project in LangSmith. Default: all projects.", env="LANGSMITH_PROJECT")
    ] = None,
) -> None:
    """Read feedback from LangSmith.

    LANGSMITH_API_KEY chooses the workspace in LangSmith. Each score is added to the trajectory with the id of
    LangSmith's run, or of the trace of that run.
    """
    key = os.environ.get("LANGSMITH_API_KEY", "")
    if not key:
        raise ConfigError("set LANGSMITH_API_KEY; LangSmith makes one in its settings")
    source = partial(feedback.LangSmithFeedback, endpoint, api_key=key, project=langsmith_project)
    _pull(source, "langsmith", pulling, project)


def langfuse_keys() -> dict[str, str]:
    """Return the keys of Langfuse from the environment, as the arguments `public_key` and `secret_key`."""
    keys = {name: os.environ.get(f"LANGFUSE_{name.upper()}", "") for name in ("public_key", "secret_key")}
    if not all(keys.values()):
        raise ConfigError(
            "set LANGFUSE_PUBLIC_KEY and LANGFUSE_SECRET_KEY; Langfuse shows them in a project's settings"
        )
    return keys


def _pull(
    made: Callable[[], feedback.LangfuseScores | feedback.LangSmithFeedback],
    name: str,
    pulling: Pulling,
    project: ActingProject,
) -> None:
    # Before the tracker is asked, so that a mistyped time costs no request.
    after = None if pulling.since is None else moment(pulling.since, "--since", time.time())
    with extra(f"pulling from {name}", name):
        source = made()
    with project.opened() as (_, opened):
        # All are read before any is written: a tracker that fails midway leaves the store as it was.
        found = feedback.feedback_of(source.rows(after))
        who = project.actor(f"pull {name}")
        metrics = feedback.write_feedback(opened, found, pulling.rename, source=source.source, who=who)
    _say(metrics, "source", source.source, project)


def _say(metrics: Counter[str], kind: str, source: str, project: Project) -> None:
    names = ("read", "written", "already_there", "ours", "no_number", "unknown_run")
    facts = {name: metrics[name] for name in names}
    if project.answered({kind: source, **facts}):
        return
    rest = ", ".join(f"{facts[name]} {name.replace('_', ' ')}" for name in names[2:] if facts[name])
    words = f"{facts['written']} scores of {facts['read']} rows of {output.visible(source)} written"
    output.say(words + (f"; {rest}" if rest else ""))
