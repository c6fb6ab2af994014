"""Makes command-line options from dataclasses: each option is defined once, as a field of a dataclass.

A command is a function whose parameters are dataclasses, arguments of Typer, or values marked with `Option`.
"""

import ast
import inspect
import re
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import MISSING, fields, is_dataclass, replace
from functools import cache, wraps
from typing import Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints

import typer

from art_patch import settings
from art_patch._lib.option import Option
from art_patch.cli.output import interrupted
from art_patch.errors import ConfigError

_BUILT = "__arguments__"  # attribute of a command: what makes its function's arguments of options


class Only(NamedTuple):
    """Makes only the named fields of a dataclass into options: `cycle: Annotated[CycleConfig, Only(("settle_s",))]`."""

    names: tuple[str, ...]


def command(function: Callable[..., None]) -> Callable[..., None]:
    """Return a command for Typer, with an option for each marked field of the dataclasses that `function` takes.

    The returned function builds the dataclasses, calls `function`, and turns Ctrl-C into one line and exit code 130.
    Python code may call it with the options as keyword arguments; options that are left out get their defaults.
    """
    parameters: dict[str, inspect.Parameter] = {}
    records: dict[str, tuple[type, dict[str, str]]] = {}
    hints = get_type_hints(function, include_extras=True)
    for name, parameter in inspect.signature(function).parameters.items():
        record, *marks = get_args(hints[name]) if get_origin(hints[name]) is Annotated else (hints[name],)
        if not (isinstance(record, type) and is_dataclass(record)):
            parameters[name] = _parameter(name, hints[name], parameter.default)
            continue
        records[name] = record, {}
        only = next((mark.names for mark in marks if isinstance(mark, Only)), None)
        for field, hint, mark, default in marked_fields(record):
            if only is not None and field not in only:
                continue
            # Two records may have a field of one name, such as `samples`; the options' names differ.
            key = mark.name.replace("-", "_") if field in parameters else field
            parameters[key] = _parameter(key, hint, default, panel=getattr(record, "PANEL", None))
            records[name][1][key] = field
    # Python wants parameters without a default first; the sort is stable, so that `--help` keeps our order.
    ordered = sorted(parameters.values(), key=lambda one: one.default is not inspect.Parameter.empty)
    signature = inspect.Signature(ordered)

    def built(*args: Any, **given: Any) -> dict[str, Any]:
        bound = signature.bind(*args, **given)
        # Typer gives every option; Python code that calls the command leaves most of them out.
        bound.apply_defaults()
        values = bound.arguments
        for name, (record, keys) in records.items():
            values[name] = record(**{field: values.pop(key) for key, field in keys.items()})
        return values

    @wraps(function)
    def run(*args: Any, **given: Any) -> None:
        values = built(*args, **given)
        try:
            with ExitStack() as stack:
                for name in records:  # such as the log, which is written while the command runs
                    if isinstance(values[name], AbstractContextManager):
                        stack.enter_context(values[name])
                function(**values)
        except KeyboardInterrupt:
            # Typer would end the process without a word.
            raise typer.Exit(interrupted()) from None

    # Typer reads the signature and the annotations of what `__wrapped__` names, if that is there.
    del run.__wrapped__
    vars(run)["__signature__"] = signature
    vars(run)[_BUILT] = built
    run.__annotations__ = {one.name: one.annotation for one in ordered}
    return run


