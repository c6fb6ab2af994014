"""`art-patch demo`: trains a tiny model on the traffic of a sample agent, on a laptop, without changing the agent."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from art_patch import demo as demonstration
from art_patch.cli import output
from art_patch.cli.options import Output
from art_patch.cli.typed_options import Option, command, setting
from art_patch.settings import load_settings

_BLOCKS = " \u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"  # a column in eighths


@command
def demo(
    out: Output,
    home: Annotated[Path | None, setting("home")] = None,
    seed: Annotated[int, Option("Seed of model, tasks and updates.", least=0)] = 1,
    cycles: Annotated[int | None, Option("Number of cycles to run.", least=1)] = None,
    control: Annotated[bool, Option("Shuffle the rewards. Then success must not rise.")] = False,
    single_shot: Annotated[bool, Option("Ask each question once; siblings are re-sampled.")] = False,
    judge: Annotated[str | None, Option("Judge model to use in place of the demo's stand-in.", env=True)] = None,
    judge_base_url: Annotated[str | None, setting("judge_base_url")] = None,
    engine: Annotated[str, Option("vllm, embedded, or auto: vLLM on a GPU, else embedded.")] = "auto",
) -> None:
    """Watch a tiny agent learn on this machine: traffic, judging, GRPO, gate, promotion.

    Run the command again to continue where it ended. It needs `pip install "art-patch[demo]"`, but no GPU and no key.
    """
    # A control run and its counterpart must not share what they learn, so each has a project of its own.
    project = f"demo-{seed}" + ("-single-shot" if single_shot else "") + ("-control" if control else "")
    settings = load_settings(project=project, home=home, judge=judge, judge_base_url=judge_base_url)
    with output.bars(quiet=out.as_json) as shown:
        teller = _Teller(shown, judge=settings.judge, directory=str(settings.directory))
        metrics = demonstration.run_demo(
            settings, seed=seed, cycles=cycles or demonstration.CYCLES, control=control, tell=teller, engine=engine,
            single_shot=single_shot,
        )  # fmt: skip
    if not out.answered(metrics):
        _print_summary(metrics, project, "" if home is None else f" --home {settings.directory.parent}")


class _Teller:
    """Prints what happens during the demo, above the progress bars."""

    def __init__(self, shown: output.Bars, *, judge: str | None, directory: str) -> None:
        self.progress = shown
        self.say(f"[b]art-patch demo[/]: everything lives in {directory}")
        if judge is None:
            self.say("[dim]judge: a stand-in that follows a rule; name a model with --judge to use one[/]")

    def say(self, sentence: str) -> None:
        self.progress.print(sentence)

    def measured(self, row: Mapping[str, Any]) -> None:
        self.progress.clear()
        bar = "\u2588" * round(row["sampled"] * 30)
        self.say(
            f"cycle {row['cycle']}  [b]{row['policy']:<9}[/] sampled {row['sampled']:>4.0%}  "
            f"greedy {row['greedy']:>4.0%}  [green]{bar}[/]"
        )


def _print_summary(metrics: Mapping[str, Any], project: str, home: str) -> None:
    from rich.table import Table

    console = output.stdout()
    table = Table(title="held-out questions answered right", title_justify="left", box=None, padding=(0, 3))
    for column in ("", "before", "after"):
        table.add_column(column, justify="right" if column else "left")
    for name, key in (("sampled", "success"), ("greedy", "greedy")):
        table.add_row(name, f"{metrics[f'{key}_before']:.0%}", f"[b]{metrics[f'{key}_after']:.0%}[/]")
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
    given = "".join(f" --{name.replace('_', '-')}" for name in ("single_shot", "control") if metrics[name])
    # The same options again: without them the next run would belong to another project.
    again = f"art-patch demo --seed {metrics['seed']}{given}{home}"
    again += " --engine vllm" if metrics["engine"] == "vllm" else ""
    console.print(f"database  {metrics['store']}")
    console.print(f"next      [b]{again}[/]   goes on learning")
    console.print(f"          [b]art-patch status --project {project}{home}[/]   who serves, and why")
    console.print("          put [b]import art_patch as art; art.patch()[/] into an agent of yours")


def _curve(values: list[float], height: int = 6) -> list[str]:
    """Return the reward curve as lines of text: a column for each cycle, drawn to an eighth of a line."""
    lines: list[str] = []
    for line in range(height - 1, -1, -1):
        filled = (min(8, max(0, round(value * height * 8) - line * 8)) for value in values)
        share = f"{(line + 1) / height:>5.0%}" if (line + 1) % (height // 2) == 0 else "     "
        lines.append(f"[dim]{share} │[/]  [green]" + "  ".join(_BLOCKS[eighths] * 4 for eighths in filled) + "[/]")
    lines.append("[dim]   0% └" + "──────" * len(values) + "─[/]")
    lines.append("        " + "".join(f"{value:>4.0%}  " for value in values))
    lines.append("[dim] cycle  " + "".join(f"{number:>3}   " for number in range(len(values))) + "[/]")
    return lines
