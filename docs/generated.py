"""The reference pages that are made from the code: command line, settings, errors, Python API, metrics.

`pages()` returns each page's Markdown by its path below `docs/pages`. Nothing is written to the repository, so no
copy can become outdated. `python docs/generated.py` prints the pages.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

ROOT = Path(__file__).resolve().parents[1]


def pages() -> dict[str, str]:
    """Return the generated pages by path."""
    return {f"reference/{name}.md": make() for name, make in MAKERS.items()}


def command_line() -> str:
    """Return one section for each command, grouped as in `art-patch --help`."""
    import typer

    from art_patch.cli.app import PANELS, app

    root = typer.main.get_command(app)
    lines = [
        "# Command line",
        "",
        "This page is generated from the command line itself. `art-patch COMMAND --help` shows the same.",
        "Commands accept `--json`, and then print one JSON object. [Errors](errors.md) lists the exit codes.",
        "",
        "Options of `art-patch` itself stand before the command, as in `art-patch --env-file .env status`.",
        *_table(root),
    ]
    for panel in PANELS:
        found = {name: each for name, each in root.commands.items() if each.rich_help_panel == panel}
        firsts = {name: "-".join(next(_commands(each, [name]))[0]) for name, each in found.items()}
        links = ", ".join(f"[{name}](#{first})" for name, first in firsts.items())
        lines += ["", f"**{panel}**: {links}"]
    for panel in PANELS:
        for name, each in root.commands.items():
            if each.rich_help_panel == panel:
                for words, command in _commands(each, [name]):
                    lines += ["", f"## {' '.join(words)}", "", f"*{panel}.* {_plain(command.help or '')}"]
                    lines += _table(command)
    return "\n".join(lines) + "\n"


def _table(command: Any) -> list[str]:
    rows = [row for each in command.params if not getattr(each, "hidden", False) and (row := _parameter(each))]
    return ["", "| argument or option | meaning |", "|---|---|", *rows] if rows else []


def _commands(command: Any, words: list[str]) -> Iterator[tuple[list[str], Any]]:
    children: dict[str, Any] = getattr(command, "commands", {})
    # A group such as `policies` is a command, too; one whose callback does nothing is not.
    if not children or getattr(command, "invoke_without_command", False):
        yield words, command
    for name, child in children.items():
        if not child.hidden:
            yield from _commands(child, [*words, name])


def _parameter(parameter: Any) -> str:
    if parameter.name == "help":
        return ""
    names = ", ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))
    if parameter.param_type_name == "argument":
        names = f"`{parameter.name.upper()}`"
    words = _plain(getattr(parameter, "help", "") or "").replace("\n", " ")
    if kind := _choices(parameter):
        words += " One of " + ", ".join(f"`{each}`" for each in kind) + "."
    default = parameter.default
    known = not (default is None or callable(default) or default in ((), [], "", False) or _is_unset(default))
    envvar = parameter.envvar if isinstance(parameter.envvar, str) else ", ".join(parameter.envvar or ())
    if known:
        words += f" Default: `{getattr(default, 'value', default)}`."
    elif parameter.required:
        words += " Required."
    return _row(names, words + f" Variable: `{envvar}`." * bool(envvar))


def _choices(parameter: Any) -> list[str]:
    """Return what a parameter takes if that is a list of words: of Typer's own parameters, or of click's."""
    annotation = getattr(getattr(parameter, "type_descriptor", None), "annotation", None)
    if get_origin(annotation) in (Union, UnionType):
        annotation = next((each for each in get_args(annotation) if each is not type(None)), None)
    if get_origin(annotation) is Literal:
        return [str(each) for each in get_args(annotation)]
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return [str(each.value) for each in annotation]
    return [
        str(getattr(each, "value", each)) for each in getattr(getattr(parameter, "type", None), "choices", None) or ()
    ]


def _is_unset(default: Any) -> bool:
    return "unset" in type(default).__name__.lower() or "UNSET" in repr(default)


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").strip() for cell in cells) + " |"


def _plain(text: str) -> str:
    """Return help as Markdown: without Rich's markup, and with angle brackets that no browser reads as tags."""
    text = inspect.cleandoc(text.replace("\f", ""))
    # Typer takes the indentation away by which an example is known.
    text = re.sub(r"^art-patch .+$", r"```bash\n\g<0>\n```", text, flags=re.MULTILINE)
    return re.sub(r"\[/?(?:bold|italic|dim|red|green|yellow|cyan)\]", "", text).replace("<", "&lt;")


def settings() -> str:
    """Return one section for each field of `Settings`: its text, its variable, its option, its default."""
    from art_patch._lib.option import Option
    from art_patch.cli.typed_options import setting_texts
    from art_patch.settings import Settings, variable_of

    lines = [
        "# Settings",
        "",
        "This page is generated from `art_patch/settings.py`. A setting is an argument of `art.patch()` or of a",
        "command, else an `ART_PATCH_*` variable, else its default. An empty variable counts as unset. Lists in",
        "variables are separated by commas. `art-patch --env-file PATH COMMAND` reads variables from a file; no file",
        "is read otherwise.",
    ]
    for name, field in Settings.model_fields.items():
        default = "none" if field.default is None else f"`{field.default}`"
        mark = next((each for each in field.metadata if isinstance(each, Option)), None)
        option = f", option `--{mark.name or name.replace('_', '-')}`" if mark else ""
        lines += [
            "",
            f"## {name}",
            "",
            _plain(setting_texts()[name]),
            "",
            f"Variable `{variable_of(name)}`{option}, default {default}.",
        ]
    return "\n".join(lines) + "\n"


