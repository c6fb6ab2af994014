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


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("/data/bot.db", "sqlite:////data/bot.db"),
        ("bot.db", "sqlite:///{here}/bot.db"),
        ("./stores/bot.db", "sqlite:///{here}/stores/bot.db"),
        ("~/bot.db", "sqlite:///{user}/bot.db"),
        ("sqlite:///bot.db", "sqlite:///bot.db"),
        ("postgresql+psycopg://u:p@host/db", "postgresql+psycopg://u:p@host/db"),
    ],
)
def test_a_store_is_a_url_or_a_path(given: str, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "user"))
    expected = url.format(here=tmp_path, user=tmp_path / "user")
    assert load_settings(store=given).store_url == expected
    monkeypatch.setenv("ART_PATCH_STORE", given)
    assert load_settings().store_url == expected


@pytest.mark.parametrize(
    "wrong", ["mysql://u:pw@host/db", "postgres://u:pw@host/db", "u:pw@host/db", "x//u:pw@host/db"]
)
def test_a_mistyped_url_is_no_path_and_its_password_is_not_shown(wrong: str):
    with pytest.raises(ConfigError, match=r"sqlite:////|postgresql\+psycopg://") as error:
        load_settings(store=wrong)
    assert "pw" not in str(error.value)


def run_with_file(text: str | None, *words: str, tmp_path: Path, **environment: str):
    file = tmp_path / "settings.env"
    if text is not None:
        file.write_text(text)
    command = [sys.executable, "-m", "art_patch", "--env-file", str(file), *words]
    own = {name: value for name, value in os.environ.items() if not name.startswith("ART_PATCH_")}
    return subprocess.run(
        command, env=own | {"XDG_DATA_HOME": str(tmp_path)} | environment, capture_output=True, text=True, cwd=tmp_path
    )


SHOW = ["run", "--", sys.executable, "-c", "import os; print(os.environ.get('ART_PATCH_PROJECT'), os.environ['KEY'])"]


def test_an_env_file_gives_what_is_not_set(tmp_path: Path):
    text = "# a comment\nexport ART_PATCH_PROJECT='bot'\nKEY=\"sk 1\"\nART_PATCH_MODE=\n"
    done = run_with_file(text, *SHOW, tmp_path=tmp_path)
    assert (done.returncode, done.stdout) == (0, "bot sk 1\n"), done.stderr
    done = run_with_file(text, *SHOW, tmp_path=tmp_path, KEY="mine", ART_PATCH_PROJECT="other")
    assert done.stdout == "other mine\n", "a variable that is set wins"


def test_an_env_file_is_read_only_when_it_is_named(tmp_path: Path):
    (tmp_path / ".env").write_text("KEY=secret\n")
    done = subprocess.run(
        [sys.executable, "-m", "art_patch", "cron", "print", "--json"], capture_output=True, text=True, cwd=tmp_path,
        env=os.environ | {"XDG_DATA_HOME": str(tmp_path), "KEY": ""},
    )  # fmt: skip
    assert (done.returncode, "secret" in done.stdout) == (0, False)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "cannot be read"),
        ("A=1\nKEY='sk-secret\n", "line 2"),
        ("A=1\n\nsk-secret\n", "line 3"),
        ("A=1\n-sk-secret-=2\n", "line 2"),
    ],
)
def test_an_env_file_that_is_wrong_is_one_error_without_its_words(text: str | None, words: str, tmp_path: Path):
    done = run_with_file(text, "status", tmp_path=tmp_path)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert words in line
    assert "settings.env" in line
    assert "secret" not in line
    done = run_with_file(text, "status", "--json", tmp_path=tmp_path)
    assert done.stdout.startswith('{"error": "ConfigError"')


def test_projects_that_a_disk_may_take_for_one_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "Shop").mkdir()
    assert load_settings(home=tmp_path, project="Shop").directory == tmp_path / "Shop"
    assert load_settings(home=tmp_path / "other", project="shop").project == "shop"
    with pytest.raises(ConfigError, match=r"^project: 'Shop' is taken, and some disks"):
        load_settings(home=tmp_path, project="shop")
    monkeypatch.setenv("ART_PATCH_PROJECT", "sHOP")
    with pytest.raises(ConfigError, match=r"^ART_PATCH_PROJECT: 'Shop' is taken"):
        load_settings(home=tmp_path)
    (tmp_path / "sHOP").mkdir()  # on a disk that tells them apart, somebody may have both already
    assert load_settings(home=tmp_path).project == "sHOP"


@pytest.mark.parametrize("name", ["environments", "Environments"])
def test_no_project_shares_the_directory_of_the_environments(name: str):
    with pytest.raises(ConfigError, match=r"^project: 'environments' is taken"):
        load_settings(project=name)


@pytest.mark.parametrize("name", ["my bot!", "a/b", ".hidden", "", "a" * 65, "bot\n", "böt"])
def test_a_bad_name_of_a_project_is_told_in_words(name: str):
    with pytest.raises(ConfigError) as refused:
        load_settings(project=name)
    said = "take a letter or digit first, then also '.', '_' and '-'; 64 at most (or ART_PATCH_PROJECT)"
    assert str(refused.value) == f"project: {name!r:.70}: {said}"
