"""Every option of the command line, pinned: a name, variable, default or bound that changes is a change for users.

`python -m tests.cli.test_option_list` writes the list anew; say in CHANGELOG.md what changed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import typer
from typer.testing import CliRunner

from art_patch.cli.app import PANELS, app

LIST = Path(__file__).with_name("options.txt")


def commands(command: Any, words: tuple[str, ...] = ("art-patch",)) -> Iterator[tuple[str, Any]]:
    yield " ".join(words), command
    for name, child in getattr(command, "commands", {}).items():
        yield from commands(child, (*words, name))


def described(parameter: Any) -> str:
    """One parameter on a line: what it is called, what it takes, where else its value comes from."""
    takes = parameter.type_descriptor.annotation
    name = takes.__name__ if isinstance(takes, type) and not get_args(takes) else str(takes)
    default = parameter.default
    facts = [
        parameter.param_type_name,
        "/".join((*parameter.opts, *parameter.secondary_opts)),
        name.removeprefix("typing."),
        *(f"{bound}={value}" for bound in ("min", "max") if (value := getattr(parameter, bound, None)) is not None),
        *([f"default={default}"] if default is not None else []),
        *([f"variable={parameter.envvar}"] if parameter.envvar else []),
        *(word for word in ("required", "multiple", "is_eager") if getattr(parameter, word, False)),
    ]
    return "  ".join(facts)


def listed() -> str:
    lines: list[str] = []
    for words, command in sorted(commands(typer.main.get_command(app)), key=lambda each: each[0]):
        options = [each for each in command.params if each.param_type_name != "argument" and each.name != "help"]
        arguments = [each for each in command.params if each.param_type_name == "argument"]
        lines += [words, *(f"    {described(each)}" for each in arguments)]
        lines += sorted(f"    {described(each)}" for each in options)
    return "\n".join(lines) + "\n"


def test_no_option_changed():
    assert listed() == LIST.read_text()


def test_every_command_and_every_parameter_explains_itself():
    bare = [
        f"{words} {parameter.name}"
        for words, command in commands(typer.main.get_command(app))
        for parameter in command.params
        if not getattr(parameter, "help", None)
    ]
    assert not bare
    assert not [words for words, command in commands(typer.main.get_command(app)) if not command.help]


def test_help_has_whole_names_and_no_short_lines_at_80_columns():
    """A name that is cut cannot be copied."""
    for words, command in commands(typer.main.get_command(app)):
        shown = CliRunner().invoke(app, [*words.split()[1:], "--help"], env={"COLUMNS": "80"}).output
        lines = shown.splitlines()
        assert max(map(len, lines)) <= 80, words
        options = [each for each in command.params if each.param_type_name != "argument"]
        names = {name for each in options for name in (*each.opts, *each.secondary_opts)}
        assert names <= set(re.findall(r"(?<![\w-])--?[\w-]+", shown)), words
        # The paragraphs of a docstring are not broken where the source breaks them.
        for above, below in pairwise(lines) if not hasattr(command, "commands") else ():
            if re.match("  [^ -]", above) and re.match("  [^ -]", below) and "Arguments:" not in shown:
                assert len(above) + 1 + len(below.split()[0]) > 78, (words, above)


def test_help_shows_the_commands_in_sections():
    shown = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "80"}).output
    assert [each for each in re.findall("^╭─ (.+?) ─+╮$", shown, re.MULTILINE) if each in PANELS] == list(PANELS)


if __name__ == "__main__":
    LIST.write_text(listed())
