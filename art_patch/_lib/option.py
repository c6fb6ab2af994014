"""Marks a dataclass field as a command line option without importing Typer; `art_patch.cli.options` reads the mark."""

from dataclasses import KW_ONLY, dataclass


@dataclass(frozen=True, slots=True)
class Option:
    """Makes a dataclass field, with its name, type and default, an option: `seed: Annotated[int, Option(...)] = 0`."""

    # A field of `Settings` leaves it empty; the first sentence of the docstring below the field is then used.
    help: str = ""
    _: KW_ONLY
    name: str = ""  # without leading dashes, if it differs from the field's name
    also: tuple[str, ...] = ()  # additional names, such as `-n`
    off: str = ""  # the option that sets a boolean field to false, such as `--public`
    least: float | None = None
    most: float | None = None
    env: bool | str = False  # the variable that is read if the option is not given; `True`: `ART_PATCH_<NAME>`
    metavar: str | None = None  # placeholder for the value in `--help`
    or_none: bool = False  # whether a number may be the word `none`, where that is not the default
