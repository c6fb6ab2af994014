"""What holds the package together: who imports whom, what is public, what importing costs."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import GenericAlias, ModuleType
from typing import Any

import art_patch
from tests.support.import_graph import ImportGraph

PACKAGE = Path(art_patch.__file__).parent
TESTS = Path(__file__).parent
TORCH = {"torch", "transformers", "peft", "safetensors", "numpy", "tokenizers", "accelerate"}

LEVELS = (
    "errors",
    "_lib",
    "types",
    "trajectories settings otel",
    "store policies grouping rewards gate formats",
    "recording serving",
    "context training promotion",
    "patching",
    "replay",
    "pipeline",
    "trackers rollouts proxy doctor schedule autostart metrics notifications",
    "feedback insights local agent backends dev environment trainer utils",
    "demo web",
    "cli",
    "__init__ __main__",
)
"""Folders and root files, lowest first: each imports from lower levels, and from its neighbours what `BESIDE` lists."""

BESIDE: dict[str, set[str]] = {}
"""Imports between neighbours of one level. A new one is a decision: add it here, with care."""

RETIRED = {
    "contest": "gate run, comparison",
    "course": "train state",
    "crew": "environment pool",
    "dealt": "shuffled",
    "disguise": "response rewriter",
    "door": "bypass",
    "doors": "bypasses",
    "elide": "truncate",
    "eliding": "truncation",
    "figures": "metrics",
    "flight": "routed call",
    "keeper": "checkpoint writer",
    "leg": "attempt",
    "legs": "attempts",
    "localise": "to_engine_request",
    "pulse": "health check",
    "reel": "stream tap",
    "station": "model runtime",
    "tape": "tapped iterator",
    "twin": "engine client",
    "twins": "engine clients",
}
"""Word -> the word of the field that took its place. No identifier, module or option of the package holds one.

All but two are plain English too: the documentation holds no `eliding` and no `localise` at all, and none of the others
in code font.
"""

RETIRED_NAMES = {
    "Bench": "TrainContext",
    "Seen": "Observation",  # in lower case, what was visited already
    "alone": "running_cycle",
    "by_hand": "explicit_update",
    "deal": "shard",
    "owner": "process_identity",
    "side_by_side": "latest_score",
    "told": "registered",
    "told_spans": "registered_spans",
}
"""Whole names of modules, classes, functions and parameters. A local variable may be called so."""

NO_NAME_OF_OURS = {"alone": "functions", "owner": "parameters"}
"""Retired as the name of a module alone; elsewhere the word has its plain meaning."""

RETIRED_IN = {
    "policies": "probe",
    "training": "probe",
    "rewards": "planted answer",
}
"""Folder -> what `canary` is called there: the word means a test on traffic, which none of these makes."""

OTHERS_WORDS = {"crew"}
"""Words of frameworks that the documentation speaks about: CrewAI's."""

GRAPH = ImportGraph(PACKAGE)


def part_of(path: str) -> str:
    """`art_patch/store/read.py` -> `store`, `art_patch/errors.py` -> `errors`."""
    return path.split("/")[1].removesuffix(".py")


def test_every_part_has_a_level():
    assert {part_of(path) for path in GRAPH.files} == set(" ".join(LEVELS).split())


def test_imports_go_down_the_levels():
    level = {part: number for number, parts in enumerate(LEVELS) for part in parts.split()}
    upwards = [
        f"{found.importer}:{found.line} imports {found.target}"
        for found in GRAPH.imports
        if (importer := part_of(found.importer)) != (target := part_of(found.target))
        and (
            level[target] > level[importer]
            or (level[target] == level[importer] and target not in BESIDE.get(importer, ()))
        )
    ]
    assert not upwards


def test_no_file_imports_itself_through_others():
    assert not GRAPH.circles()


def test_folders_are_entered_through_their_doors():
    assert not [f"{found.importer}:{found.line} imports {found.target}" for found in GRAPH.deep_imports()]


