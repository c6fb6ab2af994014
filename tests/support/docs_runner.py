"""Run a program of the documentation: `docs_runner.py PROGRAM CONSTANTS`, the latter names and values as JSON.

Every function that the program defines must run, coroutine functions included. A function that is only defined ends
this process with exit code 1. Where the program assigns one of the constants (sizes, the base model), it gets the
given value.
"""

from __future__ import annotations

import ast
import json
import sys
import threading
import types
from pathlib import Path


def main(path: str, constants: dict[str, object]) -> None:
    """Run the program as `__main__`."""
    code = Path(path).read_text()
    ran: set[tuple[str, int]] = set()

    def saw(frame: types.FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename == path:
            ran.add((frame.f_code.co_name, frame.f_code.co_firstlineno))

    tree = ast.parse(code, path)
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(target := node.targets[0], ast.Name) and target.id in constants:
            node.value = ast.copy_location(ast.Constant(constants[target.id]), node.value)  # type: ignore[arg-type]
    # A decorator's line is the first line of the function that it decorates.
    defined = {
        (node.name, min(each.lineno for each in (node, *node.decorator_list)))
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    program = types.ModuleType("__main__")
    program.__file__ = path
    sys.modules["__main__"] = program
    sys.path.insert(0, str(Path(path).parent))
    threading.setprofile(saw)
    sys.setprofile(saw)
    exec(compile(ast.fix_missing_locations(tree), path, "exec"), program.__dict__)
    sys.setprofile(None)
    threading.setprofile(None)
    program.__dict__["art"].unpatch()
    if never := sorted(defined - ran):
        sys.exit(f"defined and never run: {never}")


main(sys.argv[1], json.loads(sys.argv[2]))
