"""What holds the package together: who imports whom, what is public, what importing costs."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path
from types import GenericAlias

import art_patch

PACKAGE = Path(art_patch.__file__).parent
TORCH = {"torch", "transformers", "peft", "safetensors", "numpy", "tokenizers", "accelerate"}

# Folder or file -> what of art_patch it may import. A new edge is a decision: add it here, with care.
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "keys": {"errors"},
    "garbage": set(),
    "native": set(),
    "private": set(),
    "records": set(),
    "ids": set(),
    "chain": {"records"},
    "settings": {"errors", "records"},
    "transcripts": {"chain", "records"},
    "promotion.states": {"errors", "records"},
    "proof": {"records"},
    "store": {"chain", "errors", "ids", "native", "promotion.states", "records", "transcripts"},
    "context": {"errors", "ids", "records", "recording"},
    "recording": {"chain", "errors", "ids", "native", "proof", "records", "settings", "store"},
    "feedback": {"context", "errors", "keys", "listening", "recording", "records", "serving", "settings", "store"},
    "patching": {"context", "errors", "garbage", "ids", "keys", "records", "recording", "settings", "store"},
    "transfer": {"chain", "errors", "records", "transcripts"},
    "exporters": {"errors", "recording", "records", "serving", "store"},
    "grouping": {"records", "transcripts"},
    "rewards": {"chain", "errors", "records", "transcripts"},
    "exact": {"recording", "records"},
    "serving": {"asgi_caller", "errors", "exact", "keys", "listening", "private", "records", "settings"},
    "listening": {"errors"},
    "asgi_caller": set(),
    "autostart": {"patching"},
    "integrating": {"context"},
    "schedule": {"errors"},
    "report": {"gate", "records"},
    "replay_runner": {"context", "errors", "patching", "recording"},
    "proxy": {"asgi_caller", "context", "errors", "listening", "patching", "serving"},
    "doctor": {"errors", "patching", "records", "serving", "settings", "store"},
    "training": {"errors", "private", "proof", "records", "serving", "transcripts", "transfer"},
    "gate": {"chain", "errors", "records"},
    "promotion": {"errors", "promotion.states", "records", "rewards", "serving"},
    "stages": {
        "errors",
        "gate",
        "grouping",
        "ids",
        "private",
        "promotion",
        "proof",
        "records",
        "rewards",
        "serving",
        "store",
        "training",
    },
    "explicit": {
        "chain",
        "context",
        "errors",
        "exact",
        "gate",
        "grouping",
        "ids",
        "keys",
        "private",
        "promotion",
        "proof",
        "records",
        "recording",
        "serving",
        "settings",
        "stages",
        "store",
        "training",
    },
    "environments": {"errors", "explicit", "training"},
    "local": {"explicit"},
    "cycle": {"errors", "promotion", "records", "rewards", "serving", "stages", "store"},
    "demo": {
        "cycle",
        "errors",
        "gate",
        "grouping",
        "private",
        "records",
        "rewards",
        "serving",
        "settings",
        "store",
        "training",
    },
    "cli": {
        "autostart",
        "chain",
        "cycle",
        "demo",
        "doctor",
        "errors",
        "exporters",
        "feedback",
        "garbage",
        "gate",
        "grouping",
        "keys",
        "listening",
        "patching",
        "promotion",
        "promotion.states",
        "proxy",
        "records",
        "report",
        "rewards",
        "schedule",
        "serving",
        "settings",
        "stages",
        "store",
        "training",
        "transfer",
    },
}


def part_of(module: str) -> str:
    """`art_patch.store.read` -> `store`; the table of moves counts as a part of its own."""
    return "promotion.states" if module == "art_patch.promotion.states" else module.split(".")[1]


def imports() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        module = ".".join(("art_patch", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")
        if module in ("art_patch", "art_patch.__main__"):
            continue
        part = part_of(module)
        for node in ast.walk(ast.parse(path.read_text())):
            names: list[str] = []
            if isinstance(node, ast.ImportFrom) and node.module:
                # `from art_patch.promotion import promote` imports a module, not the package's own file alone
                names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            for name in names:
                path_of = PACKAGE.joinpath(*name.split(".")[1:])
                if name.startswith("art_patch.") and (path_of.with_suffix(".py").exists() or path_of.is_dir()):
                    found.setdefault(part, set()).add(part_of(name))
    return {part: others - {part} for part, others in found.items()}


def test_parts_import_only_what_they_may():
    for part, others in imports().items():
        if part == "store":
            others -= {"promotion"}  # the package's empty __init__, on the way to its table of moves
        assert others <= ALLOWED[part], f"{part} imports {sorted(others - ALLOWED[part])}"


def test_the_allowed_imports_have_no_cycle():
    assert list(TopologicalSorter(ALLOWED).static_order())


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
    modules = {path.stem for path in PACKAGE.iterdir()} | {p.stem for p in PACKAGE.rglob("*.py")}
    functions = {name for name in art_patch.__all__ if inspect.isfunction(getattr(art_patch, name))}
    assert not {f"{name}.py" for name in functions if (PACKAGE / f"{name}.py").exists() or (PACKAGE / name).is_dir()}
    assert modules


def test_the_public_signatures():
    """A change here is a change for every user: say so in CHANGELOG.md."""
    shown = {
        name: str(inspect.signature(getattr(art_patch, name)))
        for name in art_patch.__all__
        if not isinstance(getattr(art_patch, name), type | GenericAlias)
    }
    assert shown.keys() == {
        "auto_trajectory", "bind", "capture_auto_trajectory", "correct", "current_trajectory", "evaluate",
            "feedback_url", "flush",
        "gather_trajectories", "gather_trajectory_groups", "group", "limit_concurrency", "patch", "replayable", "retry",
        "reward", "same_policy", "score", "span", "start", "status", "suppress", "trajectory", "unpatch", "wrap",
    }  # fmt: skip


def test_errors_have_distinct_exit_codes_and_are_drawn_in_the_tree():
    from art_patch import errors

    classes = [getattr(errors, name) for name in errors.__all__]
    codes = [cls.exit_code for cls in classes]
    assert len(set(codes)) == len(codes)
    assert not {0, 130} & set(codes)
    for cls in classes:
        (line,) = [line for line in (errors.__doc__ or "").splitlines() if f" {cls.__name__} " in f" {line} "]
        assert str(cls.exit_code) in line


def test_patching_makes_no_record_that_only_the_writer_or_the_job_needs():
    loaded = modules_after("import art_patch; art_patch.patch(mode='record')")
    assert not {"art_patch.records.calls", "art_patch.records.jobs"} & loaded


def test_every_record_is_where_its_list_says():
    from art_patch import records

    assert all(hasattr(records, name) for name in records.__all__)
