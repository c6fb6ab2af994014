"""`policies import`: what comes from staging is a candidate that serves nobody before a test, and what is refused."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from art_patch.pipeline.carry_over import sweep_leftovers, untested_candidate
from art_patch.policies import CONFIG, MANIFEST, WEIGHTS, base_fingerprint
from art_patch.store import Store, open_store
from art_patch.types import Policy
from tests.benchmarks.families_start import LORAS, make_lora
from tests.support.command_line import Serving, art_patch, says
from tests.support.tiny import make_tiny_adapter, make_tiny_model

GATE = {
    "candidate": 0.75, "champion": 0.5, "lower_bound": 0.125, "scenarios": 12, "judge": "openai/judge", "rubric": "r1",
    "config": {"level": 0.95}, "checks": [{"name": "check of eve@example.org", "passed": True}],
    "lost": ["task: the plums of eve@example.org"],
}  # fmt: skip
WATCH = {
    "verdict": "promote", "hours": 2.0,
    "signals": {"thumbs": {"challenger": 0.75, "champion": 0.25, "compared": 40, "says": "eve@example.org"}},
}  # fmt: skip
SLOW = {"latency_ms": {"challenger": 1234.5, "champion": 9.0, "compared": 4}}
METRICS: dict[str, Any] = {
    "train": {
        "config": {"learning_rate": 0.5, "seed": 7, "loss": {"loss": "dapo"}},
        "loss": 0.25,
        "groups": 3,
        "computed_tokens": 14_267,
        "pairs": 0,
        "round_trips": {"first": "eve@example.org asked for plums"},
    },
    "made": {"art_patch": "0.1.0", "judges": [{"judge": "openai/judge", "rubric": "r1"}]},
    "gate": GATE,
    "watch": WATCH,
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "base", hidden=32, vocab_size=320)


NUMBERS = {"loss": 0.25, "groups": 3, "computed_tokens": 14_267, "pairs": 0}


def project(home: Path, base: Path) -> Store:
    store = open_store(f"sqlite:///{home}/default/store.db")
    store.ledger.add_base("agent@0", str(base), base_fingerprint(base), who="test")
    return store


@pytest.fixture
def copy(tmp_path: Path, base: Path) -> Path:
    """What `policies export` wrote in staging, of a champion that a person there liked."""
    home = tmp_path / "staging"
    path = make_tiny_adapter(home / "default" / "adapters", base, "agent", 3)
    with closing(project(home, base)) as store:
        fingerprint = base_fingerprint(base)
        policy = Policy("agent@3", str(base), fingerprint, "candidate", time.time(), str(path), "agent@2", METRICS)
        store.ledger.add_candidate(policy, trained_on=[], who="eve@example.org")
        store.ledger.move("agent@3", "champion", who="eve@example.org", reason="eve@example.org liked it")
    done = art_patch("policies", "export", "agent@3", tmp_path / "copy", home=home)
    assert done.returncode == 0, done.stderr
    return tmp_path / "copy"


@pytest.fixture
def home(tmp_path: Path, base: Path) -> Iterator[Path]:
    """A project in production, whose base serves."""
    with closing(project(tmp_path / "production", base)) as store:
        yield tmp_path / "production"
        assert store.verify() == []


def imported(home: Path, *arguments: str | Path) -> dict[str, Any]:
    done = art_patch("policies", "import", *arguments, "--json", home=home)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_policy_comes_with_its_evidence_and_serves_nobody(copy: Path, home: Path):
    told = imported(home, copy)
    assert (told["policy"], told["state"], told["loaded"]) == ("agent@3", "candidate", False)
    evidence = told["evidence"]
    assert evidence["gate"] == {
        "candidate": 0.75, "champion": 0.5, "lower_bound": 0.125, "level": 0.95, "scenarios": 12,
        "judge": "openai/judge", "rubric": "r1", "checks": 1, "checks_failed": 0,
    }  # fmt: skip
    thumbs = {"challenger": 0.75, "champion": 0.25, "compared": 40}
    assert evidence["watch"] == {"verdict": "promote", "hours": 2.0, "signals": {"thumbs": thumbs}}
    assert (evidence["parent"], evidence["state"], evidence["art_patch"]) == ("agent@2", "champion", "0.1.0")
    assert (evidence["train"], evidence["settings"]["seed"]) == (NUMBERS, 7)
    # No person, no text, no path of staging.
    for path in (copy / MANIFEST, home / "default" / "adapters" / "agent@3" / MANIFEST):
        assert not [word for word in ("eve@", "plums", str(copy.parent / "staging")) if word in path.read_text()]
    theirs, ours = (load_file(each / WEIGHTS) for each in (copy, home / "default" / "adapters" / "agent@3"))
    assert all((theirs[name] == ours[name]).all() for name in theirs)
    says(art_patch("promote", "agent@3", home=home), 14, "was imported", "agent@3 --canary 5")
    with closing(open_store(f"sqlite:///{home}/default/store.db")) as store:
        champion = store.ledger.champion()
        assert champion is not None and champion.name == "agent@0"
        assert [move["reason"] for move in store.ledger.history(policy="agent@3")] == [
            "imported, agent@3 where it comes from"
        ]
    # A second copy of it gets the next step, and says the same of itself; so does a copy of the copy.
    again = imported(home, copy)
    assert (again["policy"], again["evidence"]) == ("agent@4", evidence)
    art_patch("policies", "export", "agent@4", home / "second", home=home)
    third = imported(home, home / "second")
    assert (third["policy"], third["evidence"]) == ("agent@5", evidence | {"state": "candidate"})


@pytest.mark.parametrize(
    ("metrics", "by", "words"),
    [
        (
            {"gate": GATE | {"candidate": 0.46875, "champion": 0.509, "lower_bound": -0.0351, "checks": []}},
            "gate", "by its gate: 0.469 against 0.509, difference above -0.035, 12 scenarios",
        ),
        (
            {"gate": GATE | {"checks": [{"name": "eve@example.org", "passed": False}]}},
            "gate", "by its gate: 0.750 against 0.500, difference above +0.125, 12 scenarios, 1 of 1 checks failed",
        ),
        (
            {"gate": GATE, "watch": {"verdict": "roll back", "hours": 2, "signals": SLOW}},
            "canary test", "by its canary test: roll back after 2 h; latency 1,234 ms against 9 ms",
        ),
        ({"gate": GATE}, "decision", "by a person, or because the champion changed while it was tested"),
    ],
)  # fmt: skip
def test_that_it_was_rejected_where_it_comes_from_is_said_loudly(
    tmp_path: Path, base: Path, home: Path, metrics: dict[str, Any], by: str, words: str
):
    staging = tmp_path / "staging"
    path = make_tiny_adapter(staging / "default" / "adapters", base, "agent", 3)
    with closing(project(staging, base)) as store:
        policy = Policy("agent@3", str(base), base_fingerprint(base), "candidate", 1.0, str(path), "agent@0", metrics)
        store.ledger.add_candidate(policy, trained_on=[], who="eve@example.org")
        store.ledger.move("agent@3", "rejected", who="eve@example.org", reason="eve@example.org did not like it")
    assert art_patch("policies", "export", "agent@3", tmp_path / "copy", home=staging).returncode == 0
    manifest = (tmp_path / "copy" / MANIFEST).read_text()
    assert ("eve@" in manifest, json.loads(manifest)["evidence"]["rejected_by"]) == (False, by)
    loud = f"careful: agent@3 was rejected where it comes from, {words}\n"
    assert loud in art_patch("policies", "import", tmp_path / "copy", home=home).stderr
    told = imported(home, tmp_path / "copy")
    assert (told["policy"], told["state"], told["rejected_there"]) == ("agent@4", "candidate", words)
    shown = art_patch("policies", "show", "agent@3", home=home, COLUMNS="80").stdout
    assert f"rejected there, {words}" in " ".join(shown.split())
    assert "imported, agent@3 where it comes from, and rejected there" in " ".join(shown.split())
    listed = " ".join(art_patch("policies", home=home, COLUMNS="80").stdout.split())
    assert f"imported 0 s ago rejected where it comes from, {words}" in re.sub(r"\d+ s ago", "0 s ago", listed)
    # A copy of the copy still says so, although it is a candidate here.
    assert art_patch("policies", "export", "agent@4", home / "second", home=home).returncode == 0
    assert imported(home, home / "second")["rejected_there"] == words


def test_it_reads_well_in_80_columns(copy: Path, home: Path):
    sha256 = json.loads(art_patch("policies", "import", copy, "--json", home=home).stdout)["manifest_sha256"]
    shown = art_patch("policies", "show", "agent@3", home=home, COLUMNS="80").stdout
    assert max(map(len, shown.splitlines())) <= 80
    flat = " ".join(shown.split())
    for words in (
        "agent@3 candidate", "from agent@3, where it was champion", sha256, "with art_patch 0.1.0",
        "agent@2 there, none here", "openai/judge, rubric r1", "learning_rate 0.5", "training from: groups 3",
        "update: loss 0.25 cost: computed tokens 14,267 gate there", "0.750 against 0.500",
        "promote after 2 h; thumbs 0.750 against 0.250", "new -> candidate",
    ):  # fmt: skip
        assert words in flat
    assert " imported " in art_patch("policies", home=home).stdout
    cannot = art_patch("reproduce", "agent@3", home=home)
    assert (cannot.returncode, "it was imported" in cannot.stdout) == (20, True)


def test_a_copy_that_is_not_as_it_was_or_does_not_fit_is_refused(
    copy: Path, home: Path, base: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
):
    def refused(words: str, *options: str, code: int = 11, **changes: Any) -> None:
        says(art_patch("policies", "import", copy, *options, home=home), code, words)

    exported = copy.parent / "exported"
    shutil.copytree(copy, exported)

    def restored() -> None:
        shutil.rmtree(copy)
        shutil.copytree(exported, copy)

    refused("it is another copy", "--sha256", "00" * 32)
    refused("named agent@STEP", "--name", "shop@1", code=2)
    refused("from 1 to 999999", "--name", "agent@999999999", code=2)  # no name would be left for the next policy
    refused("exists already", "--name", "agent@0", code=2)
    refused("is not a policy name", "--name", "../agent@1")
    weights = copy / WEIGHTS
    weights.write_bytes(weights.read_bytes()[:-1] + b"?")
    refused("sha256 differs")
    restored()
    (copy / "pytorch_model.bin").write_bytes(b"pickle")
    refused("may run code when read")
    restored()
    weights.rename(tmp_path / "elsewhere")
    weights.symlink_to(tmp_path / "elsewhere")
    refused("is a symbolic link")
    restored()
    manifest = json.loads((copy / MANIFEST).read_text())
    (copy / MANIFEST).write_text(json.dumps(manifest | {"evidence": {"policy": 3}}))
    refused("the evidence in MANIFEST.json cannot be read (policy:")
    (copy / MANIFEST).write_text(json.dumps(manifest | {"base_sha256": "ff" * 32}))
    refused("was trained on another base")
    (copy / MANIFEST).unlink()
    (copy / WEIGHTS).unlink()
    refused("so it is neither a policy's copy nor a LoRA of PEFT")
    restored()
    with closing(open_store(f"sqlite:///{home}/default/store.db")) as store:
        assert [policy.name for policy in store.ledger.policies()] == ["agent@0"]
    assert not list((home / "default").glob("adapters/*")) and not list((home / "default").glob("adapters/.*"))
    # A project that nothing was served in has no base to compare with.
    empty = tmp_path / "empty"
    open_store(f"sqlite:///{empty}/default/store.db").close()
    says(art_patch("policies", "import", copy, home=empty), 19, "there is no base model")


def test_the_directory_of_an_adapter_is_taken_too_without_a_test_on_record(copy: Path, home: Path):
    adapter = copy.parent / "staging" / "default" / "adapters" / "agent@3"
    config = json.loads((adapter / CONFIG).read_text())
    told = imported(home, adapter, "--name", "agent@12")
    assert (told["policy"], told["evidence"]["policy"]) == ("agent@12", "agent@3")
    assert (told["rejected_there"], {"state", "gate", "watch"} & told["evidence"].keys()) == (None, set())
    here = json.loads((home / "default" / "adapters" / "agent@12" / CONFIG).read_text())
    assert here["r"] == config["r"]
    assert here["base_model_name_or_path"].endswith("/base")


def test_a_plain_lora_is_adopted_and_a_server_computes_what_peft_computed(home: Path, base: Path, tmp_path: Path):
    lora = make_lora(tmp_path / "my-lora", base, LORAS["ranks and scales of its own"])
    (lora / "tokenizer.json").write_text("{}")  # trainers write more beside it, which is not read
    sha256 = hashlib.sha256((lora / WEIGHTS).read_bytes()).hexdigest()
    server = Serving(base, home, "--threads", "1")
    try:
        told = imported(home, lora, "--sha256", sha256)
        assert (told["policy"], told["rank"], told["loaded"], told["weights_sha256"]) == ("agent@1", 12, True, sha256)
        assert (told["evidence"]["policy"], "manifest_sha256" in told) == ("my-lora", False)
        shown = art_patch("policies", "import", lora, home=home).stdout
        assert "agent@2 is a candidate, my-lora where it comes from; the engine can load it" in shown
        assert "on which base it was trained is not on record" in shown
        assert f"its weights have the sha256 {sha256}" in art_patch("policies", "show", "agent@1", home=home).stdout
    finally:
        server.stop()
    # What it computes is no longer what PEFT computed.
    manifest = home / "default" / "adapters" / "agent@2" / MANIFEST
    facts = json.loads(manifest.read_text())
    assert facts["probe"]["dtype"] == "float32"
    facts["probe"]["logprobs"] = [value - 0.1 for value in facts["probe"]["logprobs"]]
    manifest.write_text(json.dumps(facts))
    server = Serving(base, home, "--threads", "1")
    try:
        says(art_patch("promote", "agent@2", "--canary", "5", home=home), 11, "nats from the trainer's")
    finally:
        server.stop()


def test_a_server_tries_it_and_a_canary_tests_it(copy: Path, home: Path, base: Path):
    server = Serving(base, home, "--threads", "1", "--max-lora-rank", "1")
    try:
        says(art_patch("policies", "import", copy, home=home), 11, "this engine serves ranks 1 to 1")
        assert not (home / "default" / "adapters" / "agent@3").exists()
    finally:
        server.stop()
    server = Serving(base, home, "--threads", "1")
    try:
        assert imported(home, copy)["loaded"]
        says(art_patch("promote", "agent@3", home=home), 14, "no test of this project has seen it")
        assert art_patch("promote", "agent@3", "--canary", "5", home=home).returncode == 0
        with closing(open_store(f"sqlite:///{home}/default/store.db")) as store:
            route = store.ledger.route()
            assert (route.champion, route.challenger, route.challenger_percent) == ("agent@0", "agent@3", 5.0)
    finally:
        server.stop()


def test_no_cycle_rejects_it_or_tests_it_unasked(copy: Path, home: Path):
    imported(home, copy)
    with closing(open_store(f"sqlite:///{home}/default/store.db")) as store:
        champion = store.ledger.champion()
        assert champion is not None

        class Engine:
            def models(self) -> list[str]:
                return []

        run: Any = type("Run", (), {"store": store, "adapters": home / "default" / "adapters", "engine": Engine()})()
        sweep_leftovers(run, champion)
        assert untested_candidate(run, replace(champion, name="agent@0")) is None
        found = store.ledger.policy("agent@3")
        assert found is not None and found.state == "candidate"
