"""The oldest packages that the extra `train` admits, in an environment of their own: bases that are newer are told."""

from __future__ import annotations

import subprocess
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from art_patch.policies import base_fingerprint
from art_patch.store import open_store
from tests.support.apps import FULL
from tests.support.command_line import ENVIRONMENT, says
from tests.support.environments import environment
from tests.support.real_bases import make_base

OLDEST = ["torch==2.9.0", "transformers==5.0.0", "peft==0.18.0", "accelerate==1.10.0", "safetensors>=0.6"]
SERVING = ["aiohttp", "llguidance>=1.9", "prometheus-client", "httptools", "starlette", "uvicorn", "uvloop"]

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not FULL, reason="ART_PATCH_FULL=1 installs torch 2.9")]


@pytest.fixture(scope="module")
def python() -> Path:
    return environment("oldest", [*OLDEST, *SERVING])


@pytest.mark.parametrize(
    ("name", "since"), [("Qwen 3.5", "5.2"), ("Llama 4", "5.2"), ("Gemma 4", "5.5")], ids=lambda value: value
)
def test_a_base_that_transformers_is_too_old_for_is_told_by_each_command(
    python: Path, tmp_path: Path, name: str, since: str
):
    base = make_base(name, tmp_path / "base")
    with closing(open_store(f"sqlite:///{tmp_path}/home/default/store.db", project="default")) as store:
        store.ledger.add_base("agent@0", str(base), base_fingerprint(base), who="test")
    (file := tmp_path / "chat.jsonl").write_text(
        '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'
    )
    words = f"cannot be used: the transformers that is installed (5.0.0) does not compute {name.lower().split()[0]}"
    words = words.replace("qwen", "qwen3_5").replace("llama", "llama4").replace("gemma", "gemma4")

    def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
        line: list[Any] = [python, "-m", "art_patch", *arguments, "--home", tmp_path / "home"]
        return subprocess.run(line, env=ENVIRONMENT, capture_output=True, text=True, timeout=120)

    cure = f"pip install 'transformers>={since}'"
    says(run("serve", "--base", base, "--port", "0"), 2, words, cure)
    says(run("doctor", "--base", base, "--gpu-memory", "24"), 2, words, cure)
    says(run("train", file), 2, words, cure)
    assert words in " ".join(run("doctor").stdout.split())
