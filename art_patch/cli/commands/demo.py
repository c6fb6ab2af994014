"""`art-patch demo`: an unchanged agent gets better from its own traffic, on a laptop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from art_patch.cli.options.shared import HomeOption, JsonOption


def demo(
    seed: Annotated[int, typer.Option("--seed", help="Of model, tasks and update.", min=0)] = 1,
    cycles: Annotated[int | None, typer.Option("--cycles", help="How many to run.", min=1, show_default=False)] = None,
    control: Annotated[bool, typer.Option("--control", help="Shuffle the rewards: success must not rise.")] = False,
    single_shot: Annotated[
        bool, typer.Option("--single-shot", help="Ask every question once; siblings are re-sampled.")
    ] = False,
    judge: Annotated[
        str | None, typer.Option("--judge", envvar="ART_PATCH_JUDGE", help="A real judge instead of the stand-in.")
    ] = None,
    judge_base_url: Annotated[
        str | None, typer.Option("--judge-base-url", envvar="ART_PATCH_JUDGE_BASE_URL", help="Where the judge answers.")
    ] = None,
    engine: Annotated[
        str, typer.Option("--engine", help="vllm, embedded, or auto: vLLM on a GPU, else embedded.")
    ] = "auto",
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Watch a tiny agent learn: traffic, judging, GRPO, gate, promotion, all on this machine.

    Run it again and it goes on from where it stopped. Needs `pip install "art-patch[demo]"`, no GPU and no key.
    """
    from art_patch.cli.views.output import answer, bars, stdout
    from art_patch.demo import CYCLES, run_demo
    from art_patch.settings import load_settings

    project = f"demo-{seed}" + ("-single-shot" if single_shot else "") + ("-control" if control else "")
    settings = load_settings(project=project, home=home, judge=judge, judge_base_url=judge_base_url)
    with bars(quiet=as_json) as shown:
        teller = _Teller(shown, quiet=as_json, judge=settings.judge, directory=str(settings.directory))
        metrics = run_demo(
            settings, seed=seed, cycles=cycles or CYCLES, control=control, tell=teller, engine=engine,
            single_shot=single_shot,
        )  # fmt: skip
    if as_json:
        answer(metrics)
    else:
        _summary(stdout(), metrics, project, home is not None and str(settings.directory.parent))


_BLOCKS = " \u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"


class _Teller:
    def __init__(self, shown: Any, *, quiet: bool, judge: str | None, directory: str) -> None:
        self._shown, self._quiet = shown, quiet
        self.say(f"[b]art-patch demo[/]: everything lives in {directory}")
        if judge is None:
            self.say("[dim]judge: a stand-in that follows a rule; name a model with --judge to use one[/]")

    def progress(self, stage: str, done: int, total: int, note: str = "") -> None:
        self._shown(stage, done, total, note)

    def say(self, sentence: str) -> None:
        self._shown.print(sentence)

    def measured(self, row: Mapping[str, Any]) -> None:
        self._shown.clear()
        bar = "\u2588" * round(row["sampled"] * 30)
        self._shown.print(
            f"cycle {row['cycle']}  [b]{row['policy']:<9}[/] sampled {row['sampled']:>4.0%}  "
            f"greedy {row['greedy']:>4.0%}  [green]{bar}[/]"
        )


def _summary(console: Any, metrics: Mapping[str, Any], project: str, home: object) -> None:
    from rich.table import Table

    table = Table(title="held-out questions answered right", title_justify="left", box=None, padding=(0, 3))
    for column in ("", "before", "after"):
        table.add_column(column, justify="left" if not column else "right")
    table.add_row("sampled", f"{metrics['success_before']:.0%}", f"[b]{metrics['success_after']:.0%}[/]")
    table.add_row("greedy", f"{metrics['greedy_before']:.0%}", f"[b]{metrics['greedy_after']:.0%}[/]")
    console.print()
    console.print(table)
    console.print()
    for line in _curve(metrics["curve"]):
        console.print(line)
    console.print(
        f"\n{metrics['calls']} calls, {metrics['failed_calls']} failed or fell back; "
        f"{metrics['promotions']} promotions in {metrics['cycles']} cycles; {metrics['wall_s']:.0f} s; "
        f"the agent's memory grew by {metrics['app_rss_added_mib']:.0f} MiB"
    )
    where = f" --home {home}" if home else ""
    given = "".join(f" --{name.replace('_', '-')}" for name in ("single_shot", "control") if metrics[name])
    again = f"art-patch demo --seed {metrics['seed']}{given}{where}"
    again += " --engine vllm" if metrics["engine"] == "vllm" else ""
    console.print(f"database  {metrics['store']}")
    console.print(f"next      [b]{again}[/]   goes on learning")
    console.print(f"          [b]art-patch status --project {project}{where}[/]   who serves, and why")
    console.print("          put [b]import art_patch as art; art.patch()[/] into an agent of yours")


def _curve(values: list[float], height: int = 6) -> list[str]:
    """The reward curve as one column of blocks a cycle; an eighth of a line is the smallest step."""
    lines: list[str] = []
    for line in range(height - 1, -1, -1):
        filled = (min(8, max(0, round(value * height * 8) - line * 8)) for value in values)
        share = f"{(line + 1) / height:>5.0%}" if (line + 1) % (height // 2) == 0 else "     "
        lines.append(f"[dim]{share} │[/]  [green]" + "  ".join(_BLOCKS[eighths] * 4 for eighths in filled) + "[/]")
    lines.append("[dim]   0% └" + "──────" * len(values) + "─[/]")
    lines.append("        " + "".join(f"{value:>4.0%}  " for value in values))
    lines.append("[dim] cycle  " + "".join(f"{number:>3}   " for number in range(len(values))) + "[/]")
    return lines
