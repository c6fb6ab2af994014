"""`art-patch retrain`: one cycle, for cron or by hand."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any, Literal

import typer

from art_patch.cli.judging import (
    CheckOption,
    JudgeBaseUrlOption,
    JudgeOption,
    MaxCallsOption,
    MaxUsdOption,
    RubricOption,
    make_judge,
)
from art_patch.cli.options import HomeOption, JsonOption, ProjectOption, StoreOption, WhoOption, who_am_i
from art_patch.training.config import Backend, Start
from art_patch.training.loss_config import LossName


def retrain(
    judge: JudgeOption = None,
    judge_base_url: JudgeBaseUrlOption = None,
    rubric: RubricOption = None,
    max_usd: MaxUsdOption = None,
    max_calls: MaxCallsOption = None,
    check: CheckOption = None,
    replay: Annotated[
        int,
        typer.Option(
            min=0,
            max=15,
            envvar="ART_PATCH_REPLAY",
            help="Run your replayable functions again: so many further runs of a run without siblings; 0 for none.",
        ),
    ] = 0,
    replay_max: Annotated[
        int, typer.Option(min=1, envvar="ART_PATCH_REPLAY_MAX", help="How many such runs in this cycle.")
    ] = 100,
    replay_timeout_s: Annotated[
        float, typer.Option(min=1.0, envvar="ART_PATCH_REPLAY_TIMEOUT_S", help="How long one of them may take.")
    ] = 300.0,
    replay_python: Annotated[
        str | None,
        typer.Option(envvar="ART_PATCH_REPLAY_PYTHON", help="Interpreter of your app, if not this one."),
    ] = None,
    resample: Annotated[
        int,
        typer.Option(
            min=0, envvar="ART_PATCH_RESAMPLE", help="Further answers to a turn of a run without siblings; 0 for none."
        ),
    ] = 7,
    resample_turns: Annotated[
        int, typer.Option(min=1, envvar="ART_PATCH_RESAMPLE_TURNS", help="How many turns of each such run.")
    ] = 1,
    resample_pick: Annotated[
        Literal["spread", "last", "fault"],
        typer.Option(envvar="ART_PATCH_RESAMPLE_PICK", help="Which of its turns."),
    ] = "spread",
    resample_max: Annotated[
        int, typer.Option(min=0, envvar="ART_PATCH_RESAMPLE_MAX", help="How many turns in this cycle.")
    ] = 200,
    resample_per_minute: Annotated[
        float | None,
        typer.Option(min=0.01, envvar="ART_PATCH_RESAMPLE_PER_MINUTE", help="How many turns a minute."),
    ] = None,
    resample_window: Annotated[
        str | None,
        typer.Option(envvar="ART_PATCH_RESAMPLE_WINDOW", help="Only at this time of day: 22:00-06:00."),
    ] = None,
    settle_s: Annotated[
        float, typer.Option("--settle-s", help="A trajectory is whole when it was silent this long.")
    ] = 60.0,
    min_groups: Annotated[int, typer.Option("--min-groups", help="Train on no fewer scored groups than this.")] = 4,
    learning_rate: Annotated[float, typer.Option("--learning-rate", help="Peak learning rate.")] = 1e-4,
    loss: Annotated[LossName, typer.Option("--loss", help="What is minimised, as its paper has it.")] = "dapo",
    kl: Annotated[
        float,
        typer.Option("--kl", min=0.0, help="Weight of the KL that keeps it near the base."),
    ] = 0.0,
    start: Annotated[
        Start,
        typer.Option(help="Go on from the LoRA that serves, or begin a new one."),
    ] = "champion",
    imitate_from: Annotated[
        float | None,
        typer.Option(
            "--imitate-from",
            help="Imitate upstream's answers in runs of at least this reward, and corrections; off unless given.",
        ),
    ] = None,
    prefer_from: Annotated[
        float | None,
        typer.Option(
            "--prefer-from",
            help="Tell siblings apart whose rewards differ by at least this much, and corrections; off unless given.",
        ),
    ] = None,
    rehearse_from: Annotated[
        float | None,
        typer.Option(
            "--rehearse-from",
            help="Against forgetting: go on imitating the policy's own earlier runs of at least this reward, and "
            "demonstrations; off unless given.",
        ),
    ] = None,
    rehearse_weight: Annotated[
        float, typer.Option("--rehearse-weight", help="How much that counts beside what is new.")
    ] = 0.1,
    learn_truncated: Annotated[
        bool,
        typer.Option(
            "--learn-truncated/--no-learn-truncated",
            help="Whether answers that were cut off at their length limit are trained.",
        ),
    ] = True,
    processes: Annotated[int, typer.Option(min=1, help="How many train, each with a GPU of its own.")] = 1,
    backend: Annotated[
        Backend,
        typer.Option(help="What trains; auto is Unsloth on CUDA, if it is installed."),
    ] = "auto",
    seed: Annotated[int, typer.Option(min=0, help="Of a new LoRA and the order of groups.")] = 0,
    project: ProjectOption = None,
    home: HomeOption = None,
    store: StoreOption = None,
    who: WhoOption = None,
    as_json: JsonOption = False,
) -> None:
    """Group, score, train, gate and promote, once.

    Exit codes: 0 promoted, or nothing to do; 4 the gate rejected the candidate; 5 another cycle is running; 6 the
    engine is down; 7 the judge failed; 1 and above for other errors. Serving is never touched by a failed cycle.
    """
    from art_patch.cli.cycle_report import say
    from art_patch.cli.meaning import make_embed
    from art_patch.cli.output import bars
    from art_patch.cycle import CycleConfig
    from art_patch.cycle import retrain as run
    from art_patch.errors import EngineError, GateRejected
    from art_patch.grouping.replay import ReplayConfig
    from art_patch.grouping.resample import ResampleConfig
    from art_patch.rewards.checks import load_checks
    from art_patch.rewards.combine import load_combination
    from art_patch.serving.client import EngineClient
    from art_patch.serving.keys import read_key
    from art_patch.settings import load_settings
    from art_patch.stages.retention import prune
    from art_patch.store import open_store
    from art_patch.store.urls import absolute_url
    from art_patch.training import TrainConfig
    from art_patch.training.loss_config import LossConfig

    settings = load_settings(
        project=project, home=home, store=store, judge=judge, judge_base_url=judge_base_url, rubric=rubric,
        checks=tuple(check) if check else None,
    )  # fmt: skip
    opened = open_store(settings.store_url)
    config = CycleConfig(
        settle_s=settle_s,
        min_groups=min_groups,
        across=settings.group_across,
        embed=make_embed(settings),
        replay=None
        if not replay
        else ReplayConfig(
            replay,
            replay_max,
            replay_timeout_s,
            python=replay_python,
            environment={
                "project": settings.project,
                "home": str(settings.directory.parent),
                "store": absolute_url(settings.store_url),
            },
        ),
        resample=None
        if not resample
        else ResampleConfig(
            resample, resample_turns, resample_pick, resample_max, resample_per_minute, resample_window
        ),
        checks=load_checks(settings.checks),
        combination=load_combination(settings.reward, criteria=settings.criteria),
        train=TrainConfig(
            learning_rate=learning_rate,
            loss=LossConfig(name=loss, kl_coefficient=kl),
            advantage_scale="none" if loss == "dr_grpo" else "group",
            start=start,
            imitate_from=imitate_from,
            prefer_from=prefer_from,
            rehearse_from=rehearse_from,
            rehearse_weight=rehearse_weight,
            learn_truncated=learn_truncated,
            processes=processes,
            backend=backend,
            seed=seed,
        ),
        keep_days=settings.keep_days,
        keep_trajectories=settings.keep_trajectories,
    )
    if opened.ledger.champion() is None or not opened.read.counts()["calls"]:
        with bars(quiet=as_json) as progress:
            prune(opened, config, progress, who=who_am_i(who, "retrain"))
        say({"outcome": "nothing to do", "reason": _what_is_missing(opened)}, as_json=as_json)
        return
    if backend == "unsloth" or processes > 1:
        from art_patch.training.backend import require_machine  # imports torch

        require_machine(config.train)  # before a judge is paid
    chief = make_judge(settings, max_usd=max_usd, max_calls=max_calls)
    route = opened.ledger.route()
    base_url = settings.base_url or route.base_url
    if base_url is None:
        raise EngineError("no engine is running, so no candidate could be tested; start `art-patch serve` first")
    engine = EngineClient(base_url, read_key(route.key_file))
    engine.wait_ready(timeout_s=10.0)
    with bars(quiet=as_json) as progress:
        report = run(opened, engine, chief, settings.adapters, config, who=who_am_i(who, "retrain"), progress=progress)
    opened.close()
    say(asdict(report), as_json=as_json)
    if report.outcome == "rejected":
        raise typer.Exit(GateRejected.exit_code)


def _what_is_missing(store: Any) -> str:
    if store.ledger.champion() is None:
        return "no policy serves yet; start `art-patch serve --base MODEL`"
    return "no calls are recorded yet; run your agent with art_patch.patch()"
