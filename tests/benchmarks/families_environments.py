"""Whether every extra can be installed, alone and with all others, at its oldest and its newest versions.

::

    python tests/benchmarks/families_environments.py [--json]

uv chooses the versions from the registry's metadata; nothing is installed. Minutes, with progress on stderr; with
`--json` one object of named metrics.

- `resolved`: resolutions that succeed, of `resolutions`: each extra and all together, at both ends.
- `unresolved`: what uv said of each other one.
- `oldest` and `newest`: what the extra `train` has at its ends.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.support.benchmark_report import Target, finish, say
from tests.support.environments import extras, resolve

TARGETS = (Target("share_resolved", 1, None, "of all extras, alone and together, at both ends"),)
ENDS = {"oldest": ("lowest-direct", "3.11"), "newest": ("highest", "3.13")}
SHOWN = ("accelerate", "peft", "safetensors", "torch", "transformers")


def main() -> None:
    """Resolve all, and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    as_json = parser.parse_args().json
    unresolved: dict[str, str] = {}
    shown: dict[str, dict[str, str]] = {}
    wanted = [*([name] for name in extras()), extras()]
    for end, (resolution, python) in ENDS.items():
        for names in wanted:
            what = f"{names[0] if len(names) == 1 else 'all'} {end}"
            versions, why_not = resolve(names, resolution, python)
            if not versions:
                unresolved[what] = why_not[-400:]
            if names == ["train"]:
                shown[end] = {name: versions.get(name, "") for name in SHOWN}
            say(f"{what}: {len(versions)} packages")
    count = len(wanted) * len(ENDS)
    resolved = count - len(unresolved)
    metrics = {"resolutions": count, "resolved": resolved, "share_resolved": resolved / count}
    finish({**metrics, "unresolved": unresolved, **shown}, TARGETS, as_json=as_json)


if __name__ == "__main__":
    main()
