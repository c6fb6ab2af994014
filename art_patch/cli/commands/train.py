"""`art-patch train FILE` trains a candidate on training files, which the next cycle gates as any other candidate."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from typing import Annotated, Any

import typer

from art_patch import pipeline
from art_patch.cli import output
from art_patch.cli.commands.retrain import Suite
from art_patch.cli.logs import Log
from art_patch.cli.options import ActingProject, open_existing
from art_patch.cli.typed_options import Only, Option, command
from art_patch.pipeline import CycleConfig
from art_patch.training import TrainConfig

_OF_ALL_UPDATES = Only(
    (
        "learning_rate", "epochs", "minibatches", "batch_size", "gradient_accumulation_steps", "total_steps",
        "warmup_steps", "lr_schedule", "lora_rank", "lora_alpha", "lora_dropout", "preference_beta", "weight_decay",
        "max_grad_norm", "micro_batch_tokens", "max_tokens", "gradient_checkpointing", "dtype", "seed",
        "checkpoint_every_s", "save_steps", "processes", "backend",
    )
)  # fmt: skip
"""The other settings are of groups and of recorded runs, which no file has."""


@command
def train(
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE",
            help="JSON lines or Parquet. OpenAI: messages; input, preferred_output, non_preferred_output. "
            "TRL: messages; prompt, completion; prompt, chosen, rejected. ShareGPT: conversations.",
        ),
    ],
    config: Annotated[TrainConfig, _OF_ALL_UPDATES],
    project: ActingProject,
    log: Log,
    new_lora: Annotated[bool, Option("Begin a new LoRA on the base model, not the one that serves or learns.")] = False,
) -> None:
    """Train a candidate on files: imitate their conversations, then learn their preferences (DPO).

    It starts from the policy that serves, or that learns beside upstream. Like any other candidate it answers nobody
    before it wins the gate of the next `art-patch retrain`. A line whose scenario is held out for the gate is left out.
    No engine and no judge is needed. All lines are checked first: if one is wrong, nothing is trained.

    Exit codes: 0 trained; 2 the files have nothing to learn, or the base model cannot be trained; 5 a cycle is running;
    13 the update failed; 14 a policy is being tested; 15 a line is wrong; 19 no policy serves or learns yet.
    """
    settings = project.settings()
    chosen = CycleConfig(
        train=replace(config, start="base" if new_lora else "champion"),
        across=settings.group_across,
        holdout_users=settings.holdout_users,
        gate=Suite().gate_config(settings),
    )
    with closing(open_existing(settings)) as opened, output.bars(quiet=project.as_json) as progress:
        done = pipeline.train_on_files(
            opened, settings.adapters, chosen, files, who=project.actor("train"), progress=progress
        )
    facts: dict[str, Any] = {
        "policy": done.policy.name, "state": done.policy.state, "start": done.start,
        "demonstrations": done.demonstrations, "pairs": done.pairs, "left_out": done.left_out,
        "untestable": done.untestable,
        "metrics": {key: value for key, value in done.metrics.items() if key not in pipeline.LONG},
    }  # fmt: skip
    if not project.answered(facts):
        _say(done)


def _say(done: pipeline.FileTraining) -> None:
    name = done.policy.name
    learned = [
        output.counted(number, *words)
        for number, words in (
            (done.demonstrations, ("demonstration", "demonstrations")), (done.pairs, ("preference", "preferences")),
        )
        if number
    ]  # fmt: skip
    took = output.seconds(done.metrics["took_s"])
    output.say(f"{name} is a candidate, trained in {took} from {done.start} on {' and '.join(learned)}")
    steps = output.counted(done.metrics["steps"], "step", "steps")
    output.say(f"  {steps}, loss {done.metrics['loss']:.4g} in the last phase")
    for reason, (count, place) in done.left_out.items():
        output.say(f"  not learned: {output.counted(count, 'line', 'lines')}, first {place}: {reason}")
    output.say(f"  the next `art-patch retrain` tests it; before that it answers nobody (`policies show {name}`)")
    if done.untestable is not None:
        output.say(f"  it waits for traffic: so far {done.untestable}")
