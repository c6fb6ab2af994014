"""What is written for cron, systemd and Kubernetes, read by the tools of each where there are any."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import stat
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from art_patch.errors import ConfigError
from art_patch.schedule import (
    Job,
    cron_job,
    cron_line,
    parse_schedule,
    systemd_units,
    variables_file,
    with_entry,
    without_entry,
)
from tests.support.schedules import as_cron_does, read_unit

ODD = '50% of $HOME `x` "q" it\'s é'


def job(**changes: Any) -> Job:
    values: dict[str, Any] = {
        "project": "Support_Bot.2",
        "schedule": parse_schedule("17 3 * * mon-fri"),
        "options": ("--project", "Support_Bot.2", "--home", "/var/a b", "--check", ODD),
        "python": Path(sys.executable),
        "directory": Path("/srv/app"),
        "variables": Path("/var/a b/Support_Bot.2/retrain.env"),
        "log": Path("/var/a b/Support_Bot.2/retrain.log"),
        "limit_s": 4_500,
        "quiet": (4, 5, 130),
    }
    return Job(**(values | changes))


@pytest.mark.parametrize(("code", "mailed"), [(0, False), (4, False), (5, False), (130, False), (1, True), (7, True)])
def test_a_crontab_line_runs_what_it_should_and_is_quiet_where_nothing_is_wrong(
    code: int, mailed: bool, tmp_path: Path
):
    """The stand-in for our command notes what it was given, and ends as it is told."""
    odd = tmp_path / ODD
    (odd / "app").mkdir(parents=True)
    program = odd / "python"
    program.write_text(
        f'#!/bin/sh\nprintf "%s\\n" "$@" >called\nprintf "%s" "$KEY" >key\necho out; echo err >&2\nexit {code}\n'
    )
    program.chmod(0o755)
    (odd / "env").write_text(variables_file({"KEY": ODD}))
    one = job(python=program, directory=odd / "app", variables=odd / "env", log=odd / "log")
    command = as_cron_does(cron_line(one))
    done = subprocess.run(
        ["/bin/sh", "-c", command], capture_output=True, text=True, timeout=60, env={"PATH": os.defpath}
    )
    assert (odd / "app/called").read_text().splitlines() == ["-P", "-m", "art_patch", "retrain", *one.options]
    assert (odd / "app/key").read_text() == ODD
    assert (odd / "log").read_text() == "out\nerr\n"
    assert stat.S_IMODE((odd / "log").stat().st_mode) == 0o600
    assert done.stderr == ""
    assert done.stdout == (f"art-patch retrain: exit code {code}, see {odd / 'log'}\n" if mailed else "")


def test_a_line_without_its_settings_is_no_silent_failure(tmp_path: Path):
    command = as_cron_does(cron_line(job(directory=tmp_path, variables=tmp_path / "none", log=tmp_path / "log")))
    done = subprocess.run(["/bin/sh", "-c", command], capture_output=True, text=True, timeout=60)
    assert "none" in done.stderr
    assert not (tmp_path / "log").exists()


@pytest.mark.parametrize("changes", [{"options": ["x" * 1_000]}, {"options": ["a\nb"]}])
def test_a_line_that_cron_would_cut_is_refused(changes: dict[str, Any]):
    with pytest.raises(ConfigError, match="--systemd"):
        cron_line(job(**changes))


@pytest.mark.skipif(shutil.which("crontab") is None, reason="there is no crontab command")
def test_cron_understands_the_line(tmp_path: Path):
    file = tmp_path / "crontab"
    file.write_text(with_entry("", "/var/p", cron_line(job())))
    tried = [
        subprocess.run(["crontab", option, str(file)], capture_output=True, text=True, timeout=60)
        for option in ("-n", "-T")  # Debian's and cronie's way to check a file without installing it
    ]
    if not any(done.returncode == 0 for done in tried):
        assert all("invalid option" in done.stderr or "usage" in done.stderr.lower() for done in tried), tried


TEXT = st.text(st.sampled_from("ab \"'\\$`%#=\n;é"), max_size=12)


@settings(max_examples=15, deadline=None)  # a busy machine takes its time to start a process
@given(st.dictionaries(st.sampled_from(["A", "B_2"]), TEXT))
def test_the_shell_reads_every_value_back(variables: dict[str, str]):
    script = f"set -a\n{variables_file(variables)}\nexec {shlex.quote(sys.executable)} -S -c " + shlex.quote(
        "import os, json; print(json.dumps({n: os.environ[n] for n in ('A', 'B_2') if n in os.environ}))"
    )
    done = subprocess.run(
        ["/bin/sh", "-c", script], capture_output=True, text=True, check=True, env={"LC_ALL": "C.UTF-8"}
    )
    assert json.loads(done.stdout) == variables


def test_the_units_say_what_was_asked(tmp_path: Path):
    units = systemd_units(job())
    assert list(units) == ["art-patch-retrain-Support_Bot.2.service", "art-patch-retrain-Support_Bot.2.timer"]
    for name, text in units.items():
        (tmp_path / name).write_text(text)
    service, timer = (read_unit(tmp_path / name) for name in units)
    assert timer.one("Timer", "OnCalendar") == "Mon,Tue,Wed,Thu,Fri *-*-* 03:17:00"
    assert timer.one("Timer", "Persistent") == "true"
    assert timer.one("Timer", "RandomizedDelaySec") == "5min"
    assert service.one("Service", "SuccessExitStatus") == "4 5 130"
    assert service.one("Service", "TimeoutStartSec") == "4500s"
    assert service.one("Service", "WorkingDirectory") == "/srv/app"
    assert service.one("Service", "EnvironmentFile") == "/var/a b/Support_Bot.2/retrain.env"
    assert not any(key == "Environment" for _, key in service.values)
    words = '"50%% of $$HOME `x` \\"q\\" it\'s é"'
    assert service.one("Service", "ExecStart").endswith(f'--home "/var/a b" --check {words}')


def test_the_units_differ_from_those_for_the_whole_machine_only_where_they_must():
    """What a user's own systemd cannot do without more rights is left out; the rest is the same."""
    text = systemd_units(job())["art-patch-retrain-Support_Bot.2.service"]
    deployed = (Path(__file__).parents[2] / "examples/deploy/art-patch-retrain.service").read_text()
    ours, theirs = ({line for line in each.splitlines() if line and line[0] not in "#["} for each in (text, deployed))
    mine = ("Description", "WorkingDirectory", "EnvironmentFile", "ExecStart", "TimeoutStartSec")
    assert {line for line in ours - theirs if not line.startswith(mine)} == set()


