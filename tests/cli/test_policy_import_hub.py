"""`policies import OWNER/NAME` over real HTTP, from a stand-in for the hub that huggingface_hub's own client asks."""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from art_patch.policies import CONFIG, WEIGHTS
from art_patch.store import open_store
from tests.benchmarks.families_start import LORAS, make_base, make_lora, make_project
from tests.support.command_line import art_patch, says
from tests.support.hub_stand_in import COMMIT, StandInHub, serve_stand_in_hub

pytestmark = pytest.mark.slow  # each command imports huggingface_hub anew


@pytest.fixture
def hub() -> Iterator[StandInHub]:
    with serve_stand_in_hub() as hub:
        yield hub


@pytest.fixture
def home(tmp_path: Path) -> Path:
    make_project(tmp_path / "home", make_base(tmp_path / "base"))
    return tmp_path / "home"


def imported(hub: StandInHub | str, home: Path, named: str, *options: str) -> subprocess.CompletedProcess[str]:
    url = hub if isinstance(hub, str) else hub.url
    own = {"HF_ENDPOINT": url, "HF_HOME": str(home / "hf"), "HF_HUB_OFFLINE": "", "HF_TOKEN": ""}
    return art_patch("policies", "import", named, *options, home=home, **own)


def test_a_lora_comes_from_the_hub_without_its_pickles(hub: StandInHub, home: Path, tmp_path: Path):
    lora = make_lora(tmp_path / "lora", tmp_path / "base", LORAS["one block"])
    files = {path.name: path.read_bytes() for path in lora.iterdir()} | {"training_args.bin": b"pickle"}
    hub.repositories["me/my-lora"], hub.private["me/my-lora"] = files, False
    sha256 = hashlib.sha256(files[WEIGHTS]).hexdigest()
    for named in ("me/my-lora", "me/my-lora@main", f"me/my-lora@{COMMIT}"):
        done = imported(hub, home, named, "--json")
        assert done.returncode == 0, done.stderr
        told = json.loads(done.stdout)
        assert (told["state"], told["weights_sha256"], told["evidence"]["policy"]) == ("candidate", sha256, "my-lora")
        assert done.stderr == ""
    asked = {line.rpartition("/")[2] for line in hub.requests if line.startswith("GET") and "/resolve/" in line}
    assert asked == {CONFIG, WEIGHTS}


def test_why_a_repository_cannot_be_had_is_told_in_a_line(hub: StandInHub, home: Path):
    hub.repositories["me/open"], hub.private["me/open"] = {"README.md": b"x"}, False
    hub.repositories["me/closed"], hub.private["me/closed"] = {}, True
    hub.repositories["me/gated"] = {}
    hub.gated.add("me/gated")
    says(imported(hub, home, "me/gone"), 16, f"{hub.url} shows you no me/gone; check the name", "hf auth login")
    says(imported(hub, home, "me/closed"), 16, "shows you no me/closed")
    says(imported(hub, home, "me/gated"), 16, f"let nobody in unasked: ask at {hub.url}/me/gated")
    says(imported(hub, home, "me/open@v9"), 16, "has no revision 'v9'; give a branch")
    says(imported(hub, home, "me/open"), 11, "me/open has no adapter_model.safetensors")
    says(imported("http://127.0.0.1:9", home, "me/open"), 16, "http://127.0.0.1:9 cannot be asked", "nothing was imp")
    hub.fails = "/revision/main"
    says(imported(hub, home, "me/open"), 16, f"{hub.url} answered 400")
    with closing(open_store(f"sqlite:///{home}/default/store.db")) as store:
        assert [policy.name for policy in store.ledger.policies()] == ["agent@0", "agent@1"]
    assert [path.name for path in (home / "default" / "adapters").iterdir()] == ["agent@1"]
