"""`art-patch cron`: `retrain` every night, by cron, systemd or Kubernetes.

Everything is checked before anything is written: the schedule, and the options, by the parser of `retrain` itself.
Settings and keys never stand in a crontab, a unit or a manifest; `install` begins a file for them with the
`ART_PATCH_*` variables that are set now, and leaves one that is there as it is.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from art_patch.cli.options.opening import refuse_foreign
from art_patch.cli.options.shared import HomeOption, JsonOption, ProjectOption, StoreOption

if TYPE_CHECKING:
    from art_patch.schedule import Job
    from art_patch.settings import Settings

app = typer.Typer(name="cron", help="Retrain every night: print, install, remove.", no_args_is_help=True)

_HANGS_S = 12 * 3_600
"""When a cycle without `--max-minutes` is ended from outside."""
_LATE_S = 15 * 60
"""How long a cycle may take beyond `--max-minutes`, which ends it between two steps."""

ScheduleOption = Annotated[
    str, typer.Option("--schedule", help="Minute, hour, day, month, weekday, as in a crontab; local time.")
]
OptionsArgument = Annotated[
    list[str] | None, typer.Argument(metavar="[-- RETRAIN OPTIONS]", help="Options of `art-patch retrain`.")
]
CronOption = Annotated[bool, typer.Option("--cron", help="A line of your crontab; the default.")]
SystemdOption = Annotated[bool, typer.Option("--systemd", help="A service and a timer of your own systemd.")]


@app.command("print")
def print_recipe(
    options: OptionsArgument = None,
    cron: CronOption = False,
    systemd: SystemdOption = False,
    kubernetes: Annotated[bool, typer.Option("--kubernetes", help="A CronJob.")] = False,
    image: Annotated[
        str | None, typer.Option(help="With --kubernetes: made from examples/deploy/Containerfile.", show_default=False)
    ] = None,
    schedule: ScheduleOption = "17 3 * * *",
    project: ProjectOption = None,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print what makes `art-patch retrain` run by itself; nothing is written.

    Exit codes: 0 printed; 2 the schedule or an option says something impossible.
    """
    from art_patch.cli.views.output import answer
    from art_patch.errors import ConfigError
    from art_patch.schedule import cron_job, cron_line, systemd_units

    if cron + systemd + kubernetes > 1:
        raise ConfigError("--cron, --systemd and --kubernetes are three ways; choose one")
    if image is not None and not kubernetes:
        raise ConfigError("--image goes with --kubernetes")
    if kubernetes and home is not None and not home.is_absolute():
        raise ConfigError(f"the volume cannot be mounted at {str(home)!r}; give --home as an absolute path")
    job, _, _ = _job(schedule, options, project, home, with_home=not kubernetes)
    if kubernetes:
        files = cron_job(job, image=image or "art-patch:local", home=str(home or "/data"))
    elif systemd:
        files = systemd_units(job)
    else:
        files = {"crontab": f"# Settings and keys: {job.variables}\n{cron_line(job)}"}
    if as_json:
        answer({"project": job.project, "schedule": job.schedule.as_cron(), "files": files})
        return
    for name, text in files.items():
        typer.echo((f"# {name}\n" if len(files) > 1 else "") + text, nl=len(files) > 1)


