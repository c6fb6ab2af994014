"""Signed links: what they allow, and everything else refused."""

from __future__ import annotations

import stat
import subprocess
import sys
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

import pytest

import art_patch
from art_patch import feedback_url
from art_patch.errors import ConfigError
from art_patch.feedback.links import Expired, Forged, Link, read_link, say_address, secret_of, url_of
from art_patch.settings import Settings, load_settings

SECRET = b"a secret of the tests"
LINK = Link("t1", "thumbs", 1_000)


def query_of(url: str) -> list[tuple[str, str]]:
    return parse_qsl(urlsplit(url).query, keep_blank_values=True)


@pytest.mark.parametrize("trajectory", ["t1", "a/b?c&d=e#f", "é \U0001f600", "x" * 300])
def test_a_link_says_what_it_allows(trajectory: str):
    url = url_of(Link(trajectory, "thumbs", 1_000), "https://x.example/fb", SECRET, "shop")
    assert url.startswith("https://x.example/fb/feedback?")
    link, _ = read_link(query_of(url), SECRET, "shop", now=999.9)
    assert link == Link(trajectory, "thumbs", 1_000)


def changed(**changes: str) -> list[tuple[str, str]]:
    given = dict(query_of(url_of(LINK, "http://x", SECRET, "shop")))
    return list((given | changes).items())


@pytest.mark.parametrize(
    "query",
    [
        [],
        changed(trajectory="t2"),
        changed(name="reward"),
        changed(expires="99999999999"),
        changed(expires="1000.0"),
        changed(expires="never"),
        changed(signature=""),
        changed(signature="é"),
        changed(signature="\ud800"),
        [*changed(), ("trajectory", "t1")],
        [pair for pair in changed() if pair[0] != "signature"],
    ],
)
def test_what_was_not_signed_so_is_forged(query: list[tuple[str, str]]):
    with pytest.raises(Forged):
        read_link(query, SECRET, "shop", now=1.0)


def test_other_secrets_and_other_projects_sign_nothing_here():
    for secret, project in ((b"another", "shop"), (SECRET, "other")):
        with pytest.raises(Forged):
            read_link(changed(), secret, project, now=1.0)


def test_time_is_over_but_only_for_those_who_had_a_link():
    with pytest.raises(Expired):
        read_link(changed(), SECRET, "shop", now=1_000.0)
    with pytest.raises(Forged):
        read_link(changed(signature="x"), SECRET, "shop", now=2_000.0)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ART_PATCH_HOME", str(tmp_path))
    for name in ("SECRET", "BASE_URL"):
        monkeypatch.delenv(f"ART_PATCH_FEEDBACK_{name}", raising=False)
    return tmp_path


def test_the_key_is_made_once_and_for_us_alone(home: Path):
    settings = load_settings()
    key = secret_of(settings)
    assert (secret_of(settings), len(key)) == (key, 43)
    path = settings.directory / "feedback.key"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [file.name for file in settings.directory.iterdir()] == ["feedback.key"]
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="others may read"):
        secret_of(settings)


def test_a_secret_that_is_given_needs_no_file_and_must_not_be_short(home: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ART_PATCH_FEEDBACK_SECRET", "sixteen letters!")
    assert secret_of(load_settings()) == b"sixteen letters!"
    assert not list(home.iterdir())
    assert "sixteen" not in repr(load_settings())
    monkeypatch.setenv("ART_PATCH_FEEDBACK_SECRET", "hunter2")
    with pytest.raises(ConfigError, match="at least 16") as refused:
        load_settings()
    assert "hunter2" not in str(refused.value)


def test_the_address_by_argument_setting_or_what_the_server_said(home: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ConfigError, match="art-patch feedback serve"):
        feedback_url(trajectory_id="t")
    say_address(load_settings(), "http://127.0.0.1:9")
    assert feedback_url(trajectory_id="t").startswith("http://127.0.0.1:9/feedback?")
    monkeypatch.setenv("ART_PATCH_FEEDBACK_BASE_URL", "https://set.example/")
    assert feedback_url(trajectory_id="t").startswith("https://set.example/feedback?")
    assert feedback_url(trajectory_id="t", base_url="https://arg.example").startswith("https://arg.example/feedback?")
    with pytest.raises(ConfigError, match="http"):
        feedback_url(trajectory_id="t", base_url="arg.example")


def test_the_current_trajectory_is_meant_unless_another_is_given(home: Path):
    with art_patch.trajectory() as run:
        url = feedback_url(base_url="http://x", name="rating")
    link, _ = read_link(query_of(url), secret_of(load_settings()), "default", now=0.0)
    assert (link.trajectory_id, link.name) == (run.id, "rating")
    with pytest.raises(ConfigError, match="no trajectory to ask about"):
        feedback_url(base_url="http://x")


@pytest.mark.parametrize("wrong", [{"name": ""}, {"expires_s": 0}, {"expires_s": float("inf")}])
def test_mistakes_are_told_at_once(home: Path, wrong: dict[str, object]):
    with pytest.raises(ConfigError):
        feedback_url(trajectory_id="t", base_url="http://x", **wrong)  # type: ignore[arg-type]


def test_the_settings_of_the_patch_are_used(home: Path, tmp_path: Path):
    with art_patch.patch(project="mine", mode="record"):
        url = feedback_url(trajectory_id="t", base_url="http://x")
    settings = Settings(project="mine", home=tmp_path)
    assert read_link(query_of(url), secret_of(settings), "mine", now=0.0)[0].trajectory_id == "t"


def test_making_a_link_loads_nothing_heavy(home: Path):
    code = (
        "import sys, art_patch; art_patch.patch(mode='record'); before = set(sys.modules)\n"
        "art_patch.feedback_url(trajectory_id='t', base_url='http://x')\n"
        "print(*{name.split('.')[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() in (["art_patch"], [])
