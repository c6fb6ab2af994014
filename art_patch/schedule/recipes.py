"""Writes the crontab line, systemd units or Kubernetes CronJob that run `art-patch retrain` on a schedule. Pure.

Each text is made from a file in `templates/`, in which `@NAME@` stands for a value. The texts contain no secrets: they
name a file or a Kubernetes Secret with the settings and keys. Exit codes that are no fault, such as that of a rejected
candidate, cause no mail and no failed unit. The texts use no lock, because `retrain` takes the cycle's lock itself.
"""

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from art_patch.errors import ConfigError
from art_patch.schedule.times import Schedule

_TEMPLATES = Path(__file__).with_name("templates")
_LONGEST_LINE = 990  # Debian's cron cuts a command off after 1,000 characters, without a message
_DELAY = "5min"
_HEAD = """\
# Settings and keys of `art-patch retrain` when cron or systemd starts it. Readable by you alone; lines of NAME="value".
# The key of the judge's provider belongs here, too, for instance: OPENAI_API_KEY="..."
"""


@dataclass(frozen=True, slots=True)
class Job:
    """The data about a scheduled `art-patch retrain` that the texts need."""

    project: str
    schedule: Schedule
    options: Sequence[str]  # of the command line, after `art-patch retrain`
    python: Path  # absolute path of the interpreter that has art_patch
    directory: Path  # the working directory; checks and replayable functions are imported from there
    variables: Path  # file with settings and keys, lines of `NAME="value"`
    log: Path  # file to which the crontab line appends the output
    # After this time systemd or Kubernetes ends the process, because the cycle must be hung. cron has no such limit.
    limit_s: int
    quiet: Sequence[int]  # exit codes other than 0 that are no fault

    @property
    def command(self) -> tuple[str, ...]:
        """The command that runs the job, as a list of arguments."""
        # -P: the working directory is the app's, and a file of the app must not be imported in place of our modules.
        return (str(self.python), "-P", "-m", "art_patch", "retrain", *self.options)

    @property
    def unit(self) -> str:
        """Name of the systemd service and timer, without `.service` and `.timer`."""
        return f"art-patch-retrain-{self.project}"


def cron_line(job: Job) -> str:
    """Return the crontab line. The job's output goes to its log file; after a failure, cron mails one line about it."""
    directory, variables, log = (shlex.quote(str(path)) for path in (job.directory, job.variables, job.log))
    line = _filled(
        "crontab",
        SCHEDULE=job.schedule.as_cron(),
        DIRECTORY=directory,
        VARIABLES=variables,
        COMMAND=shlex.join(job.command),
        LOG=log,
        QUIET="|".join(map(str, job.quiet)),
    ).removesuffix("\n")
    # To cron, a bare % is a line break.
    line = line.replace("%", r"\%")
    if "\n" in line or len(line) > _LONGEST_LINE:
        raise ConfigError("the crontab line is too long for cron, or broken in two; use shorter paths, or --systemd")
    return f"{line}\n"


def systemd_units(job: Job) -> dict[str, str]:
    """Return the texts of a service and a timer by file name, for the systemd instance of one user (`--user`).

    For units of the whole system, which run as a dedicated user, see `examples/deploy`.
    """
    # In a unit % and $ are special characters: the functions below escape them in every value that a user chose.
    service = _filled(
        "retrain.service",
        PROJECT=job.project,
        DIRECTORY=_unit_path(job.directory),
        VARIABLES=_unit_path(job.variables),
        COMMAND=" ".join(map(_unit_word, job.command)),
        QUIET=" ".join(map(str, job.quiet)),
        LIMIT=f"{job.limit_s}s",
    )
    timer = _filled("retrain.timer", PROJECT=job.project, CALENDAR=job.schedule.as_calendar(), DELAY=_DELAY)
    return {f"{job.unit}.service": service, f"{job.unit}.timer": timer}


