"""The README and the documentation are true: blocks run, commands parse, links lead somewhere, the site builds."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer

from art_patch import errors
from art_patch.cli.app import app
from art_patch.settings import Settings
from tests.support.docs_pages import GENERATED, PAGES, ROOT, Block, all_blocks, anchors, blocks_of, commands, links
from tests.support.import_graph import ImportGraph
from tests.support.servers import serving
from tests.support.tiny import make_tiny_model

RUNNER = ROOT / "tests/support/docs_runner.py"
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
BASH = [block for block in all_blocks() if block.language == "bash"]
SMALLER = {"STEPS": 1, "UPDATES": 1, "LAST_FACTOR": 3, "SIBLINGS": 2}
"""What pages assign is replaced by these, so that they run in a minute; the base model by a tiny one."""

TRAINS = {"rollouts", "environments"}


def programs() -> Iterator[Any]:
    """Each page's Python blocks as programs: a block that imports the package begins one, the others continue it."""
    for page in PAGES:
        parts: list[list[Block]] = []
        for block in blocks_of(page):
            if block.language == "python" and not block.reason:
                if "import art_patch" in block.code:
                    parts.append([])
                parts[-1].append(block)
        for number, blocks in enumerate(parts, 1):
            name = f"{page.stem}-{number}"
            yield pytest.param(blocks, id=name, marks=[pytest.mark.slow] if page.stem in TRAINS else [])


PROGRAMS = list(programs())


@pytest.mark.parametrize("blocks", PROGRAMS)
def test_python_blocks_run(blocks: list[Block], tmp_path: Path):
    trains = Path(blocks[0].page).stem in TRAINS
    constants: dict[str, Any] = dict(SMALLER)
    if trains:
        constants["BASE_MODEL"] = str(make_tiny_model(tmp_path / "base", hidden=32, vocab_size=320))
    program = tmp_path / "agent.py"
    program.write_text("\n".join(block.code for block in blocks))
    with serving() as upstream:
        environment = {
            "ART_PATCH_HOME": str(tmp_path / "home"), "OPENAI_BASE_URL": upstream.url, "OPENAI_API_KEY": "k",
            "PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
        }  # fmt: skip
        warnings = [] if trains else ["-W", "error"]
        result = subprocess.run(
            [sys.executable, *warnings, str(RUNNER), str(program), json.dumps(constants)],
            cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280, check=False,
        )  # fmt: skip
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]


def test_every_row_of_a_table_is_a_line():
    pages = [*PAGES, *(ROOT / "examples").rglob("README.md"), *(ROOT / "integrations").rglob("README.md")]
    assert not [page.name for page in pages for line in page.read_text().splitlines() if re.search(r"\S \|-+\|", line)]


def test_blocks_that_are_not_run_compile():
    for block in all_blocks():
        if block.language == "python":
            compile(block.code, f"{block.page}:{block.line}", "exec")


def parse(words: list[str]) -> str:
    """Have our command line take the words behind `art-patch`, without executing them; return the command's name."""
    command, name, left = typer.main.get_command(app), "art-patch", list(words)
    context: Any = None
    path: list[str] = []
    while hasattr(command, "resolve_command"):
        if (path and left[:1] and left[0].startswith("-")) or not left:
            break  # a group that is a command, too
        context = command.make_context(name, [], parent=context, resilient_parsing=True)
        name, command, left = command.resolve_command(context, left)
        assert command is not None, f"No such command: {words}"
        path.append(name)
    if not getattr(command, "invoke_without_command", False) or left:
        command.make_context(name, left, parent=context)
    return " ".join(path)


def check_bash(block: Block, empty: Path) -> None:
    subprocess.run(["bash", "-n"], input=block.code, text=True, check=True)
    for words in commands(block.code):
        program, *rest = words[words[0] == "sudo" :]
        if Path(program).name == "art-patch":
            parse(rest)
        elif "pip" in (Path(program).name, *rest[1:2]):
            for extras in re.findall(r"\[([\w,]+)\]", " ".join(rest)):
                assert set(extras.split(",")) <= EXTRAS.keys(), words
        elif Path(program).name.startswith("python") and rest[0].startswith("tests/"):
            assert (ROOT / rest[0]).exists(), words


@pytest.mark.parametrize("block", BASH, ids=[f"{block.page}:{block.line}" for block in BASH])
def test_bash_blocks_are_understood(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for name in ("scores.csv", "openai-fine-tuning.jsonl"):
        (tmp_path / name).touch()
    check_bash(block, tmp_path)


def test_a_wrong_command_line_is_noticed(tmp_path: Path):
    for wrong in ("serve --base a --no-such-option", "serve", "retrain word", "init cuda", "no-such-command"):
        with pytest.raises(Exception, match=r"No such|Missing|unexpected extra argument"):
            check_bash(Block("", 1, "bash", f"art-patch {wrong}  # words\n", ""), tmp_path)


def test_json_blocks_are_json():
    found = [block for block in all_blocks() if block.language == "json"]
    assert found
    for block in found:
        json.loads(block.code)


def test_every_block_is_checked():
    unchecked = [f"{block.page}:{block.line} {block.language}" for block in all_blocks() if not block.is_checked]
    assert unchecked == []
    assert {block.language for block in all_blocks()} == {"python", "bash", "json"}
    run = [block for param in PROGRAMS for block in param.values[0]]
    assert run == [block for block in all_blocks() if block.language == "python"]


def test_every_command_is_in_some_example():
    lines = [words for block in BASH for words in commands(block.code) if Path(words[0]).name == "art-patch"]
    used = {parse(words[1:]).partition(" ")[0] for words in lines}
    assert used == set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]


