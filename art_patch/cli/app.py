"""The Typer application and the one place where errors become exit codes."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable
from functools import wraps
from io import StringIO
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from art_patch.cli.commands.analytics import analytics
from art_patch.cli.commands.cron import app as cron
from art_patch.cli.commands.demo import demo
from art_patch.cli.commands.doctor import doctor
from art_patch.cli.commands.erase import erase
from art_patch.cli.commands.evaluate import evaluate
from art_patch.cli.commands.export import export
from art_patch.cli.commands.feedback import app as feedback
from art_patch.cli.commands.feedback import serve_feedback
from art_patch.cli.commands.feedback_import import import_feedback
from art_patch.cli.commands.feedback_pull import app as pull
from art_patch.cli.commands.feedback_pull import pull_langfuse, pull_langsmith
from art_patch.cli.commands.groups import groups
from art_patch.cli.commands.history import diff, history
from art_patch.cli.commands.imports import import_file
from art_patch.cli.commands.init import app as init
from art_patch.cli.commands.init import vllm
from art_patch.cli.commands.judge import app as judge
from art_patch.cli.commands.judge import test_judge
from art_patch.cli.commands.policies import app as policies
from art_patch.cli.commands.policies import policies as list_policies
from art_patch.cli.commands.policies import promote, reject, rollback
from art_patch.cli.commands.policy_copies import export_policy, push
from art_patch.cli.commands.proxy import proxy
from art_patch.cli.commands.report import report
from art_patch.cli.commands.retrain import retrain
from art_patch.cli.commands.run import run as run_program
from art_patch.cli.commands.score import score
from art_patch.cli.commands.send import app as send
from art_patch.cli.commands.send import langfuse, mlflow, otlp, tensorboard, wandb
from art_patch.cli.commands.serve import serve
from art_patch.cli.commands.status import mode, status
from art_patch.cli.commands.store import backup, prune, stats, vacuum, verify
from art_patch.cli.commands.trajectories import app as trajectories
from art_patch.cli.commands.trajectories import list_trajectories, show
from art_patch.cli.commands.watch import watch
from art_patch.cli.interruption import interrupted
from art_patch.errors import ArtPatchError, ConfigError
from art_patch.settings import PREFIX


class _Commands(TyperGroup):
    """`import scores ...` is the other name of `feedback import FILE` and of `feedback pull TRACKER`."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command that the arguments name."""
        if args[:2] == ["import", "scores"]:
            rest = args[2:]
            args = ["feedback", "pull" if rest[:1] in (["langfuse"], ["langsmith"]) else "import", *rest]
        return super().resolve_command(ctx, args)


app = typer.Typer(
    name="art-patch",
    cls=_Commands,
    help="Agents that learn from their own traffic.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def interruptible(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command such that Ctrl-C ends it with our words; Typer would end it without any."""

    @wraps(command)
    def run_command(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except KeyboardInterrupt:
            raise typer.Exit(interrupted()) from None

    return run_command


app.command(context_settings={"allow_interspersed_args": False})(interruptible(run_program))
for each in (
    proxy, serve, score, retrain, status, groups, doctor, mode, promote, rollback, reject, watch, history,
    diff, report, analytics, export, erase, demo, evaluate,
):  # fmt: skip
    app.command()(interruptible(each))

store = typer.Typer(help="Look after the database: verify, stats, vacuum, backup, prune.", no_args_is_help=True)
for each in (verify, stats, vacuum, backup, prune):
    store.command()(interruptible(each))
app.add_typer(store, name="store")
app.add_typer(cron)
init.command()(interruptible(vllm))
app.add_typer(init)
app.command("import")(interruptible(import_file))
feedback.command("serve")(interruptible(serve_feedback))
feedback.command("import")(interruptible(import_feedback))
pull.command("langfuse")(interruptible(pull_langfuse))
pull.command("langsmith")(interruptible(pull_langsmith))
feedback.add_typer(pull)
app.add_typer(feedback)
judge.command("test")(interruptible(test_judge))
app.add_typer(judge)
for each in (otlp, langfuse, tensorboard, mlflow, wandb):
    send.command()(interruptible(each))
app.add_typer(send)
policies.callback(invoke_without_command=True)(interruptible(list_policies))
policies.command("export")(interruptible(export_policy))
policies.command()(interruptible(push))
app.add_typer(policies)
trajectories.command("list")(interruptible(list_trajectories))
trajectories.command()(interruptible(show))
app.add_typer(trajectories)


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version.", is_eager=True)] = False,
    env_file: Annotated[
        Path | None,
        typer.Option("--env-file", help="Read variables from this file, such as .env. Variables already set win."),
    ] = None,
) -> None:
    """Agents that learn from their own traffic."""
    if version:
        from art_patch._lib.version import __version__

        typer.echo(__version__)
        raise typer.Exit
    if env_file is not None:
        read_env_file(env_file)


def read_env_file(path: Path) -> None:
    """Set the variables that a file of `NAME=VALUE` lines gives, unless they are set already.

    Raises:
        ConfigError: the file cannot be read, or a line is wrong. The message shows no text of the file: it may hold
        keys.
    """
    from dotenv import dotenv_values
    from dotenv.parser import parse_stream

    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise ConfigError(f"--env-file {path} cannot be read: {reason}; name a file of NAME=VALUE lines") from None
    # python-dotenv only logs a line that it cannot read, and takes a bare word as a name without a value.
    for binding in parse_stream(StringIO(text)):
        words = binding.original.string
        if words.strip() and (binding.error or (binding.key is not None and not _is_assignment(binding))):
            line = binding.original.line + words[: len(words) - len(words.lstrip())].count("\n")
            raise ConfigError(f"--env-file {path}, line {line} is not NAME=VALUE; mend it or begin it with #")
    for name, value in dotenv_values(stream=StringIO(text)).items():
        # As everywhere, an empty variable of ours counts as unset, so that the next source of the value is asked.
        if name not in os.environ and value is not None and (value.strip() or not name.startswith(PREFIX)):
            os.environ[name] = value


def _is_assignment(binding: Any) -> bool:
    return binding.value is not None and re.fullmatch(r"[A-Za-z_]\w*", binding.key, re.ASCII) is not None


def run() -> None:
    """Run the command line and exit with its code."""
    from art_patch.cli.views.output import fail

    def on_terminate(_signal: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt  # so that SIGTERM unwinds like Ctrl-C: locks freed, children stopped, exit code 130

    signal.signal(signal.SIGTERM, on_terminate)
    for name in [name for name, value in os.environ.items() if name.startswith(PREFIX) and not value.strip()]:
        del os.environ[name]  # an empty variable is unset: for options, too, and for what is started from here
    try:
        app(standalone_mode=True)
    except ArtPatchError as error:
        ours = sys.argv[: sys.argv.index("--")] if "--" in sys.argv else sys.argv  # the rest is a program's own
        sys.exit(fail(error, as_json="--json" in ours))
