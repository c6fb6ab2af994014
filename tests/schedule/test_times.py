"""Schedules: what we read is what cron reads, and systemd is told the same moments."""

from __future__ import annotations

import shutil
import subprocess
from datetime import UTC, datetime
from itertools import islice

import pytest
from cronsim import CronSim
from hypothesis import given
from hypothesis import strategies as st

from art_patch.errors import ConfigError
from art_patch.schedule import parse_schedule
from art_patch.schedule.recipes import Schedule

BEGIN = datetime(2026, 11, 22, 12, 34, 56)
EVERY = [
    ("17 3 * * *", "17 3 * * *", "*-*-* 03:17:00"),
    ("*/20 0-6/2,23 * * mon-fri", "0,20,40 0,2,4,6,23 * * 1-5", "Mon,Tue,Wed,Thu,Fri *-*-* 00,02,04,06,23:00,20,40:00"),
    ("0 4 * * 5-7", "0 4 * * 0,5,6", "Sun,Fri,Sat *-*-* 04:00:00"),
    ("5 4 1,15 JAN,jul *", "5 4 1,15 1,7 *", "*-01,07-01,15 04:05:00"),
    ("0 0 29 2 *", "0 0 29 2 *", "*-02-29 00:00:00"),
    ("59 23 1-31 * 0-6", "59 23 * * *", "*-*-* 23:59:00"),
    ("* * 10-20 * *", "* * 10-20 * *", "*-*-10..20 *:*:00"),
]


@pytest.mark.parametrize(("text", "cron", "calendar"), EVERY)
def test_a_schedule_is_written_for_both(text: str, cron: str, calendar: str):
    schedule = parse_schedule(text)
    assert (schedule.as_cron(), schedule.as_calendar()) == (cron, calendar)


def test_numbers_are_kept_in_order():
    assert parse_schedule("30,5 3 * * 7,1") == Schedule((5, 30), (3,), tuple(range(1, 32)), tuple(range(1, 13)), (0, 1))


@pytest.mark.parametrize(
    "text",
    [
        "", "* * * *", "* * * * * *", "@daily", "60 3 * * *", "17 24 * * *", "17 3 0 * *", "17 3 32 * *", "17 3 * 13 *",
        "17 3 * 0 *", "17 3 * * 8", "17 3 * * funday", "17 3 * mon *", "-5 3 * * *", "5- 3 * * *", "9-5 3 * * *",
        "5/2 3 * * *", "*/0 3 * * *", "5,, 3 * * *", "1.5 3 * * *", "\u0663 3 * * *", "0x3 3 * * *", "999999 3 * * *",
        "0 0 30 2 *", "0 0 31 4,6,9,11 *", "0 0 1 * 1", "17 3 * * *; rm -rf ~", "$(id) 3 * * *", "17 3 % * *",
        "? 3 * * *", "17 3 L * *", "17 3 * * 1#2", "H 3 * * *",
    ],
)  # fmt: skip
def test_what_is_no_schedule_is_refused_in_one_sentence(text: str):
    with pytest.raises(ConfigError, match=r"give|write") as error:
        parse_schedule(text)
    assert "\n" not in str(error.value)


def one_of(low: int, high: int) -> st.SearchStrategy[str]:
    number = st.integers(low, high)
    ranges = st.tuples(number, number).map(sorted).map(lambda pair: f"{pair[0]}-{pair[1]}")
    stepped = st.tuples(
        st.one_of(st.just("*"), ranges.filter(lambda r: len(set(r.split("-"))) == 2)), st.integers(1, 9)
    )
    part = st.one_of(number.map(str), ranges, stepped.map(lambda pair: f"{pair[0]}/{pair[1]}"))
    return st.one_of(st.just("*"), st.lists(part, min_size=1, max_size=3).map(",".join))


TEXTS = st.one_of(
    st.tuples(one_of(0, 59), one_of(0, 23), one_of(1, 28), one_of(1, 12), st.just("*")),
    st.tuples(one_of(0, 59), one_of(0, 23), st.just("*"), one_of(1, 12), one_of(0, 7)),
).map(" ".join)


@given(TEXTS)
def test_another_reader_of_crontabs_finds_the_same_moments_in_what_we_read_and_wrote(text: str):
    ours = parse_schedule(text).as_cron()
    assert list(islice(CronSim(ours, BEGIN), 5)) == list(islice(CronSim(text, BEGIN), 5))


@pytest.mark.parametrize("text", [text for text, _, _ in EVERY])
def test_systemd_finds_the_moments_that_cron_finds(text: str):
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("systemd-analyze is not installed")
    words = ["calendar", "--iterations=6", f"--base-time={BEGIN:%Y-%m-%d %H:%M:%S} UTC"]
    said = subprocess.run(
        [program, *words, parse_schedule(text).as_calendar()],
        capture_output=True, text=True, check=True, timeout=60, env={"TZ": "UTC", "LC_ALL": "C"},
    ).stdout  # fmt: skip
    lines = [line.split(": ", 1)[1] for line in said.splitlines() if "Next elapse" in line or "Iter." in line]
    found = [datetime.strptime(line, "%a %Y-%m-%d %H:%M:%S UTC").replace(tzinfo=UTC) for line in lines]
    assert found == list(islice(CronSim(text, BEGIN.replace(tzinfo=UTC)), 6))
