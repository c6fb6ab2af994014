"""What the wheel holds, and that integrations are armed through the entry-point group."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_the_wheel_holds_what_a_user_needs(tmp_path: Path):
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True, timeout=240)
    (wheel,) = tmp_path.glob("art_patch-*.whl")
    names = set(ZipFile(wheel).namelist())
    for wanted in (
        "art_patch/py.typed",
        "art_patch/autostart/on_path/sitecustomize.py",
        "art_patch/feedback/page/page.html",
        "art_patch/schedule/templates/retrain.service",
        "art_patch/store/README.md",
        "art_patch/store/schema/migrations/versions/0001_first_schema.py",
        "art_patch_integrations/__init__.py",
        "art_patch_integrations/py.typed",
    ):
        assert wanted in names
    assert any(name.endswith("share/art-patch/examples/shop_agent/agent.py") for name in names)
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not [name for name in names if name.endswith((".pth", ".pkl", ".bin")) or name.startswith("tests/")]


def armed(tmp_path: Path, *lines: str, **variables: str) -> list[str]:
    """What an app prints in which two frameworks have an integration."""
    for name in ("some_framework", "other_framework"):
        (tmp_path / f"{name}.py").write_text("")
    (tmp_path / "its_integration.py").write_text("def hook(module): print('armed for', module.__name__)\n")
    info = tmp_path / "third_party-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: third-party\nVersion: 1.0\n")
    entries = "some_framework = its_integration:hook\nother_framework = its_integration:hook\n"
    (info / "entry_points.txt").write_text(f"[art_patch.integrations]\n{entries}")
    script = [f"import sys; sys.path.insert(0, {str(tmp_path)!r})", "import art_patch as art", *lines]
    environment = {"ART_PATCH_HOME": str(tmp_path), "PATH": "", **variables}
    result = subprocess.run(
        [sys.executable, "-c", "\n".join(script)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=60,
        check=True,
    )
    assert result.stderr == ""
    return result.stdout.splitlines()


def test_integrations_are_armed_when_their_framework_is_imported(tmp_path: Path):
    lines = (
        "art.patch(mode='record'); art.patch(mode='record')",
        "print('patched', 'its_integration' in sys.modules)",
        "import some_framework",
    )
    assert armed(tmp_path, *lines) == ["patched False", "armed for some_framework"]


def test_integrations_that_are_asked_for_by_name(tmp_path: Path):
    lines = (
        "import some_framework, other_framework",
        "art.patch(mode='record')",
        "print('by name'); art.patch(integrations=['some_framework']); art.patch(integrations='off')",
        "try: art.patch(integrations=['some_framework', 'absent'])",
        "except art.ConfigError as error: print(str(error).partition('; ')[0])",
        "print('all'); art.patch(integrations='auto')",
    )
    assert armed(tmp_path, *lines, ART_PATCH_INTEGRATIONS="off") == [
        "by name",
        "armed for some_framework",
        "integrations: none is installed for absent",
        "all",
        "armed for other_framework",
    ]


def test_a_broken_integration_does_not_break_the_app(tmp_path: Path):
    (tmp_path / "some_framework.py").write_text("works = True\n")
    info = tmp_path / "third_party-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: third-party\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[art_patch.integrations]\nsome_framework = no_such_module:hook\n")
    script = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "import art_patch as art; art.patch(mode='record')\n"
        "import some_framework; print(some_framework.works)\n"
    )
    environment = {"ART_PATCH_HOME": str(tmp_path), "PATH": ""}
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment, timeout=60, check=False
    )
    assert (result.returncode, result.stdout.strip()) == (0, "True"), result.stderr
