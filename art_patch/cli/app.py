"""The Typer application: adds all commands in the groups that `--help` shows, and turns errors into exit codes."""

import errno
import logging
import os
import re
import signal
import sys
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from traceback import format_exc
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from art_patch._lib.version import __version__
from art_patch._lib.words import visible
from art_patch.cli import output
from art_patch.cli.commands import (
    consent,
    cron,
    cycles,
    files,
    init,
    measure,
    policies,
    policy_copies,
    report,
    retrain,
    run,
    serve,
    status,
    store,
    trackers,
    train,
    trajectories,
    web,
)
from art_patch.cli.logs import in_log
from art_patch.cli.options import FROM_ENV_FILE
from art_patch.errors import ArtPatchError, ConfigError
from art_patch.settings import PREFIX

RUN, LOOK, LEARN = "Run an agent", "Look at its runs", "Learn from them"
DECIDE, DATA, OPERATE = "Decide who serves", "Move and erase data", "Operate"
PANELS = (RUN, LOOK, LEARN, DECIDE, DATA, OPERATE)
"""The groups of commands in `--help` and in the reference documentation, in their order."""


class PlainCommand(TyperCommand):
    """A command whose help is plain text, with its options below each other in the sections that they name.

    Rich's table, which Typer draws, cuts long names of options at 80 columns, so that nobody can copy them, and breaks
    the lines of a docstring once more.
    """

    def __init__(self, *args: Any, **given: Any) -> None:
        """Make the command as Typer does, without Rich's help."""
        super().__init__(*args, **given | {"rich_markup_mode": None})

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments, then each section of options."""
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for parameter in self.get_params(ctx):
            if (record := parameter.get_help_record(ctx)) is not None:
                usual = "Arguments" if parameter.param_type_name == "argument" else "Options"
                sections.setdefault(getattr(parameter, "rich_help_panel", None) or usual, []).append(record)
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


class _Commands(TyperGroup):
    """`import scores ...` is another name of `feedback import FILE` and of `feedback pull TRACKER`."""

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


Command = Callable[..., None]


def _add(panel: str | None, *functions: Command, to: typer.Typer = app, **named: Command) -> None:
    """Add commands: `functions` under their own names, `named` under the names given."""
    for name, function in ({one.__name__: one for one in functions} | named).items():
        # The options of the program that `run` starts are not ours, even without `--` before them.
        context = {"allow_interspersed_args": False} if function is run.run else None
        to.command(name, cls=PlainCommand, rich_help_panel=panel, context_settings=context)(function)


def _add_group(
    panel: str | None, name: str, help: str, *functions: Command, above: typer.Typer = app, **named: Command
) -> typer.Typer:
    """Add a group of commands, which are given as to `_add`."""
    group = typer.Typer(name=name, help=help, no_args_is_help=True, rich_markup_mode="rich")
    # Without a callback Typer would make a group of one command that command: `init` in place of `init vllm`.
    group.callback()(lambda: None)
    _add(None, *functions, to=group, **named)
    above.add_typer(group, rich_help_panel=panel)
    return group


def _add_both(panel: str, name: str, own: Command, **below: Command) -> None:
    """Add a command, such as one that lists, which is a group as well: `below` are the commands of the group."""
    group = typer.Typer(name=name)
    group.callback(invoke_without_command=True)(own)
    _add(None, to=group, **below)
    app.add_typer(group, rich_help_panel=panel)


_add(RUN, run.run, run.proxy, serve.serve, run.demo)
_add_group(RUN, "init", "Prepare this machine: vllm, unsloth.", vllm=init.init_vllm, unsloth=init.init_unsloth)

_add(LOOK, web.web, status.status, store.projects, report.report, measure.analytics, report.days, report.scenarios)
_add(LOOK, trajectories.history, trajectories.diff)
_add_both(LOOK, "groups", measure.groups, show=measure.show_group)
_add_group(
    LOOK, "trajectories", "Look at recorded runs: list, show.", list=trajectories.list_trajectories,
    show=trajectories.show,
)  # fmt: skip

_add(LEARN, retrain.retrain, train.train, retrain.score)
_add_both(LEARN, "cycles", cycles.cycles, show=cycles.show_cycle)
_add_group(LEARN, "judge", "Measure the judge: test.", test=measure.judge_test)
_feedback = _add_group(LEARN, "feedback", "Let people score runs: serve, import, pull.", serve=run.serve_feedback)
_add(None, to=_feedback, **{"import": trackers.import_feedback})  # a word of Python's, no keyword for above
_add_group(
    None, "pull", "Read scores that people gave in other tools: langfuse, langsmith.", above=_feedback,
    langfuse=trackers.pull_langfuse, langsmith=trackers.pull_langsmith,
)  # fmt: skip
_add_group(
    LEARN, "cron", "Retrain every night: print, install, remove.", cron.install, cron.remove, print=cron.print_recipe
)

_add_both(
    DECIDE, "policies", policies.policies, show=policies.show_policy, export=policy_copies.export_policy,
    fork=policy_copies.fork_policy, **{"import": policy_copies.import_policy}, push=policy_copies.push,
)  # fmt: skip
_add(DECIDE, measure.evaluate, measure.reproduce, policies.promote, policies.watch, policies.rollback, policies.reject)

_add(DATA, files.export, store.erase, consent.consent)
_add(DATA, to=app, **{"import": files.import_file})
_add_group(
    DATA, "send", "Send runs and policies to a tracker. Items that it has already are not sent again.",
    trackers.otlp, trackers.langfuse, trackers.tensorboard, trackers.mlflow, trackers.wandb,
)  # fmt: skip

_add(OPERATE, status.doctor, status.config, status.mode, cycles.notify)
_add_group(
    OPERATE, "store", "Look after the database: verify, stats, vacuum, backup, prune, grant.",
    store.verify, store.stats, store.vacuum, store.backup, store.prune, store.grant,
)  # fmt: skip


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version.", is_eager=True)] = False,
    env_file: Annotated[
        Path | None,
        typer.Option(
            "--env-file", help="Read variables from this file, such as .env. Variables that are set already stay."
        ),
    ] = None,
) -> None:
    """Agents that learn from their own traffic."""
    if version:
        typer.echo(__version__)
        raise typer.Exit
    if env_file is not None:
        try:
            read_env_file(env_file)
        except KeyboardInterrupt:  # it may be a pipe
            raise typer.Exit(output.interrupted()) from None


def read_env_file(path: Path) -> None:
    """Set variables that are unset. What cannot be read raises a `ConfigError` without its text: it may be a key."""
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
            FROM_ENV_FILE.add(name)


def _is_assignment(binding: Any) -> bool:
    return binding.value is not None and re.fullmatch(r"[A-Za-z_]\w*", binding.key, re.ASCII) is not None


class _Visible(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))


def run_app() -> None:
    """Run the command in `sys.argv` and end the process with its exit code."""

    def on_terminate(*_: object) -> None:
        raise KeyboardInterrupt  # so that SIGTERM unwinds like Ctrl-C: locks freed, children stopped, exit code 130

    signal.signal(signal.SIGTERM, on_terminate)
    # Log lines may quote a server, as a traceback may.
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(_Visible())
    # An empty variable is unset: for options, too, and for the programs that are started from here.
    for name in [name for name, value in os.environ.items() if name.startswith(PREFIX) and not value.strip()]:
        del os.environ[name]
    # Behind `--` stand the options of another program, which may have a `--json` of its own.
    as_json = "--json" in (sys.argv[: sys.argv.index("--")] if "--" in sys.argv else sys.argv)
    try:
        # Typer draws a frame around errors of usage, on stderr; a script that asked for JSON wants them as all others.
        sys.exit(app(standalone_mode=not as_json))
    except ArtPatchError as error:
        sys.exit(error.exit_code if in_log(error) and not as_json else output.fail(error, as_json=as_json))
    except typer.Abort:  # Ctrl-C while Typer reads the arguments; without `--json` Typer says so itself
        sys.exit(output.interrupted())
    except Exception as error:
        if (usage := _usage_error(error)) is not None:
            sys.exit(output.fail(usage, as_json=as_json))
        sys.stderr.write(visible(format_exc()))  # a mistake of ours
        sys.exit(1)


def _usage_error(error: Exception) -> ConfigError | None:
    """Return an error about an argument or option as one of ours; `None` for other errors."""
    # Python keeps bytes of arguments that are no text as halves of surrogate pairs, which no database takes.
    odd = next((each for each in sys.argv[1:] if each.encode(errors="replace").decode() != each), None)
    if odd is not None and isinstance(error, UnicodeEncodeError):
        return ConfigError(f"the argument {odd!r:.70} is not text in UTF-8; type it again")
    # Wherever a path is looked at: of these, unlike of one that is not there, `Path.exists` raises.
    if isinstance(error, OSError) and error.errno in (errno.ENAMETOOLONG, errno.EACCES) and error.filename is not None:
        return ConfigError(f"{str(error.filename)!r:.200} cannot be read: {error.strerror}")
    # Typer's errors are those of its own copy of click, whose module is private, or of click, in older versions.
    context, message = getattr(error, "ctx", None), getattr(error, "format_message", None)
    if message is None:
        return None
    command = "art-patch" if context is None else context.command_path
    return ConfigError(f"{message()} (see `{command} --help`)")
