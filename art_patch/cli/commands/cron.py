"""`art-patch cron`: run `retrain` every night, by cron, systemd or Kubernetes.

The schedule and the options of `retrain` are checked before anything is written; `retrain`'s own parser checks its
options, and a limit in USD needs a judge whose price is known. Settings and keys are never written to a crontab, a
systemd unit or a Kubernetes manifest, because other people may read those. `install` writes the variables that
`retrain` reads, as far as they are set now, to a file in the project's directory. If that file exists already, it is
not changed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from art_patch import insights, rewards, store
from art_patch import schedule as recipes
from art_patch._lib.atomic_files import write_whole
from art_patch.cli import output
from art_patch.cli.commands.retrain import retrain
from art_patch.cli.options import Judging, Project, ProjectPlace
from art_patch.cli.typed_options import Option, arguments_of, command, given_on_the_command_line, variables_of
from art_patch.errors import Busy, ConfigError, GateRejected, JudgeError
from art_patch.settings import Settings, variable_of

_HANGS_S = 12 * 3_600  # a cycle without `--max-minutes` is ended from outside after this time
_LATE_S = 15 * 60  # with `--max-minutes`, which ends a cycle between two steps, so much later

_OWN = ("imitate_models", "promotion", "canary_percent", "max_loss")  # settings that are options of `retrain` alone
_NO_CRONTAB = ("no crontab for", "no such file")  # what `crontab -l` says then: Debian's and cronie's; busybox's

CRON = Option("Write a line of your crontab. This is the default.")
SYSTEMD = Option("Write a service and a timer for your user's systemd.")


SCHEDULE = Option("Minute, hour, day, month, weekday, as in a crontab, in local time.")
NIGHTLY = "17 3 * * *"
OPTIONS = typer.Argument(metavar="[-- RETRAIN OPTIONS]", help="Options of `art-patch retrain`.")


@command
def print_recipe(
    context: typer.Context,
    *,
    schedule: Annotated[str, SCHEDULE] = NIGHTLY,
    project: ProjectPlace,
    options: Annotated[list[str] | None, OPTIONS] = None,
    cron: Annotated[bool, CRON] = False,
    systemd: Annotated[bool, SYSTEMD] = False,
    kubernetes: Annotated[bool, Option("Write a CronJob for Kubernetes.")] = False,
    image: Annotated[str | None, Option("With --kubernetes: image made from examples/deploy/Containerfile.")] = None,
) -> None:
    """Print a crontab line, systemd units or a CronJob that runs `art-patch retrain`. Nothing is installed.

    Exit codes: 0 printed; 2 the schedule or an option has an impossible value.
    """
    # In a pod the home is where the volume is mounted: a variable says where it is on this machine.
    home = project.home if given_on_the_command_line(context, "home") else None
    if cron + systemd + kubernetes > 1:
        raise ConfigError("--cron, --systemd and --kubernetes are three ways; choose one")
    if image is not None and not kubernetes:
        raise ConfigError("--image goes with --kubernetes")
    if kubernetes and home is not None and not home.is_absolute():
        raise ConfigError(f"the volume cannot be mounted at {str(home)!r}; give --home as an absolute path")
    # A pod has variables of its own, which nobody knows here.
    job, _, _ = _job(schedule, options or [], project, is_here=not kubernetes)
    if kubernetes:
        files = recipes.cron_job(job, image=image or "art-patch:local", home=str(home or "/data"))
    elif systemd:
        files = recipes.systemd_units(job)
    else:
        files = {"crontab": f"# Settings and keys: {job.variables}\n{recipes.cron_line(job)}"}
    if project.answered({"project": job.project, "schedule": job.schedule.as_cron(), "files": files}):
        return
    for name, text in files.items():
        typer.echo((f"# {name}\n" if len(files) > 1 else "") + text, nl=len(files) > 1)


@command
def install(
    *,
    schedule: Annotated[str, SCHEDULE] = NIGHTLY,
    project: Project,
    options: Annotated[list[str] | None, OPTIONS] = None,
    cron: Annotated[bool, CRON] = False,
    systemd: Annotated[bool, SYSTEMD] = False,
) -> None:
    """Run `art-patch retrain` every night. Run this in the app's directory; run it again to change something.

    The new crontab line, or the new systemd units, replace earlier ones of this project. For Kubernetes, apply the
    manifest that `cron print --kubernetes` prints.

    Exit codes: 0 installed; 2 the schedule, an option or the crontab is wrong, and nothing was changed.
    """
    if cron and systemd:
        raise ConfigError("--cron and --systemd are two ways; choose one")
    job, settings, variables = _job(schedule, options or [], project)
    text = recipes.variables_file(variables)
    then: list[str] = []
    if systemd:
        units = recipes.systemd_units(job)
        begun, where = write_new(job.variables, text), write_units(unit_directory(), units)
        then = [
            "systemctl --user daemon-reload",
            f"systemctl --user enable --now {job.unit}.timer",
            "loginctl enable-linger  # it runs while you are logged out, too",
        ]
    else:
        # Read before anything is written: a crontab that cannot be read leaves everything as it was.
        crontab = recipes.with_entry(read_crontab(), str(settings.directory), recipes.cron_line(job))
        begun = write_new(job.variables, text)
        write_crontab(crontab)
        where = ["crontab"]
    facts = {"installed": where, "variables": str(job.variables), "begun": begun, "then": then}
    if project.answered({"project": job.project, "schedule": job.schedule.as_cron(), **facts}):
        return
    typer.echo(f"retrains {job.project} at {job.schedule.as_cron()} in {job.directory}: {', '.join(where)}")
    # A file that was there may hold keys which are not set in this shell, so it was left as it is.
    if begun:
        held = output.listed(sorted(variables), "nothing yet")
        typer.echo(f"settings and keys: {job.variables} ({held}); add the key of the judge's provider")
    else:
        typer.echo(f"settings and keys: {job.variables}, left as it was")
    typer.echo("output: " + (f"journalctl --user -u {job.unit}" if then else str(job.log)))
    if then:
        typer.echo("now run:")
    for line in then:
        typer.echo(f"  {line}")


@command
def remove(project: ProjectPlace) -> None:
    """Remove the project's crontab line and systemd units, which `install` made. The file with the settings stays.

    Exit codes: 0 the line and the units are gone; 2 the crontab cannot be read or is damaged, and nothing was changed.
    """
    settings = project.settings()
    removed: list[str] = []
    # A machine with systemd alone has no `crontab` command.
    crontab = read_crontab() if shutil.which("crontab") else ""
    rest = recipes.without_entry(crontab, str(settings.directory))
    if rest != crontab:
        write_crontab(rest)
        removed.append("crontab")
    # Both kinds are looked for: an earlier `install` may have used the other one.
    timer, service = (f"art-patch-retrain-{settings.project}.{kind}" for kind in ("timer", "service"))
    for path in (unit_directory() / timer, unit_directory() / service):
        if path.exists():
            path.unlink()
            removed.append(str(path))
    then = [f"systemctl --user stop {timer}", "systemctl --user daemon-reload"] if len(removed) > 1 else []
    if project.answered({"project": settings.project, "removed": removed, "then": then}):
        return
    typer.echo(f"removed: {', '.join(removed)}" if removed else f"nothing was installed for {settings.project}")
    for line in then:
        typer.echo(f"  {line}")


def _job(
    schedule: str, options: list[str], project: ProjectPlace, *, is_here: bool = True
) -> tuple[recipes.Job, Settings, dict[str, str]]:
    """Return the job, the settings, and the variables that its file begins with."""
    when = recipes.parse_schedule(schedule)
    settings = project.settings()
    given, known = _checked(options)
    # The project and its home are options of the job itself.
    known -= {variable_of("project"), variable_of("home")}
    variables = {name: os.environ[name] for name in sorted(known) if name in os.environ}
    if settings.store is not None:
        variables[variable_of("store")] = store.absolute_url(settings.store)
    minutes = given.get("max_minutes")
    where = ["--home", str(settings.directory.parent)] if is_here else []
    job = recipes.Job(
        project=settings.project,
        schedule=when,
        options=("--project", settings.project, *where, *options),
        python=Path(sys.executable),
        directory=Path.cwd(),
        variables=settings.directory / "retrain.env",
        log=settings.directory / insights.JOB_LOG,
        limit_s=_HANGS_S if minutes is None else int(minutes * 60) + _LATE_S,
        # These exit codes are no failure of the job, so no mail and no failed unit comes of them.
        quiet=(GateRejected.exit_code, Busy.exit_code, output.INTERRUPTED),
    )
    _check_budget(given, (_variables_there(job.variables) or variables) if is_here else {}, project)
    return job, settings, variables


def _checked(options: list[str]) -> tuple[dict[str, Any], set[str]]:
    """Return what `retrain` reads from these options alone, and all variables that it and the settings know."""
    parser = typer.Typer(add_completion=False)
    parser.command()(retrain)
    command = typer.main.get_command(parser)
    with command.make_context("art-patch retrain", list(options)) as context:
        # Only what stands here: variables may have changed when the job runs.
        given = {name: value for name, value in context.params.items() if given_on_the_command_line(context, name)}
    if twice := [name for name in ("project", "home", "store") if name in given]:
        raise ConfigError(f"--{twice[0]} goes before the `--`: art-patch cron ... --{twice[0]} VALUE -- ...")
    known = {variable_of(name) for name in Settings.model_fields}
    return given, known | variables_of(command)


def _variables_there(path: Path) -> dict[str, str | None]:
    """Return the variables in the file that an earlier `install` began; empty if there is none that can be read."""
    from dotenv import dotenv_values

    try:
        return dotenv_values(path)
    except (OSError, UnicodeDecodeError):  # the job will say so
        return {}


def _check_budget(given: dict[str, Any], variables: Mapping[str, str | None], project: ProjectPlace) -> None:
    """Raise `ConfigError` for values that `retrain` refuses at night, such as USD of a judge without a known price."""
    limit = variables.get(variable_of("max_usd"))
    try:
        usd = {} if limit is None else {"max_usd": float(limit)}
    except ValueError:
        raise ConfigError(f"{variable_of('max_usd')} is {limit!r}, no amount of US dollars") from None
    arguments = arguments_of(retrain, usd | given)
    judging: Judging = arguments["judging"]
    own = {name: arguments[name] for name in _OWN if arguments[name] is not None}
    project.settings(**judging.as_settings(), **arguments["suite"].as_settings(), **own)
    rewards.Budget(judging.max_usd, judging.max_calls)
    named = (given.get(name) or variables.get(variable_of(name)) for name in ("judge", "gate_judge"))
    try:
        judging.require_prices(*filter(None, named))
    except JudgeError as error:
        raise ConfigError(str(error)) from None


# --- the crontab, the units and the file of settings ---


def read_crontab() -> str:
    """Return the text of the user's crontab; an empty text if the user has none.

    If the command `crontab` is missing or fails, `ConfigError` stops `install` and `remove`, so that they never
    overwrite a crontab that they could not read.
    """
    done = _crontab("-l")
    if done.returncode == 0:
        return done.stdout
    if any(words in done.stderr.lower() for words in _NO_CRONTAB):
        return ""
    raise ConfigError(f"`crontab -l` failed: {done.stderr.strip() or f'exit code {done.returncode}'}; nothing changed")


def write_crontab(text: str) -> None:
    """Replace the user's crontab with `text`. If the command `crontab` refuses the text, the old crontab stays."""
    done = _crontab("-", given=text)
    if done.returncode != 0:
        raise ConfigError(f"`crontab` refused the new table: {done.stderr.strip()}; the old one stays")


def _crontab(*words: str, given: str | None = None) -> subprocess.CompletedProcess[str]:
    program = shutil.which("crontab")
    if program is None:
        raise ConfigError("there is no `crontab` command on this machine; install cron, or use --systemd")
    # In English, because `read_crontab` looks for words of the message.
    environment = os.environ | {"LC_ALL": "C"}
    return subprocess.run([program, *words], input=given, capture_output=True, text=True, env=environment, check=False)


def unit_directory() -> Path:
    """Return the directory of the user's own systemd units."""
    configured = os.environ.get("XDG_CONFIG_HOME", "")
    return (Path(configured) if configured.startswith("/") else Path.home() / ".config") / "systemd/user"


def write_units(directory: Path, units: Mapping[str, str]) -> list[str]:
    """Write systemd units and return their paths. Files are replaced atomically, so systemd never reads half of one."""
    for name, text in units.items():
        write_whole(directory / name, text)
    return [str(directory / name) for name in units]


def write_new(path: Path, text: str) -> bool:
    """Write a new file that only its owner can read. If the file exists, return false and do not change it."""
    is_new = not path.exists()
    write_whole(path, text, replace=False)
    return is_new