@app.command()
def install(
    options: OptionsArgument = None,
    cron: CronOption = False,
    systemd: SystemdOption = False,
    schedule: ScheduleOption = "17 3 * * *",
    project: ProjectOption = None,
    home: HomeOption = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Retrain every night. Run it in the app's directory; run it again to change something.

    The crontab line, or the units of a project's name, replace those that were installed before. Kubernetes takes what
    `cron print --kubernetes` prints.
    Exit codes: 0 installed; 2 the schedule, an option, or the crontab says something impossible, and nothing changed.
    """
    from art_patch.cli.options.installing import read_crontab, unit_directory, write_crontab, write_new, write_units
    from art_patch.cli.views.output import answer
    from art_patch.errors import ConfigError
    from art_patch.schedule import cron_line, systemd_units, variables_file, with_entry

    if cron and systemd:
        raise ConfigError("--cron and --systemd are two ways; choose one")
    job, settings, variables = _job(schedule, options, project, home, store)
    text = variables_file(variables)
    if systemd:
        units = systemd_units(job)
        begun = write_new(job.variables, text)
        where = write_units(unit_directory(), units)
        then = [
            "systemctl --user daemon-reload",
            f"systemctl --user enable --now {job.unit}.timer",
            "loginctl enable-linger  # it runs while you are logged out, too",
        ]
    else:
        crontab = with_entry(read_crontab(), str(settings.directory), cron_line(job))
        begun = write_new(job.variables, text)
        write_crontab(crontab)
        where, then = ["crontab"], []
    facts = {"installed": where, "variables": str(job.variables), "begun": begun, "then": then}
    if as_json:
        answer({"project": job.project, "schedule": job.schedule.as_cron(), **facts})
        return
    _say_installed(job, facts, sorted(variables))


@app.command()
def remove(project: ProjectOption = None, home: HomeOption = None, as_json: JsonOption = False) -> None:
    """Take out what `install` put in for the project: the crontab line, and the units. The settings stay.

    Exit codes: 0 nothing of it is left; 2 the crontab cannot be read or is damaged, and nothing changed.
    """
    from art_patch.cli.options.installing import has_crontab, read_crontab, unit_directory, write_crontab
    from art_patch.cli.views.output import answer
    from art_patch.schedule import has_entry, without_entry
    from art_patch.settings import load_settings

    settings = load_settings(project=project, home=home)
    removed: list[str] = []
    if has_crontab() and has_entry(crontab := read_crontab(), directory := str(settings.directory)):
        write_crontab(without_entry(crontab, directory))
        removed.append("crontab")
    timer = f"art-patch-retrain-{settings.project}.timer"
    for name in (timer, f"art-patch-retrain-{settings.project}.service"):
        path = unit_directory() / name
        if path.exists():
            path.unlink()
            removed.append(str(path))
    then = [f"systemctl --user stop {timer}", "systemctl --user daemon-reload"] if len(removed) > 1 else []
    if as_json:
        answer({"project": settings.project, "removed": removed, "then": then})
        return
    typer.echo(f"removed: {', '.join(removed)}" if removed else f"nothing was installed for {settings.project}")
    for line in then:
        typer.echo(f"  {line}")


def _job(
    schedule: str,
    options: list[str] | None,
    project: str | None,
    home: Path | None,
    store: str | None = None,
    *,
    with_home: bool = True,
) -> tuple[Job, Settings, dict[str, str]]:
    """Return the job, the settings, and the variables that its file begins with."""
    import sys

    from art_patch.cli.interruption import INTERRUPTED
    from art_patch.errors import Busy, GateRejected
    from art_patch.schedule import Job, parse_schedule
    from art_patch.settings import load_settings
    from art_patch.store import absolute_url, waits_for_network

    when = parse_schedule(schedule)
    settings = load_settings(project=project, home=home, store=store)
    if not waits_for_network(settings.store):
        refuse_foreign(settings)
    given, known = _checked(options or [])
    variables = {name: os.environ[name] for name in sorted(known) if name in os.environ}
    variables = {
        name: value for name, value in variables.items() if name not in ("ART_PATCH_PROJECT", "ART_PATCH_HOME")
    }
    if settings.store is not None:
        variables["ART_PATCH_STORE"] = absolute_url(settings.store)
    minutes = given.get("max_minutes")
    where = ["--home", str(settings.directory.parent)] if with_home else []
    job = Job(
        project=settings.project,
        schedule=when,
        options=("--project", settings.project, *where, *(options or [])),
        python=Path(sys.executable),
        directory=Path.cwd(),
        variables=settings.directory / "retrain.env",
        log=settings.directory / "retrain.log",
        limit_s=_HANGS_S if minutes is None else int(minutes * 60) + _LATE_S,
        quiet=(GateRejected.exit_code, Busy.exit_code, INTERRUPTED),
    )
    return job, settings, variables


def _checked(options: list[str]) -> tuple[dict[str, Any], set[str]]:
    """Return what `retrain` reads from these options alone, and the variables that it and the settings know.

    A mistake ends as it does in `retrain` itself: exit code 2.

    Raises:
        ConfigError: they name what stands before `--`.
    """
    from art_patch.cli.commands.retrain import retrain
    from art_patch.errors import ConfigError
    from art_patch.settings import PREFIX, Settings

    parser = typer.Typer(add_completion=False)
    parser.command()(retrain)
    command = typer.main.get_command(parser)
    with command.make_context("art-patch retrain", list(options)) as context:
        given = dict(context.params)
        sources = {name: context.get_parameter_source(name) for name in given}
    given = {
        name: given[name] for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"
    }
    if twice := [name for name in ("project", "home", "store") if name in given]:
        raise ConfigError(f"--{twice[0]} goes before the `--`: art-patch cron ... --{twice[0]} VALUE -- ...")
    known = {f"{PREFIX}{name.upper()}" for name in Settings.model_fields}
    for parameter in command.params:
        variable = parameter.envvar
        known |= {variable} if isinstance(variable, str) else set(variable or ())
    return given, known


def _say_installed(job: Job, facts: dict[str, Any], variables: list[str]) -> None:
    typer.echo(
        f"retrains {job.project} at {job.schedule.as_cron()} in {job.directory}: {', '.join(facts['installed'])}"
    )
    if facts["begun"]:
        held = ", ".join(variables) or "nothing yet"
        typer.echo(f"settings and keys: {job.variables} ({held}); add the key of the judge's provider")
    else:
        typer.echo(f"settings and keys: {job.variables}, left as it was")
    typer.echo("output: " + (f"journalctl --user -u {job.unit}" if facts["then"] else str(job.log)))
    if facts["then"]:
        typer.echo("now run:")
    for line in facts["then"]:
        typer.echo(f"  {line}")