def test_systemd_understands_the_units(tmp_path: Path):
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("systemd-analyze is not installed")
    (tmp_path / "a b 50%").mkdir()
    odd = job(directory=tmp_path / "a b 50%", variables=tmp_path / "a b 50%" / "env")
    names: list[str] = []
    for name, text in systemd_units(odd).items():
        (tmp_path / name).write_text(text)
        names.append(name)
    done = subprocess.run(
        [program, "verify", "--man=no", *names], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    # What it ignores is only said, and other units of this machine may have faults of their own.
    assert not [line for line in (done.stdout + done.stderr).splitlines() if "art-patch" in line]
    (tmp_path / names[1]).write_text(systemd_units(odd)[names[1]].replace("03:17:00", "27:17:00"))
    done = subprocess.run([program, "verify", "--man=no", names[1]], cwd=tmp_path, capture_output=True, text=True)
    assert "art-patch" in done.stdout + done.stderr, "a mistake is noticed"


def manifest(**changes: Any) -> tuple[str, dict[str, Any]]:
    ((name, text),) = cron_job(job(**changes), image="registry.example.com/art-patch:1", home="/data").items()
    return name, yaml.safe_load(text)


def test_kubernetes_understands_the_cron_job(tmp_path: Path):
    name, told = manifest()
    assert name == "art-patch-retrain-support-bot-2.yaml"
    kubernetes_validate.validate(told, "1.34", strict=True)
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(told | {"spec": {"schedule": 5}}, "1.34", strict=True)
    if program := shutil.which("kubectl"):
        (tmp_path / name).write_text(yaml.safe_dump(told))
        command = [program, "label", "--local", "-f", name, "-o", "name", "read=yes"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert done.stdout.strip() == "cronjob.batch/art-patch-retrain-support-bot-2", done.stderr


def test_the_cron_job_runs_one_at_a_time_with_few_rights():
    _, told = manifest(options=("--project", "p", "--check", ODD))
    spec = told["spec"]
    its = spec["jobTemplate"]["spec"]
    pod = its["template"]["spec"]
    (container,) = pod["containers"]
    assert (spec["schedule"], spec["concurrencyPolicy"]) == ("17 3 * * 1-5", "Forbid")
    assert (its["backoffLimit"], its["activeDeadlineSeconds"], pod["restartPolicy"]) == (1, 4_500, "Never")
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert container["args"] == ["retrain", "--project", "p", "--check", ODD]
    assert container["env"] == [{"name": "ART_PATCH_HOME", "value": "/data"}]
    assert container["envFrom"] == [
        {"configMapRef": {"name": "art-patch", "optional": True}},
        {"secretRef": {"name": "art-patch-support-bot-2"}},
    ]
    assert [mount["mountPath"] for mount in container["volumeMounts"]] == ["/data", "/tmp"]


def test_names_fit_kubernetes():
    name, _ = manifest(project="P" * 64)
    assert len(name.removesuffix(".yaml")) == 52
    assert manifest(project="a" * 33 + "._b")[0] == f"art-patch-retrain-{'a' * 33}.yaml"


@pytest.mark.parametrize(("code", "seen"), [(0, 0), (4, 0), (5, 0), (130, 0), (1, 1), (13, 13)])
def test_a_pod_succeeds_where_nothing_is_wrong(code: int, seen: int, tmp_path: Path):
    """The stand-in for our command ends as it is told."""
    with in_pod(tmp_path, f"exit {code}") as pod:
        assert pod.wait(timeout=60) == seen
    assert (tmp_path / "called").read_text() == "retrain --project p\n"


def test_a_pod_that_is_deleted_ends_when_the_cycle_has(tmp_path: Path):
    with in_pod(tmp_path, "trap 'echo told >told; exit 130' TERM; echo >ready; while :; do sleep 0.05; done") as pod:
        while not (tmp_path / "ready").exists():
            assert pod.poll() is None
            time.sleep(0.02)
        pod.terminate()
        assert pod.wait(timeout=60) == 0
    assert (tmp_path / "told").read_text() == "told\n"


def test_a_pod_that_is_deleted_as_it_starts_ends_too(tmp_path: Path):
    """The signal may come before the shell knows whom to tell."""
    does = "trap 'exit 130' TERM; kill -TERM $PPID; i=0; while [ $i -lt 200 ]; do sleep 0.05; i=$((i+1)); done; exit 99"
    with ExitStack() as stack:
        directories = [tmp_path / str(number) for number in range(24)]
        for directory in directories:
            directory.mkdir()
        pods = [stack.enter_context(in_pod(directory, does)) for directory in directories]
        assert {pod.wait(timeout=60) for pod in pods} == {0}


def in_pod(directory: Path, does: str) -> subprocess.Popen[bytes]:
    program = directory / "art-patch"
    program.write_text(f'#!/bin/sh\necho "$@" >called\n{does}\n')
    program.chmod(0o755)
    _, told = manifest(options=("--project", "p"))
    (container,) = told["spec"]["jobTemplate"]["spec"]["template"]["spec"]["containers"]
    command = [*container["command"], *container["args"]]
    return subprocess.Popen(command, cwd=directory, env={"PATH": f"{directory}:{os.defpath}"})


LINES = st.lists(st.sampled_from(["# mine\n", "0 1 * * * true\n", "\n", "A=b\n", "# >>> art-patch retrain /other\n"]))


@given(LINES, st.booleans())
def test_a_crontab_stays_as_it_was_around_our_line(lines: list[str], ends: bool):
    crontab = "".join(lines) if ends else "".join(lines).removesuffix("\n")
    once = with_entry(crontab, "/p", "1\n")
    assert with_entry(once, "/p", "1\n") == once
    assert with_entry(with_entry(crontab, "/p", "2\n"), "/p", "1\n") == once
    assert without_entry(once, "/p") != once and without_entry(crontab, "/p") == crontab
    both = with_entry(once, "/q", "3\n")
    assert without_entry(both, "/q") == once
    assert without_entry(once, "/p") == crontab + ("\n" if crontab and not crontab.endswith("\n") else "")


@pytest.mark.parametrize("damage", ["# >>> art-patch retrain /p", "# <<< art-patch retrain /p"])
def test_a_damaged_crontab_is_not_touched(damage: str):
    damaged = with_entry("0 1 * * * true\n", "/p", "1\n").replace(f"{damage}\n", "")
    for change in (lambda: with_entry(damaged, "/p", "1\n"), lambda: without_entry(damaged, "/p")):
        with pytest.raises(ConfigError, match="crontab -e"):
            change()


def test_a_job_is_whole():
    assert replace(job(), options=()).command == (sys.executable, "-P", "-m", "art_patch", "retrain")