def cron_job(job: Job, *, image: str, home: str) -> dict[str, str]:
    """Return the manifest of a Kubernetes CronJob by file name. The paths in `job` are not used in it.

    `image` is made from `examples/deploy/Containerfile`; at `home` the volume with store and policies is mounted.
    """
    name = _dns_name(f"art-patch-retrain-{job.project}")
    # JSON text is also YAML, so `json.dumps` quotes any value correctly.
    manifest = _filled(
        "cronjob.yaml",
        NAME=name,
        SECRET=_dns_name(f"art-patch-{job.project}"),
        SCHEDULE=json.dumps(job.schedule.as_cron()),
        LIMIT=str(job.limit_s),
        IMAGE=json.dumps(image),
        HOME=json.dumps(home),
        OPTIONS=json.dumps(["retrain", *job.options]),
        QUIET="|".join(map(str, job.quiet)),
    )
    return {f"{name}.yaml": manifest}


def _filled(template: str, **values: str) -> str:
    # One pass over the template: a value that happens to hold `@NAME@` stays as it is.
    return re.sub(r"@([A-Z]+)@", lambda found: values[found[1]], (_TEMPLATES / template).read_text("utf-8"))


def _unit_path(path: Path) -> str:
    """Return a path for a systemd setting that takes the rest of its line, so it needs no quotes."""
    if "\n" in str(path):
        raise ConfigError(f"{str(path)!r} holds a line break, and a unit cannot say that; move it")
    return str(path).replace("%", "%%")


def _unit_word(word: str) -> str:
    if "\n" in word:
        raise ConfigError(f"{word!r} holds a line break, and a unit cannot say that; put it into a file")
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return escaped if re.fullmatch(r"[\w@%+=:,./-]+", escaped, re.ASCII) else f'"{escaped}"'


def _dns_name(name: str) -> str:
    # Kubernetes appends 11 characters to a CronJob's name and allows 63, so 52 remain.
    return re.sub(r"[^a-z0-9]+", "-", name.lower())[:52].strip("-")


def variables_file(variables: Mapping[str, str]) -> str:
    """Return the text of the file with settings and keys, quoted so that `/bin/sh` and systemd read the same values."""
    # Double quotes with these four escapes are the one way to write any value that both read back as it was.
    quoted = {name: re.sub(r'(["\\$`])', r"\\\1", value) for name, value in sorted(variables.items())}
    return _HEAD + "".join(f'{name}="{value}"\n' for name, value in quoted.items())


def with_entry(crontab: str, directory: str, lines: str) -> str:
    """Return the text `crontab` with a project's lines replaced by `lines`, or with `lines` appended if it has none.

    A comment before and a comment after the lines mark them with the project's directory. All other text stays the
    same, byte for byte. The last of `lines` ends with a line break. Raises a `ConfigError` if one of the two comments
    is missing or there twice.
    """
    begin, end = _marks(directory)
    before, after = _parted(crontab, directory)
    if before and not before.endswith("\n"):
        before += "\n"
    return f"{before}{begin}\n{lines}{end}\n{after}"


def without_entry(crontab: str, directory: str) -> str:
    """Return the text `crontab` without a project's lines and the comments around them; raises as `with_entry` does."""
    return "".join(_parted(crontab, directory))


def _marks(directory: str) -> list[str]:
    return [f"# {arrows} art-patch retrain {directory}" for arrows in (">>>", "<<<")]


def _parted(crontab: str, directory: str) -> tuple[str, str]:
    """Return the text before the project's lines and the text after them; without such lines, all text is before."""
    lines = crontab.splitlines(keepends=True)
    begin, end = ([i for i, line in enumerate(lines) if line.rstrip("\r\n") == mark] for mark in _marks(directory))
    if not begin and not end:
        return crontab, ""
    # With one comment missing, nothing tells which lines are ours and which are the user's.
    if len(begin) != 1 or len(end) != 1 or begin[0] > end[0]:
        raise ConfigError(
            f"the comments around our line for {directory} in the crontab are damaged; "
            "take the line and both comments out with `crontab -e`, then try again"
        )
    return "".join(lines[: begin[0]]), "".join(lines[end[0] + 1 :])
