"""`art-patch cron` as a user meets it. A stand-in for the `crontab` command keeps its table in a file."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from art_patch.store import open_store
from tests.support.command_line import ENVIRONMENT, art_patch, says
from tests.support.schedules import as_cron_does

STAND_IN = """#!/bin/sh
table="$(dirname "$0")/table"
case "$1" in
  -l) if [ -e "$table" ]; then cat "$table"; else echo "no crontab for you" >&2; exit 1; fi ;;
  -) if [ -e "$(dirname "$0")/full" ]; then echo "no space" >&2; exit 1; fi; cat >"$table" ;;
esac
"""
OTHER = "MAILTO=me\n0 1 * * * true\n"


class Machine:
    """A user with a home directory and a crontab of their own."""

    def __init__(self, directory: Path) -> None:
        self.home = directory / "data"
        self.bin = directory / "bin"
        self.units = directory / "config/systemd/user"
        self.bin.mkdir()
        (self.bin / "crontab").write_text(STAND_IN)
        (self.bin / "crontab").chmod(0o755)
        self.table = self.bin / "table"
        self.variables = {"PATH": f"{self.bin}:{os.environ['PATH']}", "XDG_CONFIG_HOME": str(directory / "config")}

    def run(self, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return art_patch("cron", *words, home=self.home, **self.variables | variables)

    def told(self, *words: str, **variables: str) -> dict[str, object]:
        done = self.run(*words, "--json", **variables)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_the_line_that_is_installed_runs_retrain(machine: Machine):
    open_store(f"sqlite:///{machine.home}/bot/store.db", project="bot").close()  # the app has run
    machine.table.write_text(OTHER)
    done = machine.run("install", "--project", "bot", "--", "--min-groups", "8", ART_PATCH_SETTLE="x")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"retrains bot at 17 3 * * * in {Path.cwd()}: crontab\n")
    before, line, after = machine.table.read_text().removeprefix(OTHER).splitlines()
    assert (before, after) == tuple(f"# {mark} art-patch retrain {machine.home}/bot" for mark in (">>>", "<<<"))
    assert line.startswith("17 3 * * * ")
    ran = subprocess.run(
        ["/bin/sh", "-c", as_cron_does(line)],
        capture_output=True, text=True, timeout=120, env={"PATH": os.defpath, "HOME": str(machine.home)},
    )  # fmt: skip
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")
    log = (machine.home / "bot/retrain.log").read_text()
    assert "nothing to do" in log and "no policy serves yet" in log


def test_a_log_that_has_grown_large_is_kept_once_beside_the_new_one(machine: Machine):
    open_store(f"sqlite:///{machine.home}/bot/store.db", project="bot").close()
    machine.run("install", "--project", "bot")
    (line,) = [line for line in machine.table.read_text().splitlines() if not line.startswith("#")]
    log, old = (machine.home / "bot" / name for name in ("retrain.log", "retrain.log.1"))

    def night() -> None:
        ran = subprocess.run(["/bin/sh", "-c", as_cron_does(line)], timeout=120, env={"PATH": os.defpath})
        assert ran.returncode == 0

    old.write_text("older")
    log.write_bytes(b"x" * (10 << 20))
    night()
    assert (log.stat().st_size > 10 << 20, old.read_text()) == (True, "older")
    night()
    assert old.stat().st_size > 10 << 20
    assert log.stat().st_size < 100_000
    assert "cycle ended" in log.read_text()


def test_what_is_wrong_at_night_is_mailed(machine: Machine):
    machine.run("install", ART_PATCH_STORE="sqlite:////dev/null/store.db")
    (line,) = [line for line in machine.table.read_text().splitlines() if not line.startswith("#")]
    ran = subprocess.run(
        ["/bin/sh", "-c", as_cron_does(line)],
        capture_output=True, text=True, timeout=120, env={"PATH": os.defpath, "HOME": str(machine.home)},
    )  # fmt: skip
    assert ran.stdout == f"art-patch retrain: exit code 19, see {machine.home}/default/retrain.log\n"


def test_installing_again_replaces_and_removing_restores(machine: Machine):
    machine.table.write_text(OTHER)
    machine.told("install")
    first = machine.table.read_text()
    machine.told("install", "--project", "other")
    machine.told("install", "--schedule", "5 4 * * 1")
    machine.told("install")
    told = machine.told("remove", "--project", "other")
    assert told == {"project": "other", "removed": ["crontab"], "then": []}
    assert machine.table.read_text() == first
    machine.told("remove")
    assert machine.table.read_text() == OTHER
    assert machine.run("remove").stdout == "nothing was installed for default\n"


def test_settings_and_keys_stand_in_a_file_and_nowhere_else(machine: Machine):
    secrets = {
        "ART_PATCH_STORE": "postgresql+psycopg://bot:hunter2@db/art",
        "ART_PATCH_JUDGE_API_KEY": "sk-secret",
        "ART_PATCH_REPLAY": "0",
        "ART_PATCH_UNKNOWN": "not a setting",
        "OPENAI_API_KEY": "sk-other",
    }
    told = machine.told("install", **secrets)
    file = machine.home / "default/retrain.env"
    assert told["variables"] == str(file) and told["begun"] is True
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    lines = [line for line in file.read_text().splitlines() if not line.startswith("#")]
    assert lines == [
        'ART_PATCH_JUDGE_API_KEY="sk-secret"',
        'ART_PATCH_REPLAY="0"',
        'ART_PATCH_STORE="postgresql+psycopg://bot:hunter2@db/art"',
    ]
    file.write_text('OPENAI_API_KEY="mine"\n')
    assert machine.told("install", "--systemd", **secrets)["begun"] is False
    assert file.read_text() == 'OPENAI_API_KEY="mine"\n', "a person's own lines stay"
    written = [machine.table, *machine.units.iterdir()]
    shown = [machine.run("print", kind, **secrets).stdout for kind in ("--cron", "--systemd", "--kubernetes")]
    assert len(written) == 3
    for text in (*shown, *(path.read_text() for path in written)):
        assert text and not any(secret in text for secret in ("hunter2", "sk-secret", "sk-other"))


def test_units_are_written_for_the_users_own_systemd(machine: Machine):
    told = machine.told("install", "--systemd", "--project", "bot", "--schedule", "0 2 * * *")
    names = [f"art-patch-retrain-bot.{kind}" for kind in ("service", "timer")]
    assert told["installed"] == [str(machine.units / name) for name in names]
    assert "OnCalendar=*-*-* 02:00:00" in (machine.units / names[1]).read_text()
    assert "systemctl --user enable --now art-patch-retrain-bot.timer" in told["then"]  # type: ignore[operator]
    printed = machine.told("print", "--systemd", "--project", "bot", "--schedule", "0 2 * * *")["files"]
    assert printed == {name: (machine.units / name).read_text() for name in names}
    assert "now run:\n  systemctl --user daemon-reload" in machine.run("install", "--systemd").stdout
    assert len(machine.told("remove", "--project", "bot")["removed"]) == 2  # type: ignore[arg-type]
    assert [path.name for path in machine.units.iterdir() if "bot" in path.name] == []
    assert not machine.table.exists()


def test_what_is_printed_can_be_piped(machine: Machine):
    told = yaml.safe_load(machine.run("print", "--kubernetes", "--image", "r/a:1", "--", "--min-groups", "2").stdout)
    pod = told["spec"]["jobTemplate"]["spec"]["template"]["spec"]
    assert pod["containers"][0]["image"] == "r/a:1"
    assert pod["containers"][0]["args"][-2:] == ["--min-groups", "2"]
    # Nothing of this machine, whose ART_PATCH_HOME is another one; `--home` says where the pod has it.
    assert str(machine.home) not in json.dumps(told)
    assert [mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]] == ["/data", "/tmp"]
    assert 'mountPath: "/srv/art"' in machine.run("print", "--kubernetes", "--home", "/srv/art").stdout
    assert machine.run("print").stdout.splitlines()[1].startswith("17 3 * * * _log=")
    assert not machine.home.exists() and not machine.table.exists(), "print writes nothing"


def test_a_cycle_that_hangs_is_ended_a_quarter_of_an_hour_after_its_time(machine: Machine):
    given = ("--", "--max-minutes", "60")
    assert "TimeoutStartSec=4500s\n" in machine.run("print", "--systemd", *given).stdout
    assert "activeDeadlineSeconds: 4500\n" in machine.run("print", "--kubernetes", *given).stdout
    # A variable of this shell may not be there when the job runs.
    assert "activeDeadlineSeconds: 43200\n" in machine.run("print", "--kubernetes", ART_PATCH_MAX_MINUTES="60").stdout


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--schedule", "61 3 * * *"], "minute"),
        (["--schedule", "@daily"], "no schedule"),
        (["--cron", "--systemd"], "choose one"),
        (["--project", "a/b"], "project"),
        (["--", "--project", "x"], "before the `--`"),
        (["--", "--no-such-option"], "No such option"),
        (["--", "--min-groups", "many"], "valid integer"),
        (["--", "word"], "word"),
        (["--", "--promotion", "perhaps"], "promotion"),
        (["--", "--max-calls", "-1"], "0 or more"),
        (["--", "--learning-rate", "-1"], "learning_rate"),
        (["--", "--max-usd", "2", "--judge", "openai/none"], "the price of openai/none is unknown"),
        (["--", "--max-usd", "2", "--judge", "gpt-4o", "--gate-judge", "openai/none"], "openai/none is unknown"),
    ],
)
def test_a_mistake_is_said_before_anything_is_written(words: list[str], why: str, machine: Machine):
    done = machine.run("install", *words)
    assert done.returncode == 2, done.stdout
    assert why in done.stderr and "Traceback" not in done.stderr
    assert not machine.home.exists() and not machine.table.exists() and not machine.units.exists()


def test_a_limit_in_money_needs_a_price_of_the_judge_that_the_job_will_have(machine: Machine):
    limit, none = ("--", "--max-usd", "2"), {"ART_PATCH_JUDGE": "openai/none"}
    why = "the price of openai/none is unknown, so no limit in USD can be kept; limit the calls instead (--max-calls)"
    for kind in ("--cron", "--systemd"):
        says(machine.run("print", kind, *limit, **none), 2, why)
    says(machine.run("install", **none, ART_PATCH_MAX_USD="2"), 2, why)
    assert not machine.home.exists() and not machine.table.exists()
    # A pod does not have the variables of this shell, but the options.
    assert machine.run("print", "--kubernetes", *limit, **none).returncode == 0
    says(machine.run("print", "--kubernetes", *limit, "--judge", "openai/none"), 2, why)
    assert machine.run("install", *limit, ART_PATCH_JUDGE="openai/gpt-4o").returncode == 0
    # From now on the job reads its file, whatever this shell has.
    assert machine.run("install", *limit, **none).returncode == 0
    (machine.home / "default/retrain.env").write_text("ART_PATCH_JUDGE='openai/none'\n")
    says(machine.run("install", *limit, ART_PATCH_JUDGE="openai/gpt-4o"), 2, why)
    (machine.home / "default/retrain.env").write_text("ART_PATCH_MAX_USD=two\n")
    says(machine.run("install"), 2, "ART_PATCH_MAX_USD is 'two', no amount of US dollars")


def test_a_crontab_that_cannot_be_read_or_written_stays(machine: Machine):
    (machine.bin / "full").touch()
    machine.table.write_text(OTHER)
    says(machine.run("install"), 2, "no space", "the old one stays")
    (machine.bin / "crontab").write_text("#!/bin/sh\necho 'you may not use this program' >&2\nexit 1\n")
    says(machine.run("install"), 2, "may not", "nothing changed")
    assert machine.table.read_text() == OTHER


def test_a_machine_without_cron_is_told_so(machine: Machine):
    (machine.bin / "crontab").unlink()
    alone = {"PATH": str(machine.bin)}
    says(machine.run("install", **alone), 2, "install cron, or use --systemd")
    assert machine.run("remove", **alone).returncode == 0


def test_help_names_the_three():
    done = subprocess.run(
        [sys.executable, "-m", "art_patch", "cron", "--help"], capture_output=True, text=True, env=ENVIRONMENT
    )
    assert all(word in done.stdout for word in ("print", "install", "remove"))
