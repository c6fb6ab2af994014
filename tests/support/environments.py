"""Virtual environments for tests: what this interpreter has is copied, pip fetches the rest."""

from __future__ import annotations

import os
import shutil
import subprocess
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]


# With PYTHONDONTWRITEBYTECODE each process would compile the whole SDK anew. Taken now: a fixture of the other tests
# here does without certificates, and pip does not.
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
        # What the SDK needs here, its other majors need too; if not, pip sees to it.
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
            whole = False  # not as pip installs from the index
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
