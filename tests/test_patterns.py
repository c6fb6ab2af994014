"""No regular expression of the package takes more than linear time.

A search holds the interpreter's lock. So in the app's process a slow one stops every thread and event loop of the app,
and whoever writes a text (a user, a model, a server) could make it slow. The expressions are read from the source: each
mention of a function of `re`. What is put together at run time, or is exempt, stands in a table below, or a test fails.

Each is run on hostile texts of up to 1 MB. Ten times as much text may take 15 times as long.
"""

from __future__ import annotations

import ast
import importlib
import itertools
import random
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from art_patch.grouping.wording import words_of
from art_patch.recording.scrubbing import hide
from tests.support.apps import FULL
from tests.support.growth import too_steep
from tests.support.hostile_texts import HostileText, hostile_texts

_ROOT = Path(__file__).parents[1]
_SOURCES = {
    str(path.relative_to(_ROOT)): path.read_text()
    for path in sorted(chain((_ROOT / "art_patch").rglob("*.py"), (_ROOT / "integrations").rglob("*.py")))
}
_FUNCTIONS = frozenset({"compile", "search", "match", "fullmatch", "split", "findall", "finditer", "sub", "subn"})
_HARMLESS = frozenset({"escape", "error", "Match", "Pattern", "ASCII", "DOTALL", "IGNORECASE", "MULTILINE"})


# Found in the source.


@dataclass(frozen=True)
class Use:
    """A mention of a function of `re`.

    Attributes:
        place: the file, and the variable or function that it stands in.
        pattern: `None` if it is put together at run time.
        methods: that the expression is used by.
    """

    place: str
    pattern: re.Pattern[Any] | None
    methods: tuple[str, ...]


def _namespace(path: str) -> dict[str, Any]:
    return vars(importlib.import_module(path.removeprefix("integrations/").removesuffix(".py").replace("/", ".")))


def _value(node: ast.expr, path: str) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return eval(compile(ast.Expression(node), path, "eval"), _namespace(path))


def _uses(path: str, source: str) -> Iterator[Use]:
    """Every use of `re` in a file. Flags are known by their names: arguments of `sub` and `split` may be anything."""
    for top in ast.parse(source).body:
        calls = {id(node.func): node for node in ast.walk(top) if isinstance(node, ast.Call)}
        for node in ast.walk(top):
            if not (isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "re"):
                continue
            if node.attr in _HARMLESS:
                continue
            name = _name(top, node)
            call = calls.get(id(node))
            try:
                assert node.attr in _FUNCTIONS and call is not None, f"{path}: re.{node.attr} is not looked at"
                flags = [arg for arg in call.args[1:] + [word.value for word in call.keywords] if _is_flag(arg)]
                pattern = re.compile(_value(call.args[0], path), _value(flags[0], path) if flags else 0)
            except NameError:
                pattern = None
            methods = (node.attr,)
            if node.attr == "compile":
                methods = tuple(dict.fromkeys(re.findall(rf"\b{name}\.(\w+)\(", source))) or ("sub",)
            yield Use(f"{path}:{name}", pattern, methods)


def _is_flag(node: ast.expr) -> bool:
    return re.search(r"\bre\.[A-Z]|FLAGS", ast.unparse(node)) is not None


def _name(top: ast.stmt, node: ast.AST) -> str:
    """The variable or the innermost function that `node` stands in."""
    if isinstance(top, ast.Assign):
        return ast.unparse(top.targets[0])
    named = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    around = [each for each in ast.walk(top) if isinstance(each, named) and any(n is node for n in ast.walk(each))]
    return around[-1].name if around else ""


_USES = [use for path, source in _SOURCES.items() for use in _uses(path, source)]


# Not found in the source.


def strings_of(path: str) -> list[re.Pattern[str]]:
    """Every string of a module that is a valid expression."""
    found: list[re.Pattern[str]] = []
    for value in _namespace(path).values():
        for text in chain.from_iterable(value) if isinstance(value, tuple) else [value]:
            if isinstance(text, str) and not text.startswith(("art_patch", "/")) and re.search(r"[\\\[(]", text):
                try:
                    found.append(re.compile(text))
                except re.error:  # a replacement
                    continue
    return found


_ASSEMBLED: dict[str, Callable[[], list[re.Pattern[str]]]] = {
    "art_patch/grouping/wording.py:_VOLATILE": lambda: [
        rule.pattern for rule in _namespace("art_patch/grouping/wording.py")["_VOLATILE"]
    ],
    "art_patch/rewards/defences/injection.py:_compile": lambda: [
        pattern for _, pattern in _namespace("art_patch/rewards/defences/injection.py")["_PATTERNS"]
    ],
    "art_patch/serving/vllm/replica.py:_OF_LOAD": lambda: list(
        _namespace("art_patch/serving/vllm/replica.py")["_OF_LOAD"]
    ),
}
"""Put together at run time, and what came of it."""

_WITHIN: dict[str, tuple[Callable[[str], Any], Callable[[], list[re.Pattern[str]]]]] = {
    "art_patch/grouping/wording.py:_MATERIAL": (
        words_of,
        lambda: [_namespace("art_patch/grouping/wording.py")["_MATERIAL"]],
    ),
    "art_patch/recording/scrubbing.py:_compiled": (hide, lambda: strings_of("art_patch/recording/scrubbing.py")),
}
"""Linear only as its function uses it, which is measured in its place."""

