"""Writes the crontab line, systemd units or Kubernetes CronJob that run `art-patch retrain` on a schedule. Pure.

A schedule has the five fields of a crontab, `MINUTE HOUR DAY MONTH WEEKDAY`. A field is `*`, a number, a range `a-b`,
or a step `*/n` or `a-b/n`; commas separate several of them. Months and weekdays may be English names of three letters.
Sunday is 0 or 7. Times are in the time zone of the machine that starts the job; for Kubernetes this is the
controller's, usually UTC.

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

_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_MONTH_NUMBERS = {name: number for number, name in enumerate(_MONTHS, 1)}
_WEEKDAYS = ("Sun", "Mon", "Tue", "Wed", "Thu", "Fri", "Sat")
_DAY_NUMBERS = {name.lower(): number for number, name in enumerate(_WEEKDAYS)}
# February with 29: a schedule for leap days is rare, and not a mistake.
_LONGEST_MONTH = (31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
_EXAMPLE = 'write minute, hour, day, month and weekday, such as "17 3 * * *"'


@dataclass(frozen=True, slots=True)
class _Field:
    name: str
    low: int
    high: int
    names: dict[str, int]

    def values(self, text: str) -> tuple[int, ...]:
        """Return the numbers that a field's text means, in order."""
        found: set[int] = set()
        for part in text.lower().split(","):
            matched = re.fullmatch(r"(?:(\*)|(\w+)(?:-(\w+))?)(?:/([0-9]{1,4}))?", part, re.ASCII)
            if matched is None:
                raise self._wrong(part)
            star, first, last, step = matched.groups()
            # `5/2` is refused: Kubernetes reads it as `5-59/2`, and other crons do not know it.
            if step is not None and (int(step) < 1 or (star is None and last is None)):
                raise self._wrong(part)
            begin = self.low if star else self._number(first, part)
            end = self.high if star else self._number(last or first, part)
            if end < begin:
                raise self._wrong(part)
            found.update(range(begin, end + 1, int(step or 1)))
        return tuple(sorted(found))

    def _number(self, word: str, part: str) -> int:
        # `isdecimal` alone would accept digits of other scripts; the pattern in `values` allows ASCII only.
        number = self.names.get(word, int(word) if word.isdecimal() and len(word) <= 4 else -1)
        if not self.low <= number <= self.high:
            raise self._wrong(part)
        return number

    def _wrong(self, part: str) -> ConfigError:
        return ConfigError(f"{part!r} is no {self.name} of a schedule ({self.low}-{self.high}); {_EXAMPLE}")


_FIELDS = (
    _Field("minute", 0, 59, {}),
    _Field("hour", 0, 23, {}),
    _Field("day of the month", 1, 31, {}),
    _Field("month", 1, 12, _MONTH_NUMBERS),
    _Field("weekday", 0, 7, _DAY_NUMBERS),
)


@dataclass(frozen=True, slots=True)
class Schedule:
    """When a job runs: each field has all matching numbers in ascending order. Sunday is weekday 0."""

    minutes: tuple[int, ...]
    hours: tuple[int, ...]
    days: tuple[int, ...]
    months: tuple[int, ...]
    weekdays: tuple[int, ...]

    def as_cron(self) -> str:
        """Return the five fields of a crontab line as every cron reads them: without names and steps, Sunday as 0."""
        full = (60, 24, 31, 12, 7)
        fields = (self.minutes, self.hours, self.days, self.months, self.weekdays)
        return " ".join(_listed(values, size, "-", 1) for values, size in zip(fields, full, strict=True))

    def as_calendar(self) -> str:
        """Return the schedule in systemd's syntax, as the value of `OnCalendar=` in a timer."""
        names = ",".join(_WEEKDAYS[number] for number in self.weekdays)
        date = f"*-{_listed(self.months, 12, '..', 2)}-{_listed(self.days, 31, '..', 2)}"
        time = f"{_listed(self.hours, 24, '..', 2)}:{_listed(self.minutes, 60, '..', 2)}:00"
        return f"{date} {time}" if len(self.weekdays) == 7 else f"{names} {date} {time}"


def parse_schedule(text: str) -> Schedule:
    """Parse five fields of a crontab; `ConfigError` if they are wrong, never occur, or limit days and weekdays."""
    fields = text.split()
    if len(fields) != 5:
        raise ConfigError(f"{text!r} is no schedule; {_EXAMPLE}")
    minutes, hours, days, months, numbers = map(_Field.values, _FIELDS, fields)
    weekdays = tuple(sorted({number % 7 for number in numbers}))  # Sunday as 7 becomes 0
    # With both, cron runs on days that match either, and systemd on days that match both.
    if len(days) < 31 and len(weekdays) < 7:
        raise ConfigError(
            f"{text!r} names days of the month and weekdays: cron takes either, systemd both; give one of them"
        )
    if (first := min(days)) > max(_LONGEST_MONTH[month - 1] for month in months):
        raise ConfigError(f"{text!r} never comes: no such month has a day {first}; give another one")
    return Schedule(minutes, hours, days, months, weekdays)


def _listed(values: tuple[int, ...], full: int, between: str, digits: int) -> str:
    """Return `*` for all numbers, else a list; three and more in a row become a range such as `1-3`."""
    if len(values) == full:
        return "*"
    runs: list[list[int]] = []
    for value in values:
        if runs and value == runs[-1][-1] + 1:
            runs[-1].append(value)
        else:
            runs.append([value])
    parts = (
        [f"{run[0]:0{digits}}{between}{run[-1]:0{digits}}"] if len(run) > 2 else [f"{n:0{digits}}" for n in run]
        for run in runs
    )
    return ",".join(part for several in parts for part in several)


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