def test_a_lazy_door_hands_out_what_its_imports_say():
    """Each name once, from the module that the type checker sees, and none that Python would take for a module."""
    doors = {
        path: tree
        for path, tree in GRAPH.files.items()
        if path.endswith("/__init__.py") and "= lazily()" in (PACKAGE.parent / path).read_text()
    }
    assert len(doors) > 15
    handed: list[tuple[str, str, str]] = []
    for path, tree in doors.items():
        package = path.removesuffix("/__init__.py").replace("/", ".")
        names = [
            (package, alias.name, node.module)
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"{package}.")
            for alias in node.names
            if alias.name not in ("TYPE_CHECKING", "lazily", "__version__")
        ]
        assert len(names) == len({name for _, name, _ in names}), path
        modules = {found.stem for found in (PACKAGE.parent / path).parent.iterdir()}
        assert not modules & {name for _, name, _ in names}, f"{path}: Python would hand out the module"
        handed += names
    run = f"""
import sys
from importlib import import_module
for package, name, module in {handed!r}:
    door = import_module(package)
    assert not hasattr(door, "no_such_name")
    try:
        value = getattr(door, name)
    except ModuleNotFoundError as error:
        assert error.name == "wandb", error  # the one extra that is not in the tests' environment
    else:
        inside = getattr(import_module(module), name)
        assert value is inside and vars(door)[name] is inside, (package, name)
"""
    subprocess.run([sys.executable, "-I", "-"], input=run, text=True, check=True)  # the names are too long for `-c`


def test_the_core_never_imports_integrations():
    assert not [
        p for p in PACKAGE.rglob("*.py") if "art_patch_integrations" in p.read_text() and p.name != "__init__.py"
    ]


def modules_after(code: str) -> set[str]:
    script = f"import sys; before = set(sys.modules); {code}; print(*(set(sys.modules) - before))"
    return set(
        subprocess.run([sys.executable, "-I", "-c", script], capture_output=True, text=True, check=True).stdout.split()
    )


def test_importing_loads_the_standard_library_only():
    loaded = modules_after("import art_patch")
    assert {name.split(".")[0] for name in loaded} <= set(sys.stdlib_module_names) | {"art_patch"}
    assert "art_patch.patching" not in loaded


def test_patching_loads_nothing_heavy():
    loaded = {name.split(".")[0] for name in modules_after("import art_patch; art_patch.patch(mode='record')")}
    assert not loaded & (TORCH | {"litellm", "sqlalchemy", "alembic", "openai", "httpx", "typer", "rich"})


def test_help_loads_nothing_heavy():
    loaded = {name.split(".")[0] for name in modules_after("from art_patch.cli.app import app")}
    assert not loaded & (TORCH | {"litellm", "sqlalchemy", "openai", "starlette"})


def test_the_public_list_is_sorted_and_every_name_is_there():
    assert art_patch.__all__ == sorted(art_patch.__all__)
    for name in art_patch.__all__:
        assert getattr(art_patch, name).__doc__, name
    assert set(art_patch.__all__) <= set(dir(art_patch))


def test_no_submodule_carries_the_name_of_a_public_function():
    """Importing `art_patch/patch.py` would put that module where users find the function `art_patch.patch`."""
    modules = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or path.is_dir()}
    functions = {name for name in art_patch.__all__ if inspect.isfunction(getattr(art_patch, name))}
    assert {"patching", "settings"} <= modules
    assert {"patch", "trajectory"} <= functions
    assert not functions & modules


def test_the_public_signatures():
    """A change here is a change for every user: say so in CHANGELOG.md."""
    shown = {
        name: str(inspect.signature(getattr(art_patch, name)))
        for name in art_patch.__all__
        if not isinstance(getattr(art_patch, name), type | GenericAlias | ModuleType)
    }
    assert shown.keys() == {
        "auto_trajectory", "bind", "capture_auto_trajectory", "capture_yielded_trajectory", "correct",
        "current_trajectory", "evaluate", "feedback_url", "flush", "gather_trajectories", "gather_trajectory_groups",
        "group", "limit_concurrency", "patch", "replayable", "retry", "reward", "same_policy", "score", "span", "start",
        "status", "suppress", "train_sft_from_file", "trajectory", "trajectory_group_batches", "unpatch", "wrap",
        "yield_trajectory",
    }  # fmt: skip


def test_errors_have_distinct_exit_codes_and_are_drawn_in_the_tree():
    from art_patch import errors

    classes = [each for each in vars(errors).values() if hasattr(each, "exit_code")]
    codes = [cls.exit_code for cls in classes]
    assert len(set(codes)) == len(codes)
    assert not {0, 130} & set(codes)
    for cls in classes:
        (line,) = [line for line in (errors.__doc__ or "").splitlines() if f" {cls.__name__} " in f" {line} "]
        assert str(cls.exit_code) in line


