"""A schedule in the five fields of a crontab, read strictly, and written as cron, Kubernetes and systemd each want it.

In: `MINUTE HOUR DAY MONTH WEEKDAY`; a field is `*`, numbers, ranges `a-b`, steps `*/n` and `a-b/n`, several of them
separated by commas; months and weekdays also by their English names of three letters; Sunday is 0 or 7. Out: the same
moments. What the three understand differently is refused: both a day of the month and a weekday means "either" to cron
and "both" to systemd, and a schedule that never comes is a mistake everywhere.

Times are the local ones of whoever runs the job; in Kubernetes that is the controller, usually at UTC.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from art_patch.errors import ConfigError

_MONTHS = {
    "jan": 1, "feb": 2, "mar": 3, "apr": 4, "may": 5, "jun": 6,
    "jul": 7, "aug": 8, "sep": 9, "oct": 10, "nov": 11, "dec": 12,
}  # fmt: skip
_WEEKDAYS = ("Sun", "Mon", "Tue", "Wed", "Thu", "Fri", "Sat")
_DAY_NUMBERS = {name.lower(): number for number, name in enumerate(_WEEKDAYS)}
_LONGEST_MONTH = (31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
_EXAMPLE = 'write minute, hour, day, month and weekday, such as "17 3 * * *"'


@dataclass(frozen=True, slots=True)
class _Field:
    name: str
    low: int
    high: int
    names: dict[str, int]

    def values(self, text: str) -> tuple[int, ...]:
        """Return the numbers that the text stands for, in order."""
        found: set[int] = set()
        for part in text.lower().split(","):
            matched = re.fullmatch(r"(?:(\*)|(\w+)(?:-(\w+))?)(?:/([0-9]{1,4}))?", part, re.ASCII)
            if matched is None:
                raise self._wrong(part)
            star, first, last, step = matched.groups()
            if step is not None and (int(step) < 1 or (star is None and last is None)):
                raise self._wrong(part)
            begin = self.low if star else self._number(first, part)
            end = self.high if star else self._number(last or first, part)
            if end < begin:
                raise self._wrong(part)
            found.update(range(begin, end + 1, int(step or 1)))
        return tuple(sorted(found))

    def _number(self, word: str, part: str) -> int:
        number = self.names.get(word, int(word) if word.isdecimal() and len(word) <= 4 else -1)
        if not self.low <= number <= self.high:
            raise self._wrong(part)
        return number

    def _wrong(self, part: str) -> ConfigError:
        return ConfigError(f"{part!r} is no {self.name} of a schedule ({self.low}-{self.high}); {_EXAMPLE}")


_MINUTE = _Field("minute", 0, 59, {})
_HOUR = _Field("hour", 0, 23, {})
_DAY = _Field("day of the month", 1, 31, {})
_MONTH = _Field("month", 1, 12, _MONTHS)
_WEEKDAY = _Field("weekday", 0, 7, _DAY_NUMBERS)


@dataclass(frozen=True, slots=True)
class Schedule:
    """Moments that come again. Every field holds its numbers in order; weekdays count from Sunday, 0."""

    minutes: tuple[int, ...]
    hours: tuple[int, ...]
    days: tuple[int, ...]
    months: tuple[int, ...]
    weekdays: tuple[int, ...]

    def as_cron(self) -> str:
        """Return five fields that every cron reads alike: no names, no steps, Sunday is 0."""
        full = (60, 24, 31, 12, 7)
        fields = (self.minutes, self.hours, self.days, self.months, self.weekdays)
        return " ".join(_listed(values, size, "-", 1) for values, size in zip(fields, full, strict=True))

    def as_calendar(self) -> str:
        """Return it as systemd's `OnCalendar=` has it."""
        names = ",".join(_WEEKDAYS[number] for number in self.weekdays)
        date = f"*-{_listed(self.months, 12, '..', 2)}-{_listed(self.days, 31, '..', 2)}"
        time = f"{_listed(self.hours, 24, '..', 2)}:{_listed(self.minutes, 60, '..', 2)}:00"
        return f"{date} {time}" if len(self.weekdays) == 7 else f"{names} {date} {time}"


def parse_schedule(text: str) -> Schedule:
    """Return the schedule that the text says.

    Raises:
        ConfigError: it says none, or one that cron and systemd would understand differently.
    """
    fields = text.split()
    if len(fields) != 5:
        raise ConfigError(f"{text!r} is no schedule; {_EXAMPLE}")
    readers = (_MINUTE, _HOUR, _DAY, _MONTH, _WEEKDAY)
    minutes, hours, days, months, numbers = (
        reader.values(field) for reader, field in zip(readers, fields, strict=True)
    )
    weekdays = tuple(sorted({number % 7 for number in numbers}))
    if len(days) < 31 and len(weekdays) < 7:
        raise ConfigError(
            f"{text!r} names days of the month and weekdays: cron takes either, systemd both; give one of them"
        )
    first = min(days)
    if first > max(_LONGEST_MONTH[month - 1] for month in months):
        raise ConfigError(f"{text!r} never comes: no such month has a day {first}; give another one")
    return Schedule(minutes, hours, days, months, weekdays)


def _listed(values: tuple[int, ...], full: int, between: str, digits: int) -> str:
    """Return the numbers as a list of ranges, `*` for all; three and more in a row are a range."""
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