@cache
def generated() -> dict[str, str]:
    spec = importlib.util.spec_from_file_location("generated_docs", ROOT / "docs/generated.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return {f"docs/pages/{name}": text for name, text in module.pages().items()}


def test_generated_pages_name_everything():
    assert generated().keys() == GENERATED
    text = generated()["docs/pages/reference/settings.md"]
    assert anchors(text) - {"settings"} == set(Settings.model_fields)
    text = generated()["docs/pages/reference/errors.md"]
    codes = {int(code) for code in re.findall(r"^\| (\d+) \|", text, re.MULTILINE)}
    assert codes == {each.exit_code for each in vars(errors).values() if hasattr(each, "exit_code")} | {0, 130}
    text = generated()["docs/pages/reference/cli.md"]
    for name in typer.main.get_command(app).commands:  # type: ignore[attr-defined]
        assert re.search(rf"^## {name}\b", text, re.MULTILINE), name
    assert "--promotion" in text


def test_the_readme_is_short():
    """What it leaves out stands in the pages, each for one purpose."""
    assert len((ROOT / "README.md").read_text().splitlines()) <= 200


@pytest.mark.parametrize(
    "page",
    [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "integrations/README.md", *sorted(ROOT.glob("examples/**/README.md"))],
    ids=lambda page: page.relative_to(ROOT).as_posix(),
)
def test_links_lead_somewhere(page: Path):
    for target in links(page.read_text()):
        if re.match(r"https?:|mailto:", target):
            continue
        path, _, anchor = target.partition("#")
        there = Path(os.path.normpath(page.parent / path)) if path else page
        name = there.relative_to(ROOT).as_posix()
        assert name in generated() or there.exists(), target
        if anchor:
            assert anchor in anchors(generated()[name] if name in generated() else there.read_text()), target


def test_the_site_builds_strictly(tmp_path: Path):
    pytest.importorskip("material", reason="needs the extra docs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet"]
    command += ["--config-file", str(ROOT / "docs/mkdocs.yml"), "--site-dir", str(tmp_path / "site")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    for page in (*PAGES[1:], *map(Path, GENERATED)):
        parts = page.with_suffix("").parts
        built = Path(*parts[parts.index("pages") + 1 :])
        assert (tmp_path / "site" / (built if built.name != "index" else Path()) / "index.html").exists(), page


def named_files(page: str) -> list[str]:
    """The files of the package that a page's table names, in order."""
    text = (ROOT / f"docs/pages/explanation/{page}.md").read_text()
    return [f"art_patch/{name}" for name in re.findall(r"^\| `([\w/]+\.py)` \|", text, re.MULTILINE)]


def test_how_one_call_travels_names_the_files_in_which_code_runs():
    """Compared with a routed streaming call; a file that is missing or too many is named by the assertion."""
    code = (
        "import json; from tests.benchmarks.house import routed_call; print(json.dumps([*map(sorted, routed_call())]))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True
    )
    callers, with_writer = map(set, json.loads(result.stdout.splitlines()[-1]))
    named = named_files("how-one-call-travels")
    assert len(named) == len(set(named))
    # Those of a new file of the spool, which begins at this call or did at an earlier one; and the look once a minute.
    sometimes = {"art_patch/settings.py", "art_patch/store/backends/urls.py", "art_patch/recording/takeover.py"}
    assert set(named) == with_writer | sometimes
    assert set(named[: len(callers)]) == callers, "the caller's files come first"


def test_how_a_policy_is_born_names_the_steps_of_a_cycle():
    graph = ImportGraph(ROOT / "art_patch")
    steps, reached, waiting = set[str](), set[str](), ["art_patch/pipeline/cycle.py"]
    while waiting:
        path = waiting.pop()
        if path in reached:
            continue
        reached.add(path)
        waiting += graph.edges[path]
    waiting = ["art_patch/pipeline/cycle.py"]
    while waiting:  # the same inside the folder, where its door would lead everywhere
        path = waiting.pop()
        if path.startswith("art_patch/pipeline/") and not path.endswith("__init__.py") and path not in steps:
            steps.add(path)
            waiting += graph.edges[path]
    named = named_files("how-a-policy-is-born")
    assert len(named) == len(set(named))
    assert set(named) <= reached, "every named file is a part of a cycle"
    assert steps <= set(named)


@pytest.mark.parametrize("page", ["threat-model", "what-can-go-wrong"])
def test_the_tests_that_a_page_names_exist(page: str):
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / f"docs/pages/explanation/{page}.md").read_text())
    assert len(named) > 20
    missing = [f"{file}::{test}" for file, test in named if f"def {test}(" not in (ROOT / file).read_text()]
    assert missing == []


def test_each_thing_that_can_go_wrong_has_its_tests():
    rows, _, tests = (ROOT / "docs/pages/explanation/what-can-go-wrong.md").read_text().partition("## Tests")
    numbers = re.findall(r"^\| (\d+) \|", rows, re.MULTILINE)
    assert numbers == [str(number) for number in range(1, len(numbers) + 1)]
    assert numbers == re.findall(r"^(\d+)\. `tests/", tests, re.MULTILINE)
