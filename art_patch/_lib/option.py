"""The mark that makes a dataclass field an option of the command line; `art_patch.cli.options` reads it.

It lies here so that configuration records can carry it without importing Typer.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """Makes a field an option, as in `seed: Annotated[int, Option(help="Seed of a new LoRA.", least=0)] = 0`.

    Type and default are those of the field, and its name is the option's name.

    Attributes:
        help: text for `--help`. Fields of `Settings` leave it out: their help is the first sentence below the field.
        name: name of the option, without dashes in front, where it differs from the field's name.
        also: further names of the option, such as `-n`.
        off: name of the option that sets a boolean to false, such as `--public`.
        least: smallest value that is accepted.
        most: largest value that is accepted.
        env: environment variable that is read if the option is not given; `True` stands for `ART_PATCH_<NAME>`.
        metavar: placeholder for the value in `--help`.
    """

    help: str = ""
    name: str = ""
    also: tuple[str, ...] = ()
    off: str = ""
    least: float | None = None
    most: float | None = None
    env: bool | str = False
    metavar: str | None = None
