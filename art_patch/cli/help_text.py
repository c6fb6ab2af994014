"""Writes the `--help` of a command as plain text, at the width of the terminal and at most 80 columns.

Rich's table, which Typer draws, cuts long names of options there, so that nobody can copy them, and breaks the lines of
a docstring once more.
"""

from typing import Any

from typer.core import TyperCommand


class PlainCommand(TyperCommand):
    """A command whose options stand below each other with their whole names, in the sections that they name."""

    def __init__(self, *args: Any, **given: Any) -> None:
        """Make the command as Typer does, without Rich's help."""
        super().__init__(*args, **given | {"rich_markup_mode": None})

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments, then each section of options."""
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for parameter in self.get_params(ctx):
            if (record := parameter.get_help_record(ctx)) is not None:
                usual = "Arguments" if parameter.param_type_name == "argument" else "Options"
                sections.setdefault(getattr(parameter, "rich_help_panel", None) or usual, []).append(record)
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)
