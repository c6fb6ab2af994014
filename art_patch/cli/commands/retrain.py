"""`art-patch retrain`: one cycle, for cron or by hand."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import typer

from art_patch.cli.options.cycle import (
    BackendOption,
    BatchSizeOption,
    CanaryPercentOption,
    EvalStepsOption,
    GradientAccumulationStepsOption,
    IdleMinutesOption,
    IdleOnlyOption,
    ImitateFromOption,
    KlOption,
    LearningRateOption,
    LearnTruncatedOption,
    LoraDropoutOption,
    LossOption,
    MaxMinutesOption,
    MinGroupsOption,
    PreferFromOption,
    ProcessesOption,
    PromotionOption,
    RehearseFromOption,
    RehearseWeightOption,
    ReplayMaxOption,
    ReplayOption,
    ReplayPythonOption,
    ReplayTimeoutOption,
    ResampleMaxOption,
    ResampleOption,
    ResamplePerMinuteOption,
    ResamplePickOption,
    ResampleTurnsOption,
    ResampleWindowOption,
    SaveStepsOption,
    SeedOption,
    SettleOption,
    StartOption,
    SuiteOption,
    replay_config,
)
from art_patch.cli.options.judging import (
    CheckOption,
    JudgeBaseUrlOption,
    JudgeOption,
    MaxCallsOption,
    MaxUsdOption,
    RubricOption,
    make_judge,
)
from art_patch.cli.options.opening import open_existing
from art_patch.cli.options.shared import HomeOption, JsonOption, ProjectOption, StoreOption, WhoOption, who_am_i


def retrain(
    judge: JudgeOption = None,
    judge_base_url: JudgeBaseUrlOption = None,
    rubric: RubricOption = None,
    max_usd: MaxUsdOption = None,
    max_calls: MaxCallsOption = None,
    check: CheckOption = None,
    replay: ReplayOption = 0,
    replay_max: ReplayMaxOption = 100,
    replay_timeout_s: ReplayTimeoutOption = 300.0,
    replay_python: ReplayPythonOption = None,
    resample: ResampleOption = 7,
    resample_turns: ResampleTurnsOption = 1,
    resample_pick: ResamplePickOption = "spread",
    resample_max: ResampleMaxOption = 200,
    resample_per_minute: ResamplePerMinuteOption = None,
    resample_window: ResampleWindowOption = None,
    settle_s: SettleOption = 60.0,
    min_groups: MinGroupsOption = 4,
    learning_rate: LearningRateOption = 1e-4,
    batch_size: BatchSizeOption = None,
    gradient_accumulation_steps: GradientAccumulationStepsOption = 1,
    save_steps: SaveStepsOption = None,
    eval_steps: EvalStepsOption = None,
    lora_dropout: LoraDropoutOption = 0.0,
    loss: LossOption = "dapo",
    kl: KlOption = 0.0,
    start: StartOption = "champion",
    imitate_from: ImitateFromOption = None,
    prefer_from: PreferFromOption = None,
    rehearse_from: RehearseFromOption = None,
    rehearse_weight: RehearseWeightOption = 0.1,
    learn_truncated: LearnTruncatedOption = True,
    processes: ProcessesOption = 1,
    backend: BackendOption = "auto",
    seed: SeedOption = 0,
    suite: SuiteOption = None,
    max_minutes: MaxMinutesOption = None,
    idle_only: IdleOnlyOption = False,
    idle_minutes: IdleMinutesOption = 5.0,
    promotion: PromotionOption = None,
    canary_percent: CanaryPercentOption = None,
    project: ProjectOption = None,
    home: HomeOption = None,
    store: StoreOption = None,
    who: WhoOption = None,
    as_json: JsonOption = False,
) -> None:
    """Group, score, train, gate and promote, once; or look after the policy that is tested on the apps' traffic.

    Each cycle leaves its report in the project's directory, `cycles/`, as JSON and Markdown.

    Exit codes: 0 promoted, waiting for approval, being tested, out of time, not idle, or nothing to do; 4 the candidate
    was rejected; 5 another cycle is running, or took this one's lease over; 6 the engine is down; 7 the judge failed; 8
    the store cannot be used; 13 the update failed; others as in the docs. Serving is never touched by a failed cycle.
    """
    from art_patch.cli.commands.watch import canary_config
    from art_patch.cli.options.meaning import make_embed
    from art_patch.cli.views.cycle_report import say
    from art_patch.cli.views.output import bars
    from art_patch.errors import EngineError, GateRejected
    from art_patch.gate import GateConfig, read_suite
    from art_patch.grouping import ResampleConfig
    from art_patch.pipeline import CycleConfig, prune
    from art_patch.pipeline import retrain as run
    from art_patch.rewards import load_checks, load_combination
    from art_patch.serving import EngineClient
    from art_patch.settings import load_settings
    from art_patch.training import LossConfig, TrainConfig

    settings = load_settings(
        project=project, home=home, store=store, judge=judge, judge_base_url=judge_base_url, rubric=rubric,
        checks=tuple(check) if check else None, promotion=promotion, canary_percent=canary_percent,
    )  # fmt: skip
    config = CycleConfig(
        settle_s=settle_s,
        min_groups=min_groups,
        across=settings.group_across,
        embed=make_embed(settings),
        replay=replay_config(settings, replay, at_most=replay_max, timeout_s=replay_timeout_s, python=replay_python),
        resample=None
        if not resample
        else ResampleConfig(
            resample, resample_turns, resample_pick, resample_max, resample_per_minute, resample_window
        ),
        checks=load_checks(settings.checks),
        combination=load_combination(settings.reward, criteria=settings.criteria),
        train=TrainConfig(
            learning_rate=learning_rate,
            batch_size=batch_size,
            gradient_accumulation_steps=gradient_accumulation_steps,
            save_steps=save_steps,
            eval_steps=eval_steps,
            lora_dropout=lora_dropout,
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
        gate=GateConfig(suite=read_suite(suite) if suite else ()),
        promotion=settings.promotion,
        canary_percent=settings.canary_percent,
        canary=canary_config(settings),
        max_minutes=max_minutes,
        idle_minutes=idle_minutes if idle_only else None,
        keep_days=settings.keep_days,
        keep_trajectories=settings.keep_trajectories,
    )
    opened = open_existing(settings)
    if opened.ledger.champion() is None or not opened.read.counts()["calls"]:
        with bars(quiet=as_json) as progress:
            prune(opened, config, progress, who=who_am_i(who, "retrain"))
        say({"outcome": "nothing to do", "reason": _what_is_missing(opened)}, as_json=as_json)
        return
    chief = make_judge(settings, max_usd=max_usd, max_calls=max_calls)
    engine = EngineClient.of_route(settings, opened.ledger.route())
    if engine is None:
        raise EngineError("no engine is running, so no candidate could be tested; start `art-patch serve` first")
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