_EXEMPT = {
    "art_patch/cli/typed_options.py:_attribute_help": "docstrings of this package",
    "art_patch/demo/tiny_model.py:make_tokenizer": "escaped words, without a repetition",
    "art_patch/demo/tiny_model.py:conversation_tokenizer": "escaped words, without a repetition",
    "art_patch/rollouts/environments.py:parse_action": (
        "escaped names of actions, without a repetition; numbers of nine digits"
    ),
    "art_patch/patching/sdk/surfaces.py:compile_match": "the user's own",
    "art_patch/settings.py:_is_pattern": "the user's own",
    "art_patch/policies/adoption.py:_check_patterns": "the adapter's own, matched with nothing yet",
    "art_patch/policies/adoption.py:_own": "the adapter's own, of which `check_pattern` refuses what may take forever",
    "art_patch/policies/validation.py:_check_targets": "the same",
    "art_patch/store/backends/urls.py:_LOGIN": "a setting: the URL of the store",
    "art_patch/training/families.py:_ROUTER": "names of the base model's modules",
}
"""What is not looked at, and why that is no risk."""


# Measured.

# What is not linear shows at 100,000 signs at the latest; a million takes minutes for all patterns.
_SIZES = ((100, 1_000, 10_000), (10_000, 100_000), (100_000, 1_000_000))[: 3 if FULL else 2]
_WORST = 10
"""So many texts of each size go on to the next: those that took longest."""


def _doing(pattern: re.Pattern[Any], method: str) -> Callable[[Any], Any]:
    if method in ("sub", "subn"):
        return partial(pattern.sub, b"" if isinstance(pattern.pattern, bytes) else "")
    return getattr(pattern, "findall" if method == "finditer" else method)


def _slow(do: Callable[[Any], Any], *patterns: re.Pattern[Any]) -> str | None:
    """Return a text made for `patterns` for which `do` takes more than linear time; `None` if there is none."""
    texts = list(dict.fromkeys(chain.from_iterable(map(hostile_texts, patterns))))

    for sizes in _SIZES:
        took: dict[HostileText, float] = {}
        for text in texts:
            began = time.perf_counter()
            if steep := too_steep(do, text.of_size, sizes):
                return f"{text}: {steep}"
            took[text] = time.perf_counter() - began
        texts = sorted(texts, key=lambda text: -took[text])[:_WORST]
    return None


_MEASURED = [use for use in _USES if use.pattern and use.place not in _EXEMPT.keys() | _WITHIN.keys()]


@pytest.mark.slow
@pytest.mark.parametrize("use", _MEASURED, ids=[use.place for use in _MEASURED])
def test_a_pattern_takes_linear_time(use):
    assert [_slow(_doing(use.pattern, method), use.pattern) for method in use.methods] == [None] * len(use.methods)


@pytest.mark.slow
@pytest.mark.parametrize("pattern", [pattern for made in _ASSEMBLED.values() for pattern in made()])
def test_an_assembled_pattern_takes_linear_time(pattern):
    assert _slow(_doing(pattern, "sub"), pattern) is None


@pytest.mark.slow
@pytest.mark.parametrize("place", _WITHIN)
def test_a_function_takes_linear_time(place):
    do, patterns = _WITHIN[place]
    assert _slow(do, *patterns()) is None


@pytest.mark.slow
def test_random_texts_take_linear_time():
    """A minute of random texts with ART_PATCH_FULL=1; else sixty shorter ones, which are the same each time."""
    seed = time.time_ns() if FULL else 1
    rng, until = random.Random(seed), time.monotonic() + 60
    searches = [
        (_doing(use.pattern, method), [use.pattern]) for use in _MEASURED if use.pattern for method in use.methods
    ]
    searches += [(_doing(pattern, "sub"), [pattern]) for made in _ASSEMBLED.values() for pattern in made()]
    searches += [(do, made()) for do, made in _WITHIN.values()]
    for count in itertools.count():
        if time.monotonic() > until if FULL else count == 60:
            break
        do, patterns = rng.choice(searches)
        known = hostile_texts(rng.choice(patterns))
        parts = [part for text in rng.sample(known, 4) for part in text[:3] if part]
        lead, unit, tail = ("".join(rng.choices(parts, k=rng.randint(*most))) for most in ((0, 2), (1, 3), (0, 2)))
        text = HostileText(lead, unit, tail, known[0].as_bytes)
        steep = too_steep(do, text.of_size, (1_000, 10_000, 100_000, 1_000_000)[: 4 if FULL else 3])
        assert steep is None, f"seed {seed}, {patterns}, {text}: {steep}"


@pytest.mark.slow
@pytest.mark.parametrize(
    "known_to_be_slow",
    [
        r"\w+@\w+",
        r"\b(?=[A-Za-z_-]*\d)[A-Za-z0-9_-]{32,}",
        pytest.param(r"^<<<([0-9a-f]{8})\n(?s:.*?)\n\1>>>$", marks=pytest.mark.full),
        r"(?i)[\w-]*(?:api[_-]?key|secret)[\w-]*\s*[:=]",  # cubic
        r"(?:a|b|ab)*c",  # exponential
    ],
)
def test_a_slow_pattern_is_seen(known_to_be_slow):
    pattern = re.compile(known_to_be_slow, re.MULTILINE)
    assert _slow(_doing(pattern, "sub"), pattern)


def test_nothing_is_forgotten():
    unknown = {use.place for use in _USES if use.pattern is None}
    assert unknown - _ASSEMBLED.keys() - _WITHIN.keys() - _EXEMPT.keys() == set()
    assert _ASSEMBLED.keys() | _WITHIN.keys() | _EXEMPT.keys() <= {use.place for use in _USES}
    for path, source in _SOURCES.items():
        for node in ast.walk(ast.parse(source)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            aliases = [alias.asname for alias in node.names if alias.name == "re"] if names else []
            assert not any(aliases), f"{path}: import re by its name"
            assert "regex" not in names, f"{path}: other patterns than those of re are not looked at"
            assert not (isinstance(node, ast.ImportFrom) and node.module in ("re", "regex")), f"{path}: import re"
