"""What the README says is true."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from art_patch import errors

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS)
def test_python_blocks_run(block: str, tmp_path: Path):
    environment = {"ART_PATCH_HOME": str(tmp_path), "PATH": "", "PYTHONWARNINGS": "error"}
    script = tmp_path / "agent.py"
    script.write_text(block + "\nart.unpatch()\n")
    subprocess.run([sys.executable, str(script)], check=True, env=environment, timeout=60)


def test_there_are_blocks():
    assert len(BLOCKS) >= 2


def test_every_command_is_there():
    from art_patch.cli.app import app

    names = {each.name or each.callback.__name__ for each in app.registered_commands if each.callback}
    names |= {group.name or group.typer_instance.info.name for group in app.registered_groups if group.typer_instance}
    line = next(line for line in README.splitlines() if line.startswith("`serve`"))
    assert set(re.findall(r"`(\w+)`", line)) == names


def test_every_exit_code_is_explained():
    table = README[README.index("| exit code |") :]
    codes = {int(code) for row in re.findall(r"^\| ([\d, ]+) \|", table, re.MULTILINE) for code in row.split(",")}
    raised = {getattr(errors, name).exit_code for name in errors.__all__} - {1}
    assert codes == raised | {0, 130}


def test_links_lead_somewhere():
    headings = {re.sub(r"\W+", "-", line.strip("# ").lower()) for line in re.findall(r"^#+ .*", README, re.MULTILINE)}
    for target in re.findall(r"\]\(([^)]+)\)", README):
        known = target.removeprefix("#") in headings if target.startswith("#") else (ROOT / target).exists()
        assert target.startswith("http") or known, target
