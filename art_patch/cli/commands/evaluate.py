"""Commands that only measure: `art-patch evaluate` compares two policies, `art-patch judge test` tests a judge."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from art_patch import formats, pipeline, rewards
from art_patch.cli import output
from art_patch.cli.commands.policies import find_engine
from art_patch.cli.commands.retrain import Replays, Suite
from art_patch.cli.options import ActingProject, JudgeModel, Judging, Output, make_judge
from art_patch.cli.typed_options import Option, command
from art_patch.errors import ConfigError, EngineError, MalformedFile
from art_patch.pipeline import CycleConfig
from art_patch.settings import load_settings

if TYPE_CHECKING:
    from art_patch.rewards import JudgeMetrics, Labelled


@command
def evaluate(
    policy: Annotated[str, typer.Argument(help="NAME@STEP of a policy in any state.")],
    judging: Judging,
    replays: Replays,
    suite: Suite,
    project: ActingProject,
    against: Annotated[str | None, Option(help="Policy to compare with. Default: the champion.")] = None,
) -> None:
    """Compare two policies on held-out scenarios with the judge, as the gate does. No policy is promoted or rejected.

    The engine must be up. It loads a policy that it does not serve yet, and unloads it after the comparison. The
    scenarios are the held-out ones that `art-patch score` or `art-patch retrain` found in the traffic. The comparison
    asks for as many answers and judge scores as a gate.

    Exit codes: 0 compared, whatever the result; 2 a setting is wrong; 5 a cycle is running; 6 the engine is down; 7 the
    judge failed; 8 there is no such policy; 11 the policy cannot be served.
    """
    with project.opened(**judging.as_settings()) as (settings, opened):
        config = CycleConfig(
            replay=replays.config(settings),
            checks=rewards.load_checks(settings.checks),
            combination=rewards.load_combination(settings.reward, criteria=settings.criteria),
            gate=suite.gate_config(),
        )
        judge = judging.limited_judge(settings)
        engine = find_engine(settings, opened.ledger)
        if engine is None:
            raise EngineError("no engine is running, so nobody can be asked; start `art-patch serve` and try again")
        with output.bars(quiet=project.as_json) as progress:
            other, verdict = pipeline.evaluate(
                opened, engine, judge, settings.adapters, config, policy, against, who=project.actor("evaluate"),
                progress=progress,
            )  # fmt: skip
    facts = {"policy": policy, "against": other, "better": verdict.promote, "reason": verdict.reason}
    say_comparison(facts | {"metrics": dict(verdict.metrics)}, as_json=project.as_json)


def say_comparison(facts: dict[str, Any], *, as_json: bool) -> None:
    """Print which policy is better, the metrics of the held-out scenarios, and the result of each check of the gate."""
    if as_json:
        output.answer(facts)
        return
    policy, other, metrics = facts["policy"], facts["against"], facts["metrics"]
    colour, word = ("green", "is better than") if facts["better"] else ("yellow", "is not shown to be better than")
    output.stdout().print(f"[b]{policy}[/] [{colour}]{word}[/] [b]{other}[/]", soft_wrap=True)
    output.say(f"  {facts['reason']}")
    rows = [("held-out scenarios", f"{metrics['scenarios']}, {metrics['turns']} turns or runs")]
    if "difference" in metrics:  # a gate that had too little to compare measured none
        rows += [
            (policy, f"{metrics['candidate']:.3f}"),
            (other, f"{metrics['champion']:.3f}"),
            ("difference", f"{metrics['difference']:+.3f}"),
            ("at least", f"{metrics['lower_bound']:+.3f} with {metrics['config']['level']:.0%} confidence"),
        ]
    if metrics["judge"] is not None:
        rows.append(("judge", f"{metrics['judge']}, rubric {metrics['rubric']}, {metrics['judge_calls']} calls"))
    for name, value in rows:
        output.say(f"  {name:<22} {value}")
    for row in metrics["checks"]:
        output.say(f"  {'passed' if row['passed'] else 'FAILED':<7} {row['words']}")
    output.stdout().print("nobody was promoted or rejected")


@command
def judge_test(
    model: JudgeModel,
    out: Output,
    file: Annotated[str | None, typer.Argument(help="Labelled groups as JSON lines; `-` is stdin.")] = None,
    builtin: Annotated[bool, Option(help="Use the twelve labelled groups that art_patch contains.")] = False,
) -> None:
    """Measure a judge on groups whose order people have decided, before anything is learned from its scores.

    A line of the file is one group: {"task": "...", "attempts": [{"messages": [...], "label": 0..1}, ...]}. A group may
    have `messages` in place of `task`, for a prompt of several messages, and `tools`, the tools that were offered. An
    attempt may have `rank` in place of `label`; rank 1 is the best. The judge is asked about four times for each group.

    Exit codes: 0 measured, whatever the result; 2 a setting is wrong; 7 the judge failed; 15 a line is wrong, and
    nothing was sent.
    """
    if (file is None) != builtin:
        raise ConfigError("name a file of labelled groups, or --builtin for ours; one of both")
    settings = load_settings(**model.as_settings())
    # Before the judge is made: a wrong line must cost nothing.
    labelled = _read(file or str(rewards.BUILTIN))
    tested = make_judge(settings)
    with output.bars(quiet=out.as_json) as progress:
        metrics = rewards.measure(labelled, tested, progress=progress.counts("judge"))
    if out.as_json:
        output.answer({"judge": tested.model, "rubric": tested.rubric.version, **asdict(metrics)})
    else:
        _print_metrics(tested.model, metrics)


def _read(file: str) -> list[Labelled]:
    """Return the labelled groups. The whole file is read before the judge is asked: a wrong line costs nothing."""
    name = "stdin" if file == formats.STREAM else file
    labelled: list[Labelled] = []
    with formats.reading(file) as rows:
        for place, row in rows():
            try:
                labelled.append(rewards.read_labelled(row, place))
            except MalformedFile as error:
                raise MalformedFile(f"{name}, {place}: {error}; nothing was sent") from None
    if not any(len(set(each.labels.values())) > 1 for each in labelled):
        raise MalformedFile(
            f"{name} has no group whose attempts are labelled differently, so there is nothing to compare with; "
            "give better attempts higher labels; nothing was sent"
        )
    return labelled


def _print_metrics(model: str, metrics: JudgeMetrics) -> None:
    share = output.share
    rows = (
        ("agrees with the labels", share(metrics.pairwise_accuracy), f"of {metrics.pairs} pairs; by chance 50 %"),
        ("Kendall's tau", _number(metrics.kendall_tau), "1 the same order, 0 chance, -1 the reverse"),
        ("shown first, an attempt gets", _number(metrics.position_bias, "+.3f"), "more; 0 is fair"),
        ("turned around by the order", share(metrics.flips), "of all pairs; 0 % is fair"),
        ("differs by order", _number(metrics.order_difference), f"asked again: {_number(metrics.repeat_difference)}"),
        ("agrees with itself", share(metrics.self_consistency), "of all pairs, asked twice in one order"),
        ("resists pleas", share(metrics.resisted), f"of {metrics.injections} copies that talk to the judge"),
    )
    console = output.stdout()
    console.print(f"{output.one_line(model)}: {metrics.groups} groups judged", markup=False)
    table = output.grid("", "bold", "dim")
    # Numbers are read from the right.
    table.columns[1].justify, table.columns[1].no_wrap = "right", True
    for row in rows:
        table.add_row(*row)
    console.print(table)
    cost = "unknown price" if metrics.cost_usd is None else f"{metrics.cost_usd:.4f} USD"
    tokens = f"{metrics.prompt_tokens} + {metrics.completion_tokens} tokens"
    console.print(f"{metrics.calls} calls, {tokens}, {cost}")
    for place, reason in metrics.unscored.items():
        console.print(output.cell(f"not judged: {place}: {reason}", style="yellow"))


def _number(value: float | None, form: str = ".3f") -> str:
    return "-" if value is None else f"{value:{form}}"
