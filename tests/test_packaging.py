"""What wheel and sdist hold, that both start the demo, and how integrations are armed through their entry points."""

from __future__ import annotations

import signal
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path
from zipfile import ZipFile

import pytest

from art_patch.store import open_store
from tests.support.apps import FULL
from tests.support.demo_models import demo_models
from tests.support.environments import ENVIRONMENT, ROOT, create_venv, say, site_of


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a wheel and an sdist of this source tree."""
    folder = tmp_path_factory.mktemp("built")
    requires = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    say([*create_venv(folder / "builder"), *requires], env=ENVIRONMENT)
    say([folder / "builder/bin/python", "-m", "hatchling", "build", "-d", folder / "dist"], env=ENVIRONMENT)
    return folder / "dist"


@pytest.mark.slow
def test_the_wheel_holds_what_a_user_needs(built: Path):
    (wheel,) = built.glob("art_patch-*.whl")
    names = set(ZipFile(wheel).namelist())
    for wanted in (
        "art_patch/py.typed",
        "art_patch/autostart/on_path/sitecustomize.py",
        "art_patch/feedback/page/page.html",
        "art_patch/schedule/templates/retrain.service",
        "art_patch/store/schema/migrations/versions/0001_first_schema.py",
        "art_patch_integrations/__init__.py",
        "art_patch_integrations/py.typed",
    ):
        assert wanted in names
    assert any(name.endswith("share/art-patch/examples/shop_agent/agent.py") for name in names)
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not [name for name in names if name.endswith((".pth", ".pkl", ".bin")) or name.startswith("tests/")]


@pytest.mark.slow
def test_the_sdist_holds_what_builds_explains_and_tests_it(built: Path):
    (sdist,) = built.glob("art_patch-*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    if not (ROOT / ".git").exists():
        pytest.skip("no git here, so nothing says which files there are")
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    files = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    wanted = {file for file in files if not file.startswith(".")}
    assert wanted <= names
    assert names - wanted == {"PKG-INFO", ".gitignore"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the demo keeps its model; with ART_PATCH_FULL=1 the first to run makes it, a minute and a half."""
    return tmp_path_factory.mktemp("models") if FULL else demo_models(tmp_path_factory)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "kind",
    [
        "whl",
        pytest.param("tar.gz", marks=pytest.mark.skipif(not FULL, reason="a minute more; needs ART_PATCH_FULL=1")),
    ],
)
def test_what_was_built_starts_the_demo(kind: str, built: Path, models: Path, tmp_path: Path):
    """In an environment that has art_patch from the built file alone, the demo runs until its traffic is recorded.

    Everything else is borrowed from the environment of the tests. Python does not read the `.pth` files of a directory
    that it borrows, so a source tree that is installed there is not found.
    """
    (file,) = built.glob(f"art_patch-*.{kind}")
    place, home = tmp_path / "venv", tmp_path / "home"
    say([*create_venv(place), "--no-deps", file], env=ENVIRONMENT)
    borrowed = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (site_of(place) / "borrowed.pth").write_text("\n".join(borrowed))
    own = {key: value for key, value in ENVIRONMENT.items() if not key.startswith("ART_PATCH_")}
    code = "import art_patch, art_patch_integrations as more; print(art_patch.__file__, more.__file__, sep='\\n')"
    places = subprocess.run(
        [place / "bin/python", "-c", code], cwd=tmp_path, env=own, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert [Path(found).is_relative_to(place) for found in places] == [True, True], places
    home.mkdir()
    (home / "models").symlink_to(models)
    command = [place / "bin/art-patch", "demo", "--seed", "1", "--home", home]
    with subprocess.Popen(
        command, cwd=tmp_path, env=own, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as demo:
        assert demo.stdout is not None
        said = ""
        for line in demo.stdout:
            said += line
            if line.strip().startswith("traffic:"):
                break
        demo.send_signal(signal.SIGINT)
        said += demo.stdout.read()
        assert demo.wait(60) == 130, said
    store = open_store(f"sqlite:///{home}/demo-1/store.db", create=False)
    (run, *_) = store.read.recent(limit=1)
    store.close()
    assert run.calls[0].policy == "agent@0"


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