def error_codes() -> str:
    """Return the tree of errors, and the exit codes by number."""
    from art_patch import errors

    found = (each for each in vars(errors).values() if hasattr(each, "exit_code"))
    classes = sorted(found, key=lambda each: (each.exit_code, each.__name__))
    tree = (errors.__doc__ or "").partition("::\n")[2].partition("\n\nThe number")[0]
    rows = [_row("0", "", "Success. Having nothing to do is a success, too; so is a cycle that is out of time, not "
                 "idle, or waiting for approval or for a canary.")]  # fmt: skip
    rows += [
        _row(str(each.exit_code), f"`{each.__name__}`", _plain(each.__doc__.partition("\n\n")[0])) for each in classes
    ]
    rows.append(_row("130", "", "Ctrl-C. Recorded calls and published policies are kept."))
    notes = [
        "`art-patch run` ends with its program's own code. `art-patch doctor` ends with 1 if a finding is red.",
        "Code 4 has three causes: the gate, the canary test or the engine rejected the policy.",
        "Code 5 also means that another cycle took over from this one.",
    ]
    return "\n".join(
        [
            "# Errors and exit codes",
            "",
            "This page is generated from `art_patch/errors.py`. Every error message says what to do. None of these",
            "errors is raised inside a patched call: there, faults are counted and logged.",
            "",
            "```text",
            textwrap.dedent(tree).strip("\n"),
            "```",
            "",
            "| exit code | error | meaning |",
            "|---|---|---|",
            *rows,
            "",
            *notes,
            "",
        ]
    )


def python_api() -> str:
    """Return the public names of `art_patch` with their signatures and the beginning of their docstrings."""
    import art_patch

    lines = [
        "# Python API",
        "",
        "This page is generated from the package. `import art_patch as art` gives all names.",
    ]
    for name in art_patch.__all__:
        found: Any = getattr(art_patch, name)
        text = inspect.getdoc(found) or ""
        lines += ["", f"## {name}", "", *_signature(name, found), _docstring(text)]
    return "\n".join(lines) + "\n"


def _signature(name: str, found: Any) -> list[str]:
    if not callable(found):
        return []
    try:
        signature = inspect.signature(found)
    except (TypeError, ValueError):
        return []
    if hasattr(found, "model_fields"):  # pydantic spells out whole unions; the source names them
        written = {
            name: text for each in reversed(found.__mro__) for name, text in inspect.get_annotations(each).items()
        }
        plain = [
            each.replace(annotation=each.empty if str(text := written.get(name, "_")).startswith("_") else text)
            for name, each in signature.parameters.items()
        ]
        signature = signature.replace(parameters=plain)
    shown = str(signature).replace("art_patch.", "").replace("<factory>", "...")
    shown = re.sub(r"""(?<=[:>] )(["'])(.*?)\1(?=[,)]| =|$)""", r"\2", shown)  # annotations are strings
    # `Annotated[int, Option(...)]` marks an option of the command line; here its type alone is of interest.
    shown = re.sub(r"Annotated\[(.*?), \w+\(.*?\)\](?=,| =|\))", r"\1", shown)
    shown = re.sub(r"<class '(\w+)'>", r"\1", shown)
    shown = re.sub(r" at 0x[0-9a-f]+", "", shown)
    text = f"art.{name}{shown}"
    if len(text) > 80:
        inner = shown[1:].rpartition(")")
        text = f"art.{name}(\n    {', '.join(_split(inner[0]))}\n){inner[2]}".replace(", \n", ",\n")
    return ["```text", text, "```", ""]


def _split(arguments: str) -> list[str]:
    """Return the arguments, each on a line of its own; commas inside brackets do not separate."""
    parts, depth = [""], 0
    for character in arguments:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [parts[0].strip(), *(f"\n    {part.strip()}" for part in parts[1:])]


def _docstring(text: str) -> str:
    """Return the docstring as Markdown: sections become lists."""
    lines: list[str] = []
    for line in text.splitlines():
        if re.fullmatch(r"(Args|Attributes|Raises|Returns|Yields):", line):
            lines += [f"**{line[:-1]}**", ""]
        elif entry := re.match(r"    (\w+): (.*)", line):
            lines.append(f"- `{entry[1]}`: {entry[2]}")
        else:
            lines.append(line)
    return "\n".join(lines).replace("::\n", ":\n").replace("<", "&lt;")


def metrics() -> str:
    """Return the table of all metrics."""
    from art_patch.metrics import CATALOGUE

    rows = [
        _row(f"`{each.full}{'_total' * (each.kind == 'counter')}`", each.kind, ", ".join(each.labels), each.help)
        for each in CATALOGUE.values()
    ]
    return "\n".join([
        "# Metrics",
        "",
        "This page is generated from `art_patch/metrics/catalogue.py`. [Monitoring](../how-to/monitoring.md) says who",
        "exposes what. Each metric has the label `project`, too. Shares are 0 to 1, times are seconds.",
        "",
        _row("metric", "type", "labels", "meaning"),
        _row("---", "---", "---", "---"),
        *rows,
        "",
    ])  # fmt: skip


MAKERS: dict[str, Callable[[], str]] = {
    "cli": command_line,
    "settings": settings,
    "errors": error_codes,
    "python-api": python_api,
    "metrics": metrics,
}

if __name__ == "__main__":
    print(*pages().values(), sep="\n")
