"""`art-patch run`, `proxy`: record and route an app's calls without changing it; `demo` shows it; `feedback serve`."""

import os
import signal
import sys
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from threading import Event
from typing import Annotated, Any, NoReturn

import typer

from art_patch import demo as demonstration
from art_patch import patching, store
from art_patch._lib.events import event
from art_patch._lib.key_files import read_key
from art_patch.cli import output
from art_patch.cli.commands.web import shown_meanwhile
from art_patch.cli.logs import Log
from art_patch.cli.options import AppSettings, Output, Project, extra
from art_patch.cli.typed_options import Option, command, setting
from art_patch.errors import CommandNotFound, ConfigError
from art_patch.settings import load_settings


@command
def run(
    project: Project,
    app: AppSettings,
    command: Annotated[
        list[str] | None, typer.Argument(help="Program to run, after `--`.", show_default=False, metavar="COMMAND")
    ] = None,
    base_url: Annotated[str | None, setting("base_url")] = None,
) -> None:
    """Run a program as if it, and each program that it starts, began with `art_patch.patch()`.

    art-patch run --project support-bot -- python app.py --its-own-option

    The program replaces this process: signals, exit code, input and output are the program's own.
    A Python that is started with -S, -E or -I, or in which art_patch is not installed, is not patched.
    """
    if not command:
        raise ConfigError("there is nothing to run; write it after `--`: art-patch run -- python app.py")
    given = {
        "project": project.project,
        # Absolute, because the program may change its working directory before it reads the setting.
        "home": None if project.home is None else Path(project.home).absolute(),
        "store": project.store,
        **asdict(app),
        "base_url": base_url,
    }
    settings = load_settings(**given)
    if settings.store is not None:
        # Absolute, for the same reason as the home.
        given["store"] = store.absolute_url(settings.store)
    _become(command, {name: str(value) for name, value in given.items() if value is not None})


def _become(words: list[str], settings: dict[str, str]) -> NoReturn:
    from art_patch.autostart import environment

    sys.stdout.flush()  # the buffer would be lost with this process
    # Python ignores these two signals, and a program inherits what is ignored: `head` would not stop it then.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    try:
        os.execvpe(words[0], words, environment(settings, os.environ))
    except OSError as error:
        reason = "there is no such program" if isinstance(error, FileNotFoundError) else error.strerror
        raise CommandNotFound(f"cannot run {words[0]!r} ({reason}); check the name and your PATH") from None


@command
def proxy(
    project: Project,
    app: AppSettings,
    upstream: Annotated[str, Option("Address of your provider.", env="OPENAI_BASE_URL")] = "https://api.openai.com/v1",
    host: Annotated[str, Option("Address to listen on. Any but loopback requires a key.")] = "127.0.0.1",
    port: Annotated[int, Option("Port to listen on; 0 takes a free one.", least=0, most=65535)] = 8701,
    key_file: Annotated[
        Path | None, Option("File, mode 600, with the key that callers must send as x-art-key.")
    ] = None,
    max_body_mib: Annotated[
        int, Option("Largest request body in MiB that is recorded; a larger one goes upstream unread.", least=1)
    ] = 16,
    *,
    log: Log,
) -> None:
    """Serve the APIs of OpenAI and Anthropic at an address, and route and record its requests: for all HTTP clients.

    Set a client's base URL to that address and keep the provider's own key. The key is sent only to your provider.

    These request headers set a call's trajectory, task, session, user, group and trace: x-art-trajectory-id,
    x-art-scenario, x-art-session-id, x-art-user-id, x-art-group, traceparent.
    """
    # Imported here: it needs Starlette and uvicorn, which the base installation lacks.
    with extra("the proxy", "proxy"):
        from art_patch.metrics import ProxyMetrics
        from art_patch.proxy import PREFIX, SURFACES, run_proxy
    given: dict[str, Any] = {"project": project.project, "home": project.home, "store": project.store, **asdict(app)}
    settings = load_settings(**given)
    key = read_key(None if key_file is None else str(key_file))

    def on_ready(here: str) -> None:
        now = patching.status()
        shown = store.without_password(settings.store_url)
        facts: dict[str, Any] = {"base_url": here, "upstream": upstream, "project": settings.project, "store": shown}
        champion = now.champion or "upstream"
        event(
            "proxy", "ready at %s for %s, champion %s", here, upstream, champion, event="ready", mode=now.mode, **facts
        )
        if project.answered(facts | {"mode": now.mode, "champion": now.champion}):
            return
        console = output.stdout()
        who = f"champion [b]{now.champion}[/]" if now.champion else "no champion yet: calls go upstream"
        console.print(f"[b]{here}[/] stands in for {upstream}   (Ctrl-C stops it)")
        console.print(f"[dim]project {settings.project}, mode {now.mode}, {who}[/]")
        for sentence in now.degraded:
            console.print(f"[yellow]{sentence}[/]")

    monitor = ProxyMetrics(settings.project, [f"{PREFIX}{surface}" for surface in SURFACES], patching.status)
    limit = max_body_mib << 20
    run_proxy(upstream, host=host, port=port, key=key, on_ready=on_ready, max_body=limit, monitor=monitor, **given)
    event("proxy", "the proxy ends", event="end")


