"""`art-patch retrain`: one cycle, for cron or by hand."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer

from art_patch.cli.options import HomeOption, JsonOption, ProjectOption, StoreOption, WhoOption, who_am_i


def retrain(
    judge: Annotated[
        str | None, typer.Option("--judge", envvar="ART_PATCH_JUDGE", help="litellm name of the judge model.")
    ] = None,
    judge_base_url: Annotated[
        str | None, typer.Option("--judge-base-url", envvar="ART_PATCH_JUDGE_BASE_URL", help="Where the judge answers.")
    ] = None,
    settle_s: Annotated[
        float, typer.Option("--settle-s", help="A trajectory is whole when it was silent this long.")
    ] = 60.0,
    min_groups: Annotated[int, typer.Option("--min-groups", help="Train on no fewer scored groups than this.")] = 4,
    learning_rate: Annotated[float, typer.Option("--learning-rate", help="Peak learning rate.")] = 1e-4,
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
    from art_patch.cli.output import answer, bars
    from art_patch.cycle import CycleConfig, prune
    from art_patch.cycle import retrain as run
    from art_patch.errors import EngineError, GateRejected
    from art_patch.rewards.judge import Judge
    from art_patch.rewards.rubric import load_rubric
    from art_patch.serving.client import EngineClient
    from art_patch.serving.keys import read_key
    from art_patch.settings import load_settings
    from art_patch.store import open_store
    from art_patch.training import TrainConfig

    settings = load_settings(project=project, home=home, store=store, judge=judge, judge_base_url=judge_base_url)
    opened = open_store(settings.store_url)
    config = CycleConfig(
        settle_s=settle_s,
        min_groups=min_groups,
        train=TrainConfig(learning_rate=learning_rate),
        keep_days=settings.keep_days,
        keep_trajectories=settings.keep_trajectories,
    )
    if opened.ledger.champion() is None or not opened.read.counts()["calls"]:
        with bars(quiet=as_json) as progress:
            prune(opened, config, progress, who=who_am_i(who, "retrain"))
        _say({"outcome": "nothing to do", "reason": _what_is_missing(opened)}, as_json)
        return
    chief = Judge(
        settings.judge,
        base_url=settings.judge_base_url,
        api_key=settings.judge_api_key,
        rubric=load_rubric(settings.rubric),
    )
    route = opened.ledger.route()
    base_url = settings.base_url or route.base_url
    if base_url is None:
        raise EngineError("no engine is running, so no candidate could be tested; start `art-patch serve` first")
    engine = EngineClient(base_url, read_key(route.key_file))
    engine.wait_ready(timeout_s=10.0)
    with bars(quiet=as_json) as progress:
        report = run(opened, engine, chief, settings.adapters, config, who=who_am_i(who, "retrain"), progress=progress)
    opened.close()
    if as_json:
        answer(asdict(report))
    else:
        _say(asdict(report), as_json)
    if report.outcome == "rejected":
        raise typer.Exit(GateRejected.exit_code)


def _what_is_missing(store: Any) -> str:
    if store.ledger.champion() is None:
        return "no policy serves yet; start `art-patch serve --base MODEL`"
    return "no calls are recorded yet; run your agent with art_patch.patch()"


def _say(report: dict[str, Any], as_json: bool) -> None:
    from art_patch.cli.output import answer, stdout

    if as_json:
        answer(report)
        return
    console, figures = stdout(), report.get("figures") or {}
    colour = {"promoted": "green", "rejected": "yellow"}.get(report["outcome"], "dim")
    console.print(f"[{colour}]{report['outcome']}[/] {report.get('candidate') or ''}: {report['reason']}")
    for stage, values in figures.items():
        shown = ", ".join(
            f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in values.items()
        )
        console.print(f"  [dim]{stage:<6}[/] {shown}")
