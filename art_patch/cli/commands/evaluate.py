"""`art-patch evaluate`: one policy against another on held-out scenarios, and nothing is decided by it."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from art_patch.cli.options.cycle import (
    ReplayMaxOption,
    ReplayOption,
    ReplayPythonOption,
    ReplayTimeoutOption,
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
from art_patch.cli.options.shared import HomeOption, JsonOption, ProjectOption, StoreOption, WhoOption, who_am_i


def evaluate(
    policy: Annotated[str, typer.Argument(help="NAME@STEP, in whatever state.")],
    against: Annotated[
        str | None, typer.Option("--against", help="The other.  [default: the champion]", show_default=False)
    ] = None,
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
    suite: SuiteOption = None,
    project: ProjectOption = None,
    home: HomeOption = None,
    store: StoreOption = None,
    who: WhoOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compare two policies as the gate does: by the judge, on held-out scenarios. Nobody is promoted or rejected.

    The engine must be up. A policy that it does not serve is loaded for this and unloaded afterwards. Scenarios are
    those that `art-patch score` or `art-patch retrain` found in the traffic; answering and judging cost what a gate
    costs.

    Exit codes: 0 compared, whatever came out; 2 a setting is wrong; 5 a cycle is running; 6 the engine is down; 7 the
    judge failed; 8 there is no such policy; 11 it cannot be served.
    """
    from art_patch.cli.commands.policies import find_engine
    from art_patch.cli.options.opening import opened_store
    from art_patch.cli.views.output import bars
    from art_patch.errors import EngineError
    from art_patch.gate import GateConfig, read_suite
    from art_patch.pipeline import CycleConfig
    from art_patch.pipeline import evaluate as compare
    from art_patch.rewards import load_checks, load_combination

    with opened_store(
        project=project, home=home, store=store, judge=judge, judge_base_url=judge_base_url, rubric=rubric,
        checks=tuple(check) if check else None,
    ) as (settings, opened):  # fmt: skip
        config = CycleConfig(
            replay=replay_config(
                settings, replay, at_most=replay_max, timeout_s=replay_timeout_s, python=replay_python
            ),
            checks=load_checks(settings.checks),
            combination=load_combination(settings.reward, criteria=settings.criteria),
            gate=GateConfig(suite=read_suite(suite) if suite else ()),
        )
        chief = make_judge(settings, max_usd=max_usd, max_calls=max_calls)
        engine = find_engine(settings, opened.ledger)
        if engine is None:
            raise EngineError("no engine is running, so nobody can be asked; start `art-patch serve` and try again")
        with bars(quiet=as_json) as progress:
            other, verdict = compare(
                opened, engine, chief, settings.adapters, config, policy, against, who=who_am_i(who, "evaluate"),
                progress=progress,
            )  # fmt: skip
    facts = {"policy": policy, "against": other, "better": verdict.promote, "reason": verdict.reason}
    say(facts | {"metrics": dict(verdict.metrics)}, as_json=as_json)


def say(facts: dict[str, Any], *, as_json: bool) -> None:
    """Print what came out: who is better, the metrics of the scenarios, and every check."""
    from art_patch.cli.views.output import answer, stdout

    if as_json:
        answer(facts)
        return
    console, policy, other, metrics = stdout(), facts["policy"], facts["against"], facts["metrics"]
    colour, word = ("green", "is better than") if facts["better"] else ("yellow", "is not shown to be better than")
    console.print(f"[b]{policy}[/] [{colour}]{word}[/] [b]{other}[/]", soft_wrap=True)
    console.print(f"  {facts['reason']}", markup=False, soft_wrap=True)
    for name, value in _rows(policy, other, metrics):
        console.print(f"  {name:<22} {value}", markup=False, soft_wrap=True)
    for row in metrics["checks"]:
        console.print(f"  {'passed' if row['passed'] else 'FAILED':<7} {row['words']}", markup=False, soft_wrap=True)
    console.print("nobody was promoted or rejected")


def _rows(policy: str, other: str, metrics: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [("held-out scenarios", f"{metrics['scenarios']}, {metrics['turns']} turns or runs")]
    if "difference" in metrics:
        rows += [
            (policy, f"{metrics['candidate']:.3f}"),
            (other, f"{metrics['champion']:.3f}"),
            ("difference", f"{metrics['difference']:+.3f}"),
            ("at least", f"{metrics['lower_bound']:+.3f} with {metrics['config']['level']:.0%} confidence"),
        ]
    if metrics["judge"] is not None:
        rows.append(("judge", f"{metrics['judge']}, rubric {metrics['rubric']}, {metrics['judge_calls']} calls"))
    return rows