def arguments_of(function: Callable[..., None], given: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that a command would get from these options; its dataclasses check their values."""
    return vars(function)[_BUILT](**given)


@cache
def marked_fields(record: type) -> tuple[tuple[str, Any, Option, Any], ...]:
    """Return the name, type, `Option` and default of each field of a dataclass that is marked with an `Option`."""
    found: list[tuple[str, Any, Option, Any]] = []
    for field in fields(record):
        # Field by field, and not with `get_type_hints`: types of fields that are no options may not be imported here.
        base = next(each for each in record.__mro__ if field.name in vars(each).get("__annotations__", ()))
        hint: Any = field.type
        if isinstance(hint, str) and hint.startswith("Annotated["):
            hint = eval(hint, vars(sys.modules[base.__module__]))
        if (mark := _mark(hint)) is not None:
            mark = replace(mark, help=mark.help or _attribute_help(record, field.name))
            hint = Annotated[get_args(hint)[0], mark]
            default = inspect.Parameter.empty if field.default is MISSING else field.default
            found.append((field.name, hint, mark, default))
    return tuple(found)


def _attribute_help(record: type, field: str) -> str:
    """Return what the section `Attributes` of a dataclass's docstring says first about a field; empty without it."""
    found = re.search(rf"^    {field}: (.+(?:\n {{8}}.+)*)", inspect.getdoc(record) or "", re.MULTILINE)
    return _first_sentence(found[1]) if found else ""


def _first_sentence(text: str) -> str:
    # What follows is for the reference documentation, which has more room.
    return " ".join(text.split()).partition(". ")[0].rstrip(".") + "."


def _mark(hint: Any) -> Option | None:
    marks = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
    return next((mark for mark in marks if isinstance(mark, Option)), None)


def _parameter(key: str, hint: Any, default: Any, panel: str | None = None) -> inspect.Parameter:
    """Return the parameter as Typer reads it; without a mark of ours it is Typer's already, such as an argument."""
    if (mark := _mark(hint)) is not None:
        name = mark.name or key.replace("_", "-")
        variable = f"{settings.PREFIX}{name.replace('-', '_').upper()}" if mark.env is True else mark.env or None
        # Always with an explicit name: Typer would add a `--no-...` to each boolean without one.
        option = typer.Option(
            f"--{name}/{mark.off}" if mark.off else f"--{name}", *mark.also, help=mark.help, envvar=variable,
            min=mark.least, max=mark.most, rich_help_panel=panel,
            metavar="NUMBER|none" if mark.or_none else mark.metavar, parser=_number_or_none if mark.or_none else None,
        )  # fmt: skip
        hint = Annotated[get_args(hint)[0], option]
    return inspect.Parameter(key, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=hint)


def _number_or_none(value: Any) -> float | None:
    if value is None or str(value).lower() == "none":
        return None
    try:
        return float(value)
    except ValueError:
        raise typer.BadParameter(f"{value!r} is neither a number nor `none`") from None


def setting(field: str) -> Option:
    """Return the `Option` of a field of `Settings`; its help is the first sentence of the field's docstring."""
    mark = next(each for each in settings.Settings.model_fields[field].metadata if isinstance(each, Option))
    return replace(mark, help=_first_sentence(setting_texts()[field]), name=mark.name or field.replace("_", "-"))


@cache
def setting_texts() -> dict[str, str]:
    """Return the docstring below each field of `Settings`, read from the source, because Python does not keep it."""
    tree = ast.parse(inspect.getsource(settings))
    (found,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Settings"]
    texts: dict[str, str] = {}
    for field, below in zip(found.body, found.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(below, ast.Expr):
            texts[field.target.id] = inspect.cleandoc(str(ast.literal_eval(below.value)))
    return texts


def is_before_subcommand(context: Any) -> bool:
    """Return whether Typer runs a command that is a group, too, because one of its subcommands follows.

    `ConfigError` if options stand before the subcommand's name: Typer would drop them silently.
    """
    if (words := context.invoked_subcommand) is None:
        return False
    if any(given_on_the_command_line(context, name) for name in context.params):
        whole = f"{context.command_path} {words}"
        raise ConfigError(f"options of `{whole}` go behind its name; there are some before it")
    return True


def variables_of(command: Any) -> set[str]:
    """Return the environment variables of a command's options, or of those of all commands of a group."""
    named = {str(parameter.envvar) for parameter in command.params if parameter.envvar}
    return named.union(*(variables_of(each) for each in getattr(command, "commands", {}).values()))


def given_on_the_command_line(context: Any, name: str) -> bool:
    """Return whether the user typed the option, given its Typer context; a variable or the default does not count."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"