def test_patching_makes_no_record_that_only_the_writer_or_the_job_needs():
    loaded = modules_after("import art_patch; art_patch.patch(mode='record')")
    assert not {"art_patch.types.calls", "art_patch.types.jobs"} & loaded


def words_of(name: str) -> set[str]:
    """`engine_clientOf` -> engine, client, of."""
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)}


def names_in(tree: ast.Module) -> Iterator[tuple[str, bool]]:
    """Every identifier of a file, and whether it names a class, a function or a parameter."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name, True
            case ast.arg(arg=name) | ast.keyword(arg=str(name)):
                yield name, True
            case ast.Name(id=name) | ast.Attribute(attr=name):
                yield name, False


def test_no_identifier_holds_a_retired_word():
    found: set[str] = set()
    for path, tree in GRAPH.files.items():
        parts = path.removesuffix(".py").split("/")[1:]
        found |= {path for part in parts if RETIRED.keys() & words_of(part) or part in RETIRED_NAMES}
        for name, is_defined in names_in(tree):
            retired = RETIRED.keys() & words_of(name)
            if is_defined and name.strip("_") in RETIRED_NAMES.keys() - NO_NAME_OF_OURS.keys():
                retired.add(name)
            if parts[0] in RETIRED_IN and "canary" in words_of(name):
                retired.add("canary")
            found |= {f"{path}: {name}" for _ in retired}
    assert not found


def options_of(command: Any) -> Iterator[str]:
    """Every option of a command and of the commands below it."""
    for parameter in command.params:
        yield from (*parameter.opts, *parameter.secondary_opts)
    for inner in getattr(command, "commands", {}).values():
        yield from options_of(inner)


def test_no_option_and_no_setting_holds_a_retired_word():
    import typer

    from art_patch.cli.app import app
    from art_patch.settings import Settings

    options = {*options_of(typer.main.get_command(app)), *Settings.model_fields}
    assert {"--judge", "mode"} <= options
    assert not [option for option in options if RETIRED.keys() & words_of(option)]


def test_the_documentation_holds_no_retired_word():
    """Words that are plain English too are looked for in code font alone: in blocks without comments, in backticks."""
    pages = [TESTS.parent / "README.md", TESTS.parent / "CONTRIBUTING.md", *(TESTS.parent / "docs").rglob("*.md")]
    pages += [
        page for folder in ("art_patch", "examples", "integrations") for page in (TESTS.parent / folder).rglob("*.md")
    ]
    found: list[str] = []
    for page in pages:
        text = page.read_text()
        code = re.findall(r"^```.*?^```|`[^`\n]+`", text, re.DOTALL | re.MULTILINE)
        names = {name for part in code for name in re.findall(r"[A-Za-z_]\w*", re.sub(r"#.*", "", part))}
        wrong = {name for name in names if (RETIRED.keys() - OTHERS_WORDS) & words_of(name)}
        wrong |= names & (RETIRED_NAMES.keys() - NO_NAME_OF_OURS.keys())
        wrong |= set(re.findall(r"\b(?:localis|elid)\w*", text, re.IGNORECASE))
        found += [f"{page.relative_to(TESTS.parent)}: {name}" for name in sorted(wrong)]
    assert len(pages) > 40
    assert not found


def modules_of_tests(tree: ast.Module) -> list[str]:
    """Every module below `tests` that a file imports, at its top or late."""
    found: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            is_file = (TESTS.parent / f"{node.module.replace('.', '/')}.py").exists()
            found += [node.module] if is_file else [f"{node.module}.{alias.name}" for alias in node.names]
    return [module for module in found if module.startswith("tests.")]


def test_what_tests_share_lives_in_support():
    """A file of tests imports `tests.support`, programs of its own folder, and benchmarks that it tries.

    It imports no other test, and no `conftest`, whose fixtures pytest finds by itself.
    """
    wrong: list[str] = []
    for path in TESTS.rglob("*.py"):
        own = ".".join(path.relative_to(TESTS.parent).parent.parts)
        for module in modules_of_tests(ast.parse(path.read_text())):
            folder, _, name = module.rpartition(".")
            if (
                name.startswith("test_")
                or name == "conftest"
                or folder not in (own, "tests.support", "tests.benchmarks")
            ):
                wrong.append(f"{path.relative_to(TESTS.parent)} imports {module}")
    assert not wrong


def test_no_list_in_tests_silences_an_unused_import():
    assert not [path for path in TESTS.rglob("*.py") if re.search(r"^__all__\b", path.read_text(), re.MULTILINE)]
