"""Formats the result of `art-patch report` for a terminal of 80 columns, as Markdown, or as JSON."""

from collections.abc import Iterator
from dataclasses import asdict
from datetime import datetime
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from art_patch.cli.output import cell, changed, counted, one_line, share, usd
from art_patch.insights import Report

_COLOURS = {"switch": "green", "do not switch": "red", "not enough data": "yellow"}
_NAMES = {"reward": "by your rewards", "judged": "by the judge"}

Rows = list[list[str]]  # a header row and the rows below it. The first cell of each row is its name


def as_facts(report: Report) -> dict[str, Any]:
    """Return the report as a dictionary for JSON, with computed sums and differences. Unknown numbers are `None`."""
    facts = asdict(report)
    facts["upstream_change"] = report.upstream_change and report.upstream_change._asdict()
    facts["money"] = report.money.as_facts()
    for told, comparison in zip(facts["comparisons"], report.comparisons, strict=True):
        told["difference"] = comparison.difference
    return facts


def show(report: Report, project: str, console: Console) -> None:
    """Print the report on the console: the verdict, its reasons, the tables, and warnings."""
    colour = _COLOURS[report.verdict]
    console.print(f"{project}, {_when(report)}", style="dim", markup=False)
    console.print(f"[b {colour}]{report.verdict}[/]")
    for reason in report.reasons:
        _bullet(console, reason)
    for rows in _tables(report):
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
        for index, head in enumerate(rows[0]):
            table.add_column(head, justify="right" if index else "left", overflow="fold")
        for row in rows[1:]:
            table.add_row(*map(Text, row))
        console.print()
        console.print(table)
    if notes := list(_notes(report)):
        console.print("\n[yellow]to keep in mind[/]")
        for note in notes:
            _bullet(console, note)


def as_markdown(report: Report, project: str) -> str:
    """Return the report as a Markdown text for the option `--markdown`."""
    lines = [f"# {project}: {report.verdict}", "", f"{_when(report).capitalize()}.", ""]
    lines += [f"- {_escaped(reason)}" for reason in report.reasons]
    for rows in _tables(report):
        head, *rest = ([_escaped(cell) for cell in row] for row in rows)
        lines += ["", f"| {' | '.join(head)} |", "|---" + "|---:" * (len(head) - 1) + "|"]
        lines += [f"| {' | '.join(row)} |" for row in rest]
    if notes := [f"- {_escaped(note)}" for note in _notes(report)]:
        lines += ["", "To keep in mind:", "", *notes]
    return "\n".join(lines) + "\n"


def _tables(report: Report) -> Iterator[Rows]:
    sides = report.sides
    yield [
        ["", *(side.name for side in sides)],
        ["calls", *(f"{side.calls:,}" for side in sides)],
        ["share", *(share(side.share) for side in sides)],
        ["failed", *(share(side.failed) for side in sides)],
        ["latency p50", *(_ms(side.p50_ms) for side in sides)],
        ["latency p95", *(_ms(side.p95_ms) for side in sides)],
    ]
    yield _scores(report)
    yield _money(report)


def _scores(report: Report) -> Rows:
    rows = [["quality", report.sides[0].name, "upstream", "difference", "95 % limits"]]
    for each in report.comparisons:
        counted = (each.ours_scored, each.theirs_scored)
        unit = "" if each.kind == "reward" else " groups"
        means = [
            "not scored" if mean is None else f"{mean:.3f} of {count:,}{unit}"
            for mean, count in zip((each.ours, each.theirs), counted, strict=True)
        ]
        difference = "" if each.difference is None else f"{each.difference:+.3f}"
        # With too few scores a difference is shown, but no confidence limits.
        limits = "too few" if each.difference is not None else ""
        if each.low is not None and each.high is not None:
            limits = f"{each.low:+.3f}..{each.high:+.3f}"
        rows.append([_NAMES[each.kind], *means, difference, limits])
    unscored = [f"{report.unscored[side]:,}" if side in report.unscored else "" for side in ("champion", "upstream")]
    return [*rows, ["unscored runs", *unscored, "", ""]]


def _money(report: Report) -> Rows:
    money = report.money
    # One unknown part makes a sum unknown; it is never counted as zero.
    every = None if money.avoided_usd is None or money.upstream_usd is None else money.avoided_usd + money.upstream_usd
    # Costs stand with a minus: the last row is the sum of the column.
    costs = (("GPU", money.gpu_usd), ("judge", money.judge_usd), ("updates", money.training_usd))
    return [
        ["money", "as it was", "if ours had answered every call"],
        ["paid to upstream", usd(money.upstream_usd), usd(0.0)],
        ["not paid, for ours answered", usd(money.avoided_usd), usd(every)],
        *([name, *[usd(None if cost is None else -cost)] * 2] for name, cost in costs),
        ["saved in all", usd(money.saved_usd), usd(money.saved_if_all_usd)],
    ]


def _notes(report: Report) -> Iterator[str]:
    yield from report.cautions
    if (change := report.upstream_change) is not None:
        runs = counted(report.outdated, "run", "runs")
        yield f"{changed(change)}; the comparison leaves out what upstream did before ({runs})"
    elif report.outdated:
        runs = counted(report.outdated, "run", "runs")
        yield f"the comparison leaves out {runs} of upstream's that began before its model changed"
    yield from report.money.notes
    if report.fallbacks:
        most = sorted(report.fallbacks.items(), key=lambda item: -item[1])
        reasons = ", ".join(f"{one_line(reason)} {count:,}" for reason, count in most[:10])
        yield f"calls that went upstream after all: {reasons}"
    if report.mixed:
        yield f"{report.mixed:,} runs were answered by several policies and count in no side's quality"


def _bullet(console: Console, text: str) -> None:
    # A grid, so that the second line of a long text is indented like its first.
    row = Table.grid(padding=(0, 1, 0, 0))
    row.add_column()
    row.add_column(overflow="fold")
    row.add_row("·", cell(text))
    console.print(row)


def _when(report: Report) -> str:
    begin, end = (f"{datetime.fromtimestamp(at):%Y-%m-%d %H:%M}" for at in (report.since, report.until))
    return f"from {begin} to {end}"


def _escaped(text: str) -> str:
    # Recorded reasons may hold a pipe, which would end the cell, or a tag, which a browser would obey.
    return one_line(text).replace("|", "\\|").replace("<", "&lt;")


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f} ms"
