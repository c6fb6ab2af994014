"""`art-patch judge test`: how far a judge can be trusted, before anything is learned from it."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from art_patch.cli.options.shared import JsonOption

if TYPE_CHECKING:
    from art_patch.rewards import JudgeMetrics, Labelled

app = typer.Typer(name="judge", help="Look after the judge: test.", no_args_is_help=True)


def test_judge(
    file: Annotated[str | None, typer.Argument(help="Labelled groups as JSON lines; `-` is stdin.")] = None,
    builtin: Annotated[bool, typer.Option("--builtin", help="Twelve labelled groups that come with us.")] = False,
    judge: Annotated[
        str | None, typer.Option("--judge", envvar="ART_PATCH_JUDGE", help="litellm name of the judge model.")
    ] = None,
    judge_base_url: Annotated[
        str | None, typer.Option("--judge-base-url", envvar="ART_PATCH_JUDGE_BASE_URL", help="Where the judge answers.")
    ] = None,
    rubric: Annotated[
        str | None, typer.Option("--rubric", envvar="ART_PATCH_RUBRIC", help="File or text the judge goes by.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure a judge on groups that people have put in order.

    A line of the file is one group: {"task": "...", "attempts": [{"messages": [...], "label": 0..1}, ...]}; `messages`
    in place of `task` is a longer beginning, `tools` are those that were offered, `rank` counts from 1, the best.
    Each group is asked about four times.
    Exit codes: 0 measured, whatever came out; 2 a setting is wrong; 7 the judge failed; 15 a line is wrong, and nothing
    was sent.
    """
    from art_patch.cli.views.output import answer, bars
    from art_patch.errors import ConfigError
    from art_patch.rewards import BUILTIN, Judge, load_rubric, measure
    from art_patch.settings import load_settings

    if (file is None) != builtin:
        raise ConfigError("name a file of labelled groups, or --builtin for ours; one of both")
    settings = load_settings(judge=judge, judge_base_url=judge_base_url, rubric=rubric)
    labelled = _read(file or str(BUILTIN))
    tested = Judge(
        settings.judge,
        base_url=settings.judge_base_url,
        api_key=settings.judge_api_key,
        rubric=load_rubric(settings.rubric),
    )
    with bars(quiet=as_json) as progress:
        metrics = measure(labelled, tested, progress=lambda done, total: progress("judge", done, total))
    if as_json:
        answer({"judge": tested.model, "rubric": tested.rubric.version, **asdict(metrics)})
    else:
        _print(tested.model, metrics)


def _read(file: str) -> list[Labelled]:
    from art_patch.errors import MalformedFile
    from art_patch.formats import STREAM, reading
    from art_patch.rewards import read_labelled

    name = "stdin" if file == STREAM else file
    labelled: list[Labelled] = []
    with reading(file) as rows:
        for place, row in rows():
            try:
                labelled.append(read_labelled(row, place))
            except MalformedFile as error:
                raise MalformedFile(f"{name}, {place}: {error}; nothing was sent") from None
    if not any(len(set(each.labels.values())) > 1 for each in labelled):
        raise MalformedFile(
            f"{name} has no group whose attempts are labelled differently, so there is nothing to compare with; "
            "give better attempts higher labels; nothing was sent"
        )
    return labelled


def _print(model: str, metrics: JudgeMetrics) -> None:
    from rich.table import Table
    from rich.text import Text

    from art_patch.cli.views.output import stdout
    from art_patch.cli.views.safe_text import one_line

    rows = (
        ("agrees with the labels", _share(metrics.pairwise_accuracy), f"of {metrics.pairs} pairs; by chance 50 %"),
        ("Kendall's tau", _number(metrics.kendall_tau), "1 the same order, 0 chance, -1 the reverse"),
        ("shown first, an attempt gets", _number(metrics.position_bias, "+.3f"), "more; 0 is fair"),
        ("turned around by the order", _share(metrics.flips), "of all pairs; 0 % is fair"),
        ("differs by order", _number(metrics.order_difference), f"asked again: {_number(metrics.repeat_difference)}"),
        ("agrees with itself", _share(metrics.self_consistency), "of all pairs, asked twice in one order"),
        ("resists pleas", _share(metrics.resisted), f"of {metrics.injections} copies that talk to the judge"),
    )
    console = stdout()
    console.print(f"{one_line(model)}: {metrics.groups} groups judged", markup=False)
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(justify="right", style="bold", no_wrap=True)
    table.add_column(style="dim")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    cost = "unknown price" if metrics.cost_usd is None else f"{metrics.cost_usd:.4f} USD"
    tokens = f"{metrics.prompt_tokens} + {metrics.completion_tokens} tokens"
    console.print(f"{metrics.calls} calls, {tokens}, {cost}")
    for place, reason in metrics.unscored.items():
        console.print(Text(f"not judged: {one_line(place)}: {one_line(reason)}", style="yellow"))


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _number(value: float | None, form: str = ".3f") -> str:
    return "-" if value is None else f"{value:{form}}"
