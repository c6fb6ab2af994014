"""The options of `art-patch retrain` that no other command has, and the parts of a cycle's config that they mean."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from art_patch.training import Backend, LossName, Start

if TYPE_CHECKING:
    from art_patch.grouping import ReplayConfig
    from art_patch.settings import Settings

ReplayOption = Annotated[
    int,
    typer.Option(
        min=0,
        max=15,
        envvar="ART_PATCH_REPLAY",
        help="Run your replayable functions again: so many further runs of a run without siblings, and held-out ones "
        "with both policies that the gate compares; 0 for none.",
    ),
]
ReplayMaxOption = Annotated[
    int, typer.Option(min=1, envvar="ART_PATCH_REPLAY_MAX", help="How many such runs in this cycle, and in its gate.")
]
ReplayTimeoutOption = Annotated[
    float, typer.Option(min=1.0, envvar="ART_PATCH_REPLAY_TIMEOUT_S", help="How long one of them may take.")
]
ReplayPythonOption = Annotated[
    str | None,
    typer.Option(envvar="ART_PATCH_REPLAY_PYTHON", help="Interpreter of your app, if not this one."),
]
ResampleOption = Annotated[
    int,
    typer.Option(
        min=0, envvar="ART_PATCH_RESAMPLE", help="Further answers to a turn of a run without siblings; 0 for none."
    ),
]
ResampleTurnsOption = Annotated[
    int, typer.Option(min=1, envvar="ART_PATCH_RESAMPLE_TURNS", help="How many turns of each such run.")
]
ResamplePickOption = Annotated[
    Literal["spread", "last", "fault"],
    typer.Option(envvar="ART_PATCH_RESAMPLE_PICK", help="Which of its turns."),
]
ResampleMaxOption = Annotated[
    int, typer.Option(min=0, envvar="ART_PATCH_RESAMPLE_MAX", help="How many turns in this cycle.")
]
ResamplePerMinuteOption = Annotated[
    float | None,
    typer.Option(min=0.01, envvar="ART_PATCH_RESAMPLE_PER_MINUTE", help="How many turns a minute."),
]
ResampleWindowOption = Annotated[
    str | None,
    typer.Option(envvar="ART_PATCH_RESAMPLE_WINDOW", help="Only at this time of day: 22:00-06:00."),
]
SettleOption = Annotated[float, typer.Option("--settle-s", help="A trajectory is whole when it was silent this long.")]
MinGroupsOption = Annotated[int, typer.Option("--min-groups", help="Train on no fewer scored groups than this.")]
LearningRateOption = Annotated[float, typer.Option("--learning-rate", help="Peak learning rate.")]
BatchSizeOption = Annotated[
    int | None,
    typer.Option("--batch-size", min=1, help="Groups that an optimizer step takes; an eighth of them unless given."),
]
GradientAccumulationStepsOption = Annotated[
    int,
    typer.Option("--gradient-accumulation-steps", min=1, help="How many such batches a step takes, one after another."),
]
SaveStepsOption = Annotated[
    int | None,
    typer.Option(
        "--save-steps", min=1, help="Keep a checkpoint every so many optimizer steps, besides one every minute."
    ),
]
EvalStepsOption = Annotated[
    int | None,
    typer.Option(
        "--eval-steps",
        min=1,
        help="Every so many optimizer steps, and at the end, evaluate on held-out groups that have rewards already.",
    ),
]
LoraDropoutOption = Annotated[
    float,
    typer.Option(
        "--lora-dropout", min=0.0, help="Share of the LoRA's inputs that each optimizer step leaves out, below 1."
    ),
]
LossOption = Annotated[LossName, typer.Option("--loss", help="What is minimised, as its paper has it.")]
KlOption = Annotated[
    float,
    typer.Option("--kl", min=0.0, help="Weight of the KL that keeps it near the base."),
]
StartOption = Annotated[
    Start,
    typer.Option(help="Go on from the LoRA that serves, or begin a new one."),
]
ImitateFromOption = Annotated[
    float | None,
    typer.Option(
        "--imitate-from",
        help="Imitate upstream's answers in runs of at least this reward, and corrections; off unless given.",
    ),
]
PreferFromOption = Annotated[
    float | None,
    typer.Option(
        "--prefer-from",
        help="Tell siblings apart whose rewards differ by at least this much, and corrections; off unless given.",
    ),
]
RehearseFromOption = Annotated[
    float | None,
    typer.Option(
        "--rehearse-from",
        help="Against forgetting: go on imitating the policy's own earlier runs of at least this reward, and "
        "demonstrations; off unless given.",
    ),
]
RehearseWeightOption = Annotated[
    float, typer.Option("--rehearse-weight", help="How much that counts beside what is new.")
]
LearnTruncatedOption = Annotated[
    bool,
    typer.Option(
        "--learn-truncated/--no-learn-truncated",
        help="Whether answers that were cut off at their length limit are trained.",
    ),
]
ProcessesOption = Annotated[int, typer.Option(min=1, help="How many train, each with a GPU of its own.")]
BackendOption = Annotated[
    Backend,
    typer.Option(help="What trains; auto is Unsloth on CUDA, if it is installed."),
]
SeedOption = Annotated[int, typer.Option(min=0, help="Of a new LoRA and the order of groups.")]
SuiteOption = Annotated[
    Path | None,
    typer.Option(
        "--suite",
        envvar="ART_PATCH_SUITE",
        help="Prompts that no candidate may get worse at: JSON lines with messages, and tools if any.",
    ),
]
MaxMinutesOption = Annotated[
    float | None,
    typer.Option(
        "--max-minutes",
        min=1,
        envvar="ART_PATCH_MAX_MINUTES",
        help="Begin no further piece of work after so long; the next cycle goes on.",
    ),
]
IdleOnlyOption = Annotated[
    bool, typer.Option("--idle-only", help="Do nothing while apps make calls; see --idle-minutes.")
]
IdleMinutesOption = Annotated[
    float, typer.Option("--idle-minutes", min=0.1, help="Apps are idle when they made no call for so long.")
]
PromotionOption = Annotated[
    str | None,
    typer.Option(
        "--promotion",
        envvar="ART_PATCH_PROMOTION",
        help="What a winner of the gate does: auto: serve; approve: wait for `art-patch promote`; canary: be "
        "tested on a share of the sessions.",
    ),
]
CanaryPercentOption = Annotated[
    float | None,
    typer.Option("--canary-percent", envvar="ART_PATCH_CANARY_PERCENT", help="That share; 5 unless said."),
]


def replay_config(
    settings: Settings, replays: int, *, at_most: int, timeout_s: float, python: str | None
) -> ReplayConfig | None:
    """Return how runs are repeated, in processes that see this project's store; `None` for not at all."""
    from art_patch.grouping import ReplayConfig
    from art_patch.store import absolute_url

    if not replays:
        return None
    environment = {
        "project": settings.project,
        "home": str(settings.directory.parent),
        "store": absolute_url(settings.store_url),
    }
    return ReplayConfig(replays, at_most, timeout_s, python=python, environment=environment)
