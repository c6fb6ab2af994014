"""Parses a schedule in the five fields of a crontab, and writes it for cron, Kubernetes and systemd.

The fields are `MINUTE HOUR DAY MONTH WEEKDAY`. A field is `*`, a number, a range `a-b`, or a step `*/n` or `a-b/n`;
commas separate several of them. Months and weekdays may be English names of three letters. Sunday is 0 or 7.

Times are in the time zone of the machine that starts the job. In Kubernetes this is the controller's, usually UTC.
"""

import re
from dataclasses import dataclass

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
    """Parse a schedule from the five fields of a crontab line.

    Raises a `ConfigError` if it is not valid, its date never occurs, or it limits both days of the month and weekdays.
    """
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
