"""A virtual environment for each framework: frameworks and majors of the SDK exclude one another.

An environment holds what was asked for, what art_patch needs, and art_patch from this source tree with its entry points
as pyproject.toml has them now. It is made once and kept in pytest's cache (or in the directory that
`ART_PATCH_TEST_ENVIRONMENTS` names), under a hash of what was asked for. What this interpreter has of it is copied, and
pip, which has the last word, fetches the rest.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import sys
import tomllib
import venv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock
from packaging.requirements import Requirement

from tests.support.environments import ENVIRONMENT, ROOT, copy_installed, say, site_of

HERE = Path(__file__).parent
_PLACE = ROOT / ".pytest_cache/d/frameworks"
_METADATA = "Metadata-Version: 2.1\nName: art-patch\nVersion: 0\n"


def environment(name: str, requirements: Sequence[str]) -> Path:
    """Return the interpreter of an environment; make it if it is not there yet.

    Args:
        name: of the framework, for people who look into the cache.
        requirements: what pip is asked for; what art_patch needs is added, unless it is named here.
    """
    needed = _project()["dependencies"]
    names = {Requirement(line).name for line in requirements}
    needed = [line for line in needed if Requirement(line).name not in names]
    wanted = [*requirements, *needed]
    key = hashlib.sha256("\n".join([sys.version, *wanted]).encode()).hexdigest()[:16]
    folder = Path(os.environ.get("ART_PATCH_TEST_ENVIRONMENTS") or _PLACE)
    folder.mkdir(parents=True, exist_ok=True)
    place = folder / f"{name}-{key}"
    with FileLock(f"{place}.lock"):
        if not (place / "made").exists():
            _make(place, wanted)
        _put_art_patch(site_of(place))
    return place / "bin/python"


def run_app(python: Path, app: str, *arguments: str, variables: Mapping[str, str] | None = None) -> Any:
    """Run a script of this directory and return what it printed last, a line of JSON."""
    done = say([python, HERE / app, *arguments], env={**ENVIRONMENT, **(variables or {})})
    return json.loads(done.stdout.splitlines()[-1])


def _make(place: Path, wanted: list[str]) -> None:
    shutil.rmtree(place, ignore_errors=True)
    own_pip = importlib.util.find_spec("pip") is None  # then the environment needs one, which takes longer
    venv.create(place, symlinks=True, with_pip=own_pip)
    pip = [place / "bin/python" if own_pip else sys.executable, "-m", "pip", "--python", place / "bin/python"]
    copy_installed(wanted, site_of(place))
    install = [*pip, "install", "--quiet", "--no-compile", "--disable-pip-version-check"]
    say([*install, *wanted], env=ENVIRONMENT)
    (place / "made").touch()


def _put_art_patch(site: Path) -> None:
    """Show it the source tree, and the entry points as they are written today."""
    (site / "art_patch.pth").write_text(f"{ROOT}\n{ROOT / 'integrations'}\n")
    info = site / "art_patch-0.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(_METADATA)
    groups = _project().get("entry-points", {})
    lines = [
        f"[{group}]\n" + "".join(f"{key} = {value}\n" for key, value in of.items()) for group, of in groups.items()
    ]
    (info / "entry_points.txt").write_text("\n".join(lines))


def _project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
