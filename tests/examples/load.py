"""The modules of an example, which import each other by bare names as files of one folder do."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

_EXAMPLES = Path(__file__).parents[2] / "examples"


def load(example: str, *modules: str) -> Any:
    """Import some of an example's modules; return a namespace with them.

    Nothing stays behind: another example's `agent` is another module, and the next `load` imports afresh.

    Args:
        example: name of its folder.
        modules: their names.
    """
    folder = _EXAMPLES / example
    own = {file.stem for file in folder.glob("*.py")}
    before = {name: sys.modules.pop(name) for name in own if name in sys.modules}
    sys.path.insert(0, str(folder))
    try:
        return SimpleNamespace(**{name: importlib.import_module(name) for name in modules})
    finally:
        sys.path.remove(str(folder))
        for name in own:
            sys.modules.pop(name, None)
        sys.modules.update(before)
