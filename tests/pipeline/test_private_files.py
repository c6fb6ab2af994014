"""Only its owner reads what a project writes: not even with umask 0, in directories that everybody may read."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from art_patch._lib.key_files import ADMIN_KEY_FILE, key_for_apps, made_key
from art_patch._lib.process import open_log
from art_patch.cli import main
from art_patch.feedback.links import secret_of
from art_patch.pipeline import project_lock
from art_patch.pipeline.cycle_run import write_report
from art_patch.rewards import Judge
from art_patch.rollouts import model_runtime
from art_patch.settings import Settings
from tests.support.cycles import TRAINING, Place


@pytest.fixture
def umask_0(tmp_path: Path) -> Iterator[Path]:
    """Before any other fixture makes a file."""
    before, handler = os.umask(0), signal.getsignal(signal.SIGTERM)
    for directory in (tmp_path, tmp_path / "default", tmp_path / "default" / "adapters", tmp_path / "adapters"):
        directory.mkdir(exist_ok=True)
        directory.chmod(0o755)
    yield tmp_path
    os.umask(before)
    signal.signal(signal.SIGTERM, handler)


def test_others_can_read_no_file_and_enter_no_directory_that_a_project_made(
    umask_0: Path, place: Place, judge: Judge, monkeypatch: pytest.MonkeyPatch
):
    given = {path for path in umask_0.rglob("*") if path.is_dir()} | {umask_0}
    place.traffic()
    report = place.cycle(judge, TRAINING)
    assert report.candidate == "agent@1"
    shutil.copytree(place.adapters / "agent@1", umask_0 / "default" / "adapters" / "agent@1")

    project = umask_0 / "default"
    settings = Settings(home=umask_0)
    assert write_report(report, project, who="test", began_at=0.0, took_s=1.0) is not None
    made_key(project / ADMIN_KEY_FILE)
    assert key_for_apps("engine-key", project)
    assert secret_of(settings)
    with project_lock(project), open_log(project / "retrain.log") as log:
        log.write(b"a line\n")
    model_runtime.note(project, step=1, split="train", metrics={"reward": 1.0}, at=0.0)
    out = umask_0 / "out"
    out.mkdir(mode=0o755)
    given.add(out)
    store = ("--store", place.url, "--home", umask_0)
    for words in (
        ("export", out / "runs.jsonl", "--format", "trajectories", *store),
        ("store", "backup", out / "copy.db", *store),
        ("policies", "export", "agent@1", out / "copy", *store),
    ):
        monkeypatch.setattr("sys.argv", ["art-patch", *map(str, words)])
        with suppress(SystemExit):
            main()
    made = set(umask_0.rglob("*")) - given
    names = {path.name for path in made}
    assert {
        "store.db", "store.db-wal", "store.db-shm", "store.db.lock", "agent@1", "MANIFEST.json", "retrain.log",
        "cycles", "lineage.key", "admin.key", "engine.key", "feedback.key", "cycle.lock", "history.jsonl", "runs.jsonl",
        "copy.db", "copy",
    } <= names  # fmt: skip
    # A directory that others cannot enter keeps its files from them, whatever their mode.
    private = {path for path in made if path.is_dir() and not path.stat().st_mode & 0o077}
    seen = [path for path in made if path.stat().st_mode & 0o077 and private.isdisjoint(path.parents)]
    assert sorted(f"{path.relative_to(umask_0)} {path.stat().st_mode & 0o777:o}" for path in seen) == []
