"""`art-patch send`: what the store holds, to the trackers that teams look at."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from art_patch.cli.options import filters
from art_patch.cli.options.opening import opened_store
from art_patch.cli.options.shared import HomeOption, JsonOption, ProjectOption, StoreOption, WhoOption, who_am_i

if TYPE_CHECKING:
    from art_patch.settings import Settings
    from art_patch.trackers import Tracker

app = typer.Typer(
    name="send", help="Send what a tracker does not have yet; sending again writes nothing twice.", no_args_is_help=True
)

SettleOption = Annotated[
    float, typer.Option("--settle", min=0.0, help="Runs whose last call ended so many seconds ago are at rest.")
]
AgainOption = Annotated[bool, typer.Option("--again", help="Also what was sent before, because the tracker lost it.")]
ContentOption = Annotated[bool, typer.Option("--content", help="Also what people, tools and models said.")]


def otlp(
    endpoint: Annotated[
        str,
        typer.Option(
            "--endpoint", envvar="OTEL_EXPORTER_OTLP_ENDPOINT", help="OTLP over HTTP, without the path /v1/traces."
        ),
    ] = "http://localhost:4318",
    content: ContentOption = False,
    settle: SettleOption = 600.0,
    since: filters.SinceOption = None,
    again: AgainOption = False,
    project: ProjectOption = None,
    home: HomeOption = None,
    store: StoreOption = None,
    who: WhoOption = None,
    as_json: JsonOption = False,
) -> None:
    """Runs as OpenTelemetry traces: one trace a run, scores as its evaluation events."""

    def tracker(settings: Settings) -> Tracker:
        from art_patch.trackers import Otlp

        return Otlp(endpoint, service=settings.project, content=content)

    _send(
        tracker, "otlp", again, project=project, home=home, store=store, who=who, as_json=as_json,
        settle=settle, since=since,
    )  # fmt: skip


def langfuse(
    base_url: Annotated[
        str, typer.Option("--base-url", envvar="LANGFUSE_BASE_URL", help="Of Langfuse.")
    ] = "https://cloud.langfuse.com",
    content: ContentOption = False,
    settle: SettleOption = 600.0,
    since: filters.SinceOption = None,
    again: AgainOption = False,
    project: ProjectOption = None,
    home: HomeOption = None,
    store: StoreOption = None,
    who: WhoOption = None,
    as_json: JsonOption = False,
) -> None:
    """Runs as traces with sessions, users and scores, and the training of each policy.

    LANGFUSE_PUBLIC_KEY and LANGFUSE_SECRET_KEY say which project of Langfuse's.
    """
    public_key, secret_key = langfuse_keys()

    def tracker(settings: Settings) -> Tracker:
        from art_patch.trackers import Langfuse

        return Langfuse(
            base_url, public_key=public_key, secret_key=secret_key, service=settings.project, content=content
        )

    _send(
        tracker, "langfuse", again, project=project, home=home, store=store, who=who, as_json=as_json,
        settle=settle, since=since,
    )  # fmt: skip


def tensorboard(
    directory: Annotated[Path, typer.Argument(help="What `tensorboard --logdir` is given.")],
    again: AgainOption = False,
    project: ProjectOption = None,
    home: HomeOption = None,
    store: StoreOption = None,
    who: WhoOption = None,
    as_json: JsonOption = False,
) -> None:
    """Metrics of each policy and of each step of its update, as scalars."""

    def tracker(settings: Settings) -> Tracker:
        from art_patch.trackers import TensorBoard

        return TensorBoard(directory)

    _send(tracker, "tensorboard", again, project=project, home=home, store=store, who=who, as_json=as_json)


def mlflow(
    uri: Annotated[
        str,
        typer.Option(
            "--uri", envvar="MLFLOW_TRACKING_URI", help="MLflow's server, or sqlite:////absolute/path/mlflow.db."
        ),
    ],
    experiment: Annotated[
        str | None, typer.Option("--experiment", help="Its name; the project's unless given.", show_default=False)
    ] = None,
    again: AgainOption = False,
    project: ProjectOption = None,
    home: HomeOption = None,
    store: StoreOption = None,
    who: WhoOption = None,
    as_json: JsonOption = False,
) -> None:
    """A run a policy: metrics, settings, state, and the adapter's manifest."""

    def tracker(settings: Settings) -> Tracker:
        from art_patch.trackers import Mlflow

        return Mlflow(uri, experiment=experiment or settings.project)

    _send(tracker, "mlflow", again, project=project, home=home, store=store, who=who, as_json=as_json)


