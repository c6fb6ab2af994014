"""Key files: who makes them, which are read, and which the store is to name."""

from __future__ import annotations

import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from art_patch._lib.key_files import admin_key, engine_key, key_for_apps, made_key, read_key
from art_patch.errors import ConfigError
from art_patch.serving import EngineClient
from art_patch.settings import load_settings


def written(path: Path, mode: int = 0o600) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("s3cret\n")
    path.chmod(mode)
    return path


def test_of_many_that_make_a_key_the_first_wins(tmp_path: Path):
    path = tmp_path / "project" / "admin.key"
    with ThreadPoolExecutor(8) as pool:
        (key,) = set(pool.map(lambda _: made_key(path), range(32)))
    assert len(key) >= 40
    assert (stat.S_IMODE(path.stat().st_mode), admin_key(path.parent)) == (0o600, key)
    assert [file.name for file in path.parent.iterdir()] == ["admin.key"]


def test_the_store_names_a_file_of_the_projects_own(tmp_path: Path):
    project, key = tmp_path / "project", written(tmp_path / "etc" / "api.key")
    copy = key_for_apps(read_key(str(key)), project)
    assert copy == str(project / "engine.key")
    assert stat.S_IMODE((project / "engine.key").stat().st_mode) == 0o600
    assert engine_key(copy, project, None) == "s3cret"
    assert key_for_apps(read_key(copy), project) == copy
    with pytest.raises(ConfigError, match="which is not"):
        engine_key(str(written(project / "mine")), project, None)
    assert key_for_apps(None, project) is None


def test_the_job_reads_no_other_file_either(tmp_path: Path):
    settings = load_settings(home=tmp_path, project="p")
    with pytest.raises(ConfigError, match="set ART_PATCH_ENGINE_KEY_FILE to it"):
        EngineClient.of_project(settings, "http://127.0.0.1:9", str(written(tmp_path / "victim")))
    with pytest.raises(ConfigError, match="cannot read the API key file"):
        EngineClient.of_project(settings, "http://127.0.0.1:9", str(tmp_path / "p" / "engine.key"))
    own = settings.model_copy(update={"engine_key_file": written(tmp_path / "mine")})
    EngineClient.of_project(own, "http://127.0.0.1:9", "/etc/shadow").close()


def test_a_key_that_others_may_read_is_none(tmp_path: Path):
    with pytest.raises(ConfigError, match="chmod 600"):
        read_key(str(written(tmp_path / "key", 0o644)))
    with pytest.raises(ConfigError, match="not a regular file"):
        read_key("/dev/zero")
    written(tmp_path / "admin.key", 0o644)
    assert admin_key(tmp_path) is None
