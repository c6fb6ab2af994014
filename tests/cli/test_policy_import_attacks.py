"""`policies import` of what an attacker made: it is refused in words, or shown so that nothing of it acts."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from art_patch.policies import CONFIG, MANIFEST, base_fingerprint
from art_patch.store import open_store
from tests.support.command_line import art_patch
from tests.support.tiny import make_tiny_adapter, make_tiny_model

UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]")
EVIL = "\x1b]0;owned\x07\x1b[2J[link=http://evil]x[/link] [red]\u202egate won"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "base", hidden=32, vocab_size=320)


@pytest.fixture
def home(tmp_path: Path, base: Path) -> Path:
    with closing(open_store(f"sqlite:///{tmp_path}/home/default/store.db")) as store:
        store.ledger.add_base("agent@0", str(base), base_fingerprint(base), who="test")
    return tmp_path / "home"


@pytest.fixture
def copy(tmp_path: Path, base: Path) -> Path:
    return make_tiny_adapter(tmp_path / "theirs", base, "agent", 3)


Change = Callable[[dict[str, Any]], Any]


def evidence(**fields: Any) -> Change:
    return lambda manifest: manifest | {"evidence": {"policy": "agent@3"} | fields}


def whole(**fields: Any) -> Change:
    return lambda manifest: manifest | fields


DEEP: Any = 0
for _ in range(900):
    DEEP = [DEEP]

ATTACKS: dict[str, Change] = {
    "imported is no object": whole(imported="x"),
    "imported's evidence is none": whole(imported={"evidence": []}),
    "imported is a list": whole(imported=[1]),
    "evidence is a list": whole(evidence=[1]),
    "files of wrong types": whole(files={"adapter_config.json": 3, "adapter_model.safetensors": None}),
    "files climb": lambda m: m | {"files": m["files"] | {"../../x": "00"}},
    "names act": evidence(
        policy=EVIL, state=EVIL, parent=EVIL, art_patch=EVIL, judges=[{"judge": EVIL, "rubric": EVIL}]
    ),
    "gate acts": evidence(gate={"judge": EVIL, "rubric": EVIL, "candidate": 0.9, "champion": 0.1}),
    "canary acts": evidence(watch={"verdict": EVIL, "hours": 1, "signals": {EVIL: {"challenger": 1, "champion": 0}}}),
    "settings act": evidence(settings={EVIL: EVIL, "learning_rate": {"a": EVIL}}),
    "train acts": evidence(train={EVIL: 1.0}),
    "made in the year 10^300": evidence(made_at=1e300),
    "made before time": evidence(made_at=-1e18),
    "hours without end": evidence(watch={"verdict": "promote", "hours": 1e999}),
    "not a number": evidence(train={"loss": float("nan")}, gate={"candidate": float("nan"), "champion": float("inf")}),
    "settings not a number": evidence(settings={"seed": float("nan"), "lr": float("inf")}),
    "settings deep": evidence(settings={"a": DEEP}),
    "settings big int": evidence(settings={"seed": 10**4000}),
    "big int": evidence(gate={"scenarios": 10**4000}),
    "big int train": evidence(train={"x": 10**4000}),
    "NUL": evidence(parent="a\0b", settings={"a\0": "\0"}),
    "surrogate": evidence(parent="\ud800"),
    "settings surrogate": evidence(settings={"\ud800": "\udcff"}),
    "long": evidence(parent="x" * 4_000_000),
    "many settings": evidence(settings={f"k{n}": "x" * 100 for n in range(100_000)}),
    "many signals": evidence(
        watch={"verdict": "x", "signals": {f"k{n}": {"challenger": 1, "champion": 0} for n in range(100_000)}}
    ),
    "many judges": evidence(judges=[{"judge": f"j{n}"} for n in range(100_000)]),
    "own name climbs": evidence(policy="agent@1/../../x"),
    "own name is huge": evidence(policy="agent@" + "9" * 5000),
    "own name is large": evidence(policy="agent@" + "9" * 18),
    "own name is the last one": evidence(policy="agent@999999999"),
    "own name is odd": evidence(policy="agent@٣"),
    "own name is odd 2": evidence(policy="agent@007"),
    "own name is odd 3": evidence(policy="agent@00"),
    "probe infinite": whole(
        probe={"token_ids": [float("inf"), 1], "logprobs": [0.0], "base_logprobs": [0.0], "dtype": "float32"}
    ),
    "probe huge": whole(
        probe={"token_ids": [10**4000, 1], "logprobs": [0.0], "base_logprobs": [0.0], "dtype": "float32"}
    ),
    "probe negative": whole(probe={"token_ids": [-5, 10**9], "logprobs": [0.0], "base_logprobs": [0.0], "dtype": EVIL}),
    "probe tokens negative": whole(
        probe={"token_ids": [-5, 1], "logprobs": [0.0], "base_logprobs": [0.0], "dtype": "float32"}
    ),
    "probe long": whole(
        probe={
            "token_ids": [1] * 1_000_001,
            "logprobs": [0.0] * 1_000_000,
            "base_logprobs": [0.0] * 1_000_000,
            "dtype": "float32",
        }
    ),
    "probe is a list": whole(probe=[1]),
    "probe's values are texts": whole(
        probe={"token_ids": "12", "logprobs": "1", "base_logprobs": "1", "dtype": "float32"}
    ),
    "probe target_ids dict": whole(
        probe={"token_ids": [1, 2], "logprobs": [0.0], "base_logprobs": [0.0], "dtype": "f", "target_ids": {"1": 2}}
    ),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_hostile_manifest(copy: Path, home: Path, attack: str):
    manifest = json.loads((copy / MANIFEST).read_text())
    (copy / MANIFEST).write_text(json.dumps(ATTACKS[attack](manifest)))
    done = art_patch("policies", "import", copy, home=home, COLUMNS="80")
    assert done.returncode in (0, 11), done.stderr
    assert not UNSAFE.search(done.stdout + done.stderr)
    adapters = home / "default" / "adapters"
    if done.returncode == 11:
        assert len(done.stderr) < 1_000
        assert not [*adapters.glob("*"), *adapters.glob(".*")]
        return
    (name,) = (path.name for path in adapters.glob("*@*"))
    assert re.fullmatch(r"agent@[1-9][0-9]?", name), "no second name of another step"
    show = ("policies", "show", name)
    shown = {
        command: art_patch(*command, home=home, COLUMNS="80")
        for command in (show, ("policies",), ("history",), ("reproduce", name), (*show, "--json"))
    }
    exported = art_patch("policies", "export", name, home / "out", home=home)
    for done in (*shown.values(), exported):
        assert done.returncode in (0, 20), done.stderr
        assert not UNSAFE.search(done.stdout + done.stderr)
        assert len(done.stdout) < 100_000
    assert max(map(len, shown[show].stdout.splitlines())) <= 80
    for content in (shown[*show, "--json"].stdout, (home / "out" / MANIFEST).read_text()):
        json.loads(content, parse_constant=int)


CONFIGS: dict[str, Change] = {
    "target modules act": whole(target_modules=EVIL),
    "target modules are deep": whole(target_modules=[[1], {}]),
    "target modules regex": whole(target_modules="(a+)+$"),
    "alpha without end": whole(lora_alpha=10**400),
    "alpha nan": whole(lora_alpha=float("nan")),
    "auto mapping": whole(auto_mapping={"base_model_class": "os", "parent_library": "os"}),
    "revision": whole(revision="../../x"),
    "rank a float": whole(r=1e300),
    "dropout acts": whole(lora_dropout=EVIL, task_type=EVIL, use_rslora=EVIL, inference_mode=EVIL),
    "unhashable": whole(bias=[], use_dora={}),
}


@pytest.mark.parametrize("attack", CONFIGS)
def test_a_hostile_config(copy: Path, home: Path, attack: str):
    content = json.dumps(CONFIGS[attack](json.loads((copy / CONFIG).read_text())))
    (copy / CONFIG).write_text(content)
    manifest = json.loads((copy / MANIFEST).read_text())
    manifest["files"][CONFIG] = hashlib.sha256(content.encode()).hexdigest()
    (copy / MANIFEST).write_text(json.dumps(manifest))
    done = art_patch("policies", "import", copy, home=home, COLUMNS="80")
    assert done.returncode in (0, 11), done.stderr
    assert len(done.stderr) < 1_000 and not UNSAFE.search(done.stderr)
    if not done.returncode:
        kept = json.loads((home / "default" / "adapters" / "agent@3" / CONFIG).read_text())
        assert not kept.keys() & {"auto_mapping", "revision"}, "they name code and places"
