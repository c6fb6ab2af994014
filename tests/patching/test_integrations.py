"""Integrations are found wherever `importlib.metadata` finds them."""

from __future__ import annotations

import sys
import zipfile
from importlib.metadata import Distribution, DistributionFinder
from pathlib import Path

import pytest

from art_patch.patching.sdk.integrations import find_integrations

FILES = {
    "METADATA": "Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
    "entry_points.txt": "[art_patch.integrations]\n{name} = its_{name}:hook\n",
}


def put(folder: Path, name: str, info: str = "{name}-1.0.dist-info") -> Path:
    place = folder / info.format(name=name)
    place.mkdir(parents=True)
    for file, text in FILES.items():
        (place / file).write_text(text.format(name=name))
    return place


def found() -> set[str]:
    return {entry.name for entry in find_integrations()}


def test_directories_of_every_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    put(tmp_path, "wheel")
    put(tmp_path, "old", "{name}.egg-info")
    put(tmp_path / "laid.egg", "laid", "EGG-INFO")
    put(tmp_path / "here", "here")
    (tmp_path / "no_directory.egg-info").write_text("")
    (tmp_path / "without-1.0.dist-info").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    odd = [str(tmp_path), tmp_path / "laid.egg", "", "/no/such/place"]
    monkeypatch.setattr(sys, "path", [*odd, *sys.path])
    assert found() >= {"wheel", "old", "laid", "here"}


def test_zip_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        for file, text in FILES.items():
            archive.writestr(f"zipped-1.0.dist-info/{file}", text.format(name="zipped"))
    monkeypatch.syspath_prepend(str(tmp_path / "all.zip"))
    assert "zipped" in found()


def test_other_finders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    place = put(tmp_path, "elsewhere")

    class Finder(DistributionFinder):
        def find_spec(self, *_: object) -> None:
            return None

        def find_distributions(self, context: object = None) -> list[Distribution]:
            return [Distribution.at(place)]

    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
    assert "elsewhere" in found()
