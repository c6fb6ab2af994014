"""Policies whose updates are made again, each in a process of its own: the part `reproduce`."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from art_patch.demo.judge import STAND_IN_MODEL, serve_stand_in_judge
from art_patch.rewards import Judge
from art_patch.serving import EmbeddedEngine
from tests.support.benchmark_report import Target, say
from tests.support.command_line import ENVIRONMENT
from tests.support.cycles import TRAINING, Place, is_short, rewarded_traffic
from tests.support.engines import serve
from tests.support.tiny import make_tiny_model

TARGETS = (Target("reproduced", 10, None, "policies whose weights were the same again, to 1e-6"),)
UPDATES = 2  # of each project, of which the second starts from the first


def reproduce(policies: int, seed: int) -> dict[str, Any]:
    """Make this many policies, in projects of `UPDATES` policies each, and make each of them again."""
    with tempfile.TemporaryDirectory() as place:
        home = Path(place)
        base = make_tiny_model(home / "base")
        projects = {f"p{number}": seed + number for number in range(-(-policies // UPDATES))}
        made = [(name, policy) for name, own in projects.items() for policy in train(home / name, base, own)]
        found: list[dict[str, Any]] = []
        for project, policy in made[:policies]:
            told = again(home, policy, "--project", project)
            say(f"{project} {policy}: {told['why_not'] or told['largest_difference']}")
            found.append(told)
    largest = [each["largest_difference"] for each in found if each["largest_difference"] is not None]
    return {
        "policies": len(found),
        "reproduced": sum(each["equal"] is True for each in found),
        "not_made": sum(each["equal"] is None for each in found),
        "largest_difference": max(largest, default=0.0),
        "seconds_most": max(each["took_s"] for each in found),
    }


def train(directory: Path, base: Path, seed: int) -> Sequence[str]:
    """Make a project of `UPDATES` policies, with other traffic and another seed than others."""
    directory.mkdir()
    engine = EmbeddedEngine.from_pretrained(base, adapters_root=directory / "adapters")
    config = replace(TRAINING, train=replace(TRAINING.train, seed=seed))
    with serve_stand_in_judge(is_short) as url, serve(engine) as running:
        judge, made = Judge(STAND_IN_MODEL, base_url=url, api_key="none"), list[str]()
        here = Place(directory, base, running.client)
        with closing(here.store):
            for update in range(UPDATES):
                rewarded_traffic(here, here.champion or "agent@0", seed=UPDATES * seed + update)
                report = here.cycle(judge, config)
                if report.candidate is None:
                    raise SystemExit(f"no policy was made: {report.reason}")
                made.append(report.candidate)
        return made


def again(home: Path, policy: str, *options: str) -> dict[str, Any]:
    """What `art-patch reproduce` says in a new process."""
    command = [sys.executable, "-m", "art_patch", "reproduce", policy, "--json", *options]
    environment = ENVIRONMENT | {"ART_PATCH_HOME": str(home)}
    told = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if not told.stdout:
        raise SystemExit(told.stderr)
    return json.loads(told.stdout)
