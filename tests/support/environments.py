"""Virtual environments for tests: frameworks and majors of the SDK exclude one another.

An environment of a framework holds what was asked for, what art_patch needs, and art_patch from this source tree with
its entry points as pyproject.toml has them now. It is made once and kept in pytest's cache (or in the directory that
`ART_PATCH_TEST_ENVIRONMENTS` names), under a hash of what was asked for. What this interpreter has of it is copied,
since it is compiled, and uv, which has the last word, fetches the rest: it needs seconds where pip needs a minute.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tomllib
import venv
from collections.abc import Mapping, Sequence
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from filelock import FileLock
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
_PLACE = ROOT / ".pytest_cache/d/frameworks"
_METADATA = "Metadata-Version: 2.1\nName: art-patch\nVersion: 0\n"


# With PYTHONDONTWRITEBYTECODE each process would compile the whole SDK anew. Taken now: a fixture of the other tests
# here does without certificates, and uv does not.
LEFT_OUT = ("PYTEST", "PYTHONPATH", "PYTHONDONTWRITEBYTECODE")


ENVIRONMENT = {key: value for key, value in os.environ.items() if not key.startswith(LEFT_OUT)}


def closure(wanted: list[str], but: tuple[str, ...]) -> tuple[dict[str, Distribution], bool]:
    """What is installed here of some requirements and of what those need, leaving `but` and what only it needs out.

    Returns:
        The distributions by name, and whether they are all that is wanted, in versions that will do.
    """
    found: dict[str, Distribution] = {}
    whole, seen = True, set[str]()
    todo = [(Requirement(line), "") for line in wanted]
    while todo:
        asked, extra = todo.pop()
        name = canonicalize_name(asked.name)
        if f"{asked} for {extra}" in seen or (asked.marker and not asked.marker.evaluate({"extra": extra})):
            continue
        seen.add(f"{asked} for {extra}")
        try:
            installed = distribution(name)
        except PackageNotFoundError:
            whole = False
            continue
        if name not in but:
            whole = whole and asked.specifier.contains(installed.version, prereleases=True)
            found[name] = installed
        # What the SDK needs here, its other majors need too; if not, uv sees to it.
        if name not in but or name == "openai":
            needs = [Requirement(line) for line in installed.requires or ()]
            todo += [(need, one) for need in needs for one in ("", *asked.extras)]
    return found, whole


def copy_installed(wanted: list[str], site: Path, but: tuple[str, ...] = ()) -> bool:
    """Copy what `closure` finds into a directory, compiled files included; returns whether that is all of it."""
    found, whole = closure(wanted, but)
    for installed in found.values():
        files = [(file, Path(str(file.locate()))) for file in installed.files or ()]
        inside = [(file, source) for file, source in files if ".." not in file.parts and source.is_file()]
        if not any(file.name == "RECORD" for file, _ in inside) or (installed.read_text("direct_url.json") or ""):
            whole = False  # not as it comes from the index
            continue
        for file, source in inside:
            target = site / file
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)
    return whole


def site_of(place: Path) -> Path:
    (site,) = place.glob("lib/python*/site-packages")
    return site


def say(command: list[Any], **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command that must succeed."""
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=600, **options)
    assert done.returncode == 0, f"{command}\n{tail(done.stdout)}\n{tail(done.stderr)}"
    return done


def tail(text: str) -> str:
    return "\n".join(text.splitlines()[-80:])


def create_venv(place: Path) -> list[Any]:
    """Make an empty virtual environment; returns the command that installs into it."""
    venv.create(place, symlinks=True)
    return [sys.executable, "-m", "uv", "pip", "install", "--quiet", f"--python={place}/bin/python"]


def environment(name: str, requirements: Sequence[str]) -> Path:
    """Return the interpreter of an environment; make it if it is not there yet.

    Args:
        name: of the framework, for people who look into the cache.
        requirements: what is asked for; what art_patch needs is added, unless it is named here.
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
    """Run a script of `tests/frameworks` and return what it printed last, a line of JSON."""
    done = say([python, ROOT / "tests/frameworks" / app, *arguments], env={**ENVIRONMENT, **(variables or {})})
    return json.loads(done.stdout.splitlines()[-1])


def _make(place: Path, wanted: list[str]) -> None:
    shutil.rmtree(place, ignore_errors=True)
    install = create_venv(place)
    copy_installed(wanted, site_of(place))
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


def extras() -> list[str]:
    """The extras of pyproject.toml."""
    return list(_project()["optional-dependencies"])


def resolve(wanted: Sequence[str], resolution: str, python: str) -> tuple[dict[str, str], str]:
    """Have uv choose versions for some extras of pyproject.toml, without installing any.

    Args:
        wanted: the extras, all at once.
        resolution: `highest`, or `lowest-direct`: the lowest version of what pyproject.toml names.
        python: version of Python, such as `3.11`, for which it is to fit.

    Returns:
        The versions by name, and what uv says if there are none.
    """
    line = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-header", "--no-annotate", "pyproject.toml"]
    line += [f"--resolution={resolution}", f"--python-version={python}", *(f"--extra={name}" for name in wanted)]
    done = subprocess.run(line, capture_output=True, text=True, cwd=ROOT, env=ENVIRONMENT, timeout=600, check=False)
    found = [text.partition("==") for text in done.stdout.splitlines() if "==" in text]
    versions = {name: version.partition(" ")[0] for name, _, version in found}
    return ({}, done.stderr) if done.returncode else (versions, "")
