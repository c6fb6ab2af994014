"""Variables: empty is unset, and a command refuses one that says something impossible."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from art_patch.cli.app import app
from art_patch.errors import ConfigError
from art_patch.settings import Settings, load_settings


def variables() -> list[str]:
    """Every variable of ours: of the settings, and of the commands' options."""
    names, commands = {f"ART_PATCH_{name.upper()}" for name in Settings.model_fields}, [typer.main.get_command(app)]
    while commands:
        command = commands.pop()
        commands += getattr(command, "commands", {}).values()
        names |= {str(parameter.envvar) for parameter in command.params if parameter.envvar}
    return sorted(name for name in names if name.startswith("ART_PATCH_"))


@pytest.mark.parametrize("blank", ["", "  ", "\t\n"])
def test_an_empty_variable_is_unset(blank: str, monkeypatch: pytest.MonkeyPatch):
    for name in variables():
        monkeypatch.setenv(name, blank)
    assert load_settings() == Settings()
    assert load_settings(project="bot").project == "bot"


@pytest.mark.parametrize("blank", ["", "  "])
@pytest.mark.parametrize(
    ("command", "code", "said"),
    [
        (["score"], 7, "no judge is configured"),
        (["doctor"], 0, "all defaults"),
        (["cron", "print"], 0, "retrain --project default"),
        (["run", "--", sys.executable, "-c", "import art_patch; print(art_patch.patch())"], 0, "Handle"),
    ],
)
def test_an_empty_variable_is_unset_for_commands(command: list[str], code: int, said: str, blank: str, tmp_path: Path):
    home = {"XDG_DATA_HOME": str(tmp_path)}
    environment = os.environ | dict.fromkeys(variables(), blank) | home
    done = subprocess.run(
        [sys.executable, "-m", "art_patch", *command], env=environment, capture_output=True, text=True, cwd=tmp_path
    )
    assert (done.returncode, said in done.stdout + done.stderr) == (code, True), done.stdout + done.stderr


def test_commands_refuse_a_bad_variable(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ART_PATCH_MODE", "Record")
    with pytest.raises(ConfigError, match=r"^ART_PATCH_MODE: .*'record'"):
        load_settings()
    assert load_settings(mode="record").mode == "record", "an argument stands in for the variable"
