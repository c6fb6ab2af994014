"""The Typer application and the one place where errors become exit codes."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from functools import wraps
from types import FrameType
from typing import Annotated, Any

import typer

from art_patch.cli import interrupted
from art_patch.cli.demo import demo
from art_patch.cli.doctor import doctor
from art_patch.cli.erase import erase
from art_patch.cli.export import export
from art_patch.cli.feedback import app as feedback
from art_patch.cli.feedback import serve_feedback
from art_patch.cli.groups import groups
from art_patch.cli.imports import import_file
from art_patch.cli.init import app as init
from art_patch.cli.init import vllm
from art_patch.cli.judge import app as judge
from art_patch.cli.judge import test_judge
from art_patch.cli.policies import promote, rollback
from art_patch.cli.proxy import proxy
from art_patch.cli.retrain import retrain
from art_patch.cli.run import run as run_program
from art_patch.cli.score import score
from art_patch.cli.serve import serve
from art_patch.cli.status import mode, status
from art_patch.cli.store import backup, prune, stats, vacuum, verify
from art_patch.cli.trajectories import app as trajectories
from art_patch.cli.trajectories import list_trajectories, show
from art_patch.errors import ArtPatchError

app = typer.Typer(
    name="art-patch",
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
for each in (proxy, serve, score, retrain, status, groups, doctor, mode, promote, rollback, export, erase, demo):
    app.command()(interruptible(each))

store = typer.Typer(help="Look after the database: verify, stats, vacuum, backup, prune.", no_args_is_help=True)
for each in (verify, stats, vacuum, backup, prune):
    store.command()(interruptible(each))
app.add_typer(store, name="store")
init.command()(interruptible(vllm))
app.add_typer(init)
app.command("import")(interruptible(import_file))
feedback.command("serve")(interruptible(serve_feedback))
app.add_typer(feedback)
judge.command("test")(interruptible(test_judge))
app.add_typer(judge)
trajectories.command("list")(interruptible(list_trajectories))
trajectories.command()(interruptible(show))
app.add_typer(trajectories)


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version.", is_eager=True)] = False) -> None:
    """Agents that learn from their own traffic."""
    if version:
        from art_patch import __version__

        typer.echo(__version__)
        raise typer.Exit


def run() -> None:
    """Run the command line and exit with its code."""
    from art_patch.cli.output import fail

    def on_terminate(_signal: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt  # so that SIGTERM unwinds like Ctrl-C: locks freed, children stopped, exit code 130

    signal.signal(signal.SIGTERM, on_terminate)
    try:
        app(standalone_mode=True)
    except ArtPatchError as error:
        ours = sys.argv[: sys.argv.index("--")] if "--" in sys.argv else sys.argv  # the rest is a program's own
        sys.exit(fail(error, as_json="--json" in ours))