def wandb(
    name: Annotated[
        str | None,
        typer.Option(
            "--wandb-project",
            envvar="WANDB_PROJECT",
            help="W&B's project; ours by name unless given.",
            show_default=False,
        ),
    ] = None,
    entity: Annotated[
        str | None, typer.Option("--entity", envvar="WANDB_ENTITY", help="W&B's team or user.", show_default=False)
    ] = None,
    offline: Annotated[
        Path | None,
        typer.Option("--offline", help="Directory to write to instead; `wandb sync` sends it.", show_default=False),
    ] = None,
    weights: Annotated[bool, typer.Option("--weights", help="Adapters whole, not their manifests alone.")] = False,
    content: ContentOption = False,
    settle: SettleOption = 600.0,
    since: filters.SinceOption = None,
    again: AgainOption = False,
    project: ProjectOption = None,
    home: HomeOption = None,
    store: StoreOption = None,
    who: WhoOption = None,
    as_json: JsonOption = False,
) -> None:
    """Metrics of each policy and update, tables of runs and of actions, adapters as versions of an artifact.

    WANDB_API_KEY or `wandb login` says who sends; WANDB_MODE=offline holds as --offline does.
    """

    def tracker(settings: Settings) -> Tracker:
        from art_patch.trackers import Wandb

        return Wandb(
            name or settings.project, group=settings.project, entity=entity, offline=offline, content=content,
            weights=weights,
        )  # fmt: skip

    _send(
        tracker, "wandb", again, project=project, home=home, store=store, who=who, as_json=as_json,
        settle=settle, since=since,
    )  # fmt: skip


def langfuse_keys() -> tuple[str, str]:
    """Return the public and the secret key.

    Raises:
        ConfigError: one is not set.
    """
    from art_patch.errors import ConfigError

    public, secret = (os.environ.get(f"LANGFUSE_{name}_KEY", "") for name in ("PUBLIC", "SECRET"))
    if not (public and secret):
        raise ConfigError(
            "set LANGFUSE_PUBLIC_KEY and LANGFUSE_SECRET_KEY; Langfuse shows them in a project's settings"
        )
    return public, secret


def _send(
    made: Callable[[Settings], Tracker], extra: str, again: bool, *, project: ProjectOption, home: HomeOption,
    store: StoreOption, who: WhoOption, as_json: bool, settle: float = 0.0, since: str | None = None,
) -> None:  # fmt: skip
    """Feed a tracker and say what came of it."""
    from dataclasses import asdict, replace

    from art_patch.cli.views.output import answer, bars, stdout
    from art_patch.errors import ConfigError
    from art_patch.trackers import TraceTracker, feed

    now = time.time()
    wanted = replace(filters.make_filter(since=since), until=now - settle)
    with opened_store(project=project, home=home, store=store) as (settings, opened):
        try:
            tracker = made(settings)
        except ModuleNotFoundError as error:
            raise ConfigError(f'sending to {extra} needs {error.name}; run: pip install "art-patch[{extra}]"') from None
        with bars(quiet=as_json) as progress:
            done = feed(
                opened, tracker, wanted, who=who_am_i(who, f"send {extra}"), progress=progress, now=now,
                adapters=settings.adapters, filters=filters.chosen(wanted), again=again,
            )  # fmt: skip
    if as_json:
        return answer(asdict(done))
    there = f"; {done.already_there} were there already" if done.already_there else ""
    source = (
        f"{done.episodes} runs and {done.steps} policies"
        if isinstance(tracker, TraceTracker)
        else f"{done.steps} policies"
    )
    words = f"{done.written} new items of {source} written to {done.target}{there}"
    return stdout().print(words, markup=False, soft_wrap=True)