@command
def serve_feedback(
    project: Project,
    host: Annotated[str, Option("Address to listen on. Every request must show a signed link.")] = "127.0.0.1",
    port: Annotated[int, Option("Port to listen on; 0 takes a free one.", least=0, most=65535)] = 8702,
    advertise: Annotated[str | None, Option("Address that people use, such as https://feedback.example.com.")] = None,
    redact: Annotated[str | None, setting("redact")] = None,
) -> None:
    """Serve feedback links: a page with thumbs up and down for people, JSON for apps.

    Links are signed with ART_PATCH_FEEDBACK_SECRET if it is set, else with a key file in the project's directory. For
    people on other machines, put a proxy with TLS in front of this server and give the proxy's address with
    --advertise.
    """
    # Imported here: it needs Starlette and uvicorn, which the base installation lacks.
    with extra("the feedback server", "proxy"):
        from art_patch.feedback import run_feedback
    settings = project.settings(redact=redact)

    def on_ready(here: str) -> None:
        if project.answered({"base_url": here, "project": settings.project}):
            return
        console = output.stdout()
        console.print(f"[b]{here}[/] answers feedback links   (Ctrl-C stops it)")
        console.print(f"[dim]project {settings.project}; links: art_patch.feedback_url()[/]")

    run_feedback(settings, host=host, port=port, advertise=advertise, on_ready=on_ready)


_BLOCKS = " \u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"  # a column in eighths


@command
def demo(
    out: Output,
    home: Annotated[Path | None, setting("home")] = None,
    seed: Annotated[int, Option("Seed of model, tasks and updates.", least=0, most=(1 << 63) - 1)] = 1,
    cycles: Annotated[int | None, Option("Number of cycles to run.", least=1)] = None,
    control: Annotated[bool, Option("Shuffle the rewards. Then success must not rise.")] = False,
    single_shot: Annotated[bool, Option("Ask each question once; siblings are re-sampled.")] = False,
    judge: Annotated[str | None, Option("Judge model to use in place of the demo's stand-in.", env=True)] = None,
    judge_base_url: Annotated[str | None, setting("judge_base_url")] = None,
    engine: Annotated[str, Option("vllm, embedded, or auto: vLLM on a GPU, else embedded.")] = "auto",
    web: Annotated[bool, Option("Show it in a browser, live; the page stays until Ctrl-C.")] = False,
) -> None:
    """Watch a tiny agent learn on this machine: traffic, judging, GRPO, gate, promotion.

    Run the command again to continue where it ended. It needs the extra `demo`, but no GPU and no key.
    """
    # A control run and its counterpart must not share what they learn, so each has a project of its own.
    project = f"demo-{seed}" + ("-single-shot" if single_shot else "") + ("-control" if control else "")
    settings = load_settings(project=project, home=home, judge=judge, judge_base_url=judge_base_url)
    with ExitStack() as stack:
        with output.bars(quiet=out.as_json) as shown:
            teller = _Teller(shown, judge=settings.judge, directory=str(settings.directory))
            if web:
                stack.enter_context(shown_meanwhile(settings, teller.say))
            metrics = demonstration.run_demo(
                settings, seed=seed, cycles=cycles or demonstration.CYCLES, control=control, tell=teller, engine=engine,
                single_shot=single_shot,
            )  # fmt: skip
        if not out.answered(metrics):
            _print_summary(metrics, project, "" if home is None else f" --home {settings.directory.parent}")
            if web:
                output.say("the page stays until Ctrl-C", style="dim")
                with suppress(KeyboardInterrupt):
                    Event().wait()


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
    console = output.stdout()
    table = output.Table(title="held-out questions answered right", title_justify="left", box=None, padding=(0, 3))
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
