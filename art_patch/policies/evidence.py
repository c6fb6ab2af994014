"""What a copy of a policy says of its origin and tests, so that another project can import it with its evidence.

The manifest of a copy (`MANIFEST.json`) has the sha256 of the copy's files, the fingerprint of the base model, and the
evidence: parent, release, judges, settings, numbers of the training, and the results of gate and canary test. It has no
texts of users, no ids of runs, no names of people and no reasons that people typed; the trainer's probe, which quotes a
run, is left out. Only fields that are named here are written or read. The sha256 of the manifest itself stands for the
whole copy: whoever compares it with the one that the export printed knows that nothing was changed on the way. All
that a copy says may be an attacker's: it is limited in size, and shown as what another project says.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from art_patch.errors import AdapterRejected
from art_patch.policies import files
from art_patch.policies.base_models import BaseModel as Base
from art_patch.policies.files import CONFIG, MANIFEST, WEIGHTS
from art_patch.policies.validation import check_content, read_probe
from art_patch.types import IMPORTED, Policy

_EVIDENCE = "evidence"  # entry of a copy's manifest
ANY_RANK = 1 << 16  # whoever serves it says which ranks it serves
MOST_BYTES = 8 << 30
_MOST_EVIDENCE = 64 << 10  # characters, as JSON: it is kept in the store, and shown
_LATEST = 253_402_300_800.0  # the year 10000, which no calendar prints
# Of `adapter_config.json`. Other settings name code or places of another machine, or are not served anyway.
_SETTINGS = ("peft_type", "r", "lora_alpha", "target_modules")


class _Part(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)  # a later release may say more


class JudgedBy(_Part):
    """A judge whose scores a policy learned from."""

    judge: str
    rubric: str = ""


class Gate(_Part):
    """The result of a gate: mean scores of the policy and of the champion of then, and what was compared."""

    candidate: float | None = None
    champion: float | None = None
    lower_bound: float | None = None
    level: float | None = None
    scenarios: int | None = None
    judge: str | None = None
    rubric: str | None = None
    checks: int | None = None
    checks_failed: int | None = None


class Signal(_Part):
    """One signal of a canary test."""

    challenger: float
    champion: float
    compared: int = 0


class Watched(_Part):
    """The result of a canary test beside the champion of then."""

    verdict: str
    hours: float = 0.0
    signals: dict[str, Signal] = {}


class Evidence(_Part):
    """The origin and the tests of a policy in the project that made it."""

    policy: str  # its name there
    state: str | None = None  # there, when it was copied
    rejected_by: str | None = None  # `gate`, `canary test`, or `decision`: a person's, or the champion had changed
    parent: str | None = None
    art_patch: str | None = None  # the release that trained it
    made_at: Annotated[float, Field(ge=0, lt=_LATEST)] | None = None  # seconds since the epoch
    judges: tuple[JudgedBy, ...] = ()
    settings: dict[str, JsonValue] = {}  # of the update
    train: dict[str, int | float] = {}  # numbers of the update; counts stay whole numbers
    gate: Gate | None = None
    watch: Watched | None = None


def evidence_of(policy: Policy) -> Evidence:
    """Returns the evidence about a policy that the ledger's record has."""
    metrics: Any = policy.metrics
    if IMPORTED in metrics:  # what it brought along, but for the tests that it had here
        tests = {"gate": _gate(metrics.get("gate") or {}), "watch": _watched(metrics.get("watch") or {})}
        tested = {name: found for name, found in tests.items() if found is not None}
        brought = Evidence.model_validate(metrics[IMPORTED]["evidence"])
        here: dict[str, Any] = {"state": policy.state, **tested}
        if policy.state in ("champion", "retired", "rejected"):  # this project has decided on it, too
            here["rejected_by"] = _rejected_by(policy)
        return brought.model_copy(update=here)
    made, train = (metrics.get(name) or {} for name in ("made", "train"))
    return Evidence(
        policy=policy.name,
        state=policy.state,
        rejected_by=_rejected_by(policy),
        parent=policy.parent,
        art_patch=made.get("art_patch"),
        made_at=policy.created_at,
        judges=tuple(JudgedBy(**each) for each in made.get("judges", ())),
        settings=train.get("config") or {},
        train={name: value for name, value in train.items() if type(value) in (int, float) and math.isfinite(value)},
        gate=_gate(metrics.get("gate") or {}),
        watch=_watched(metrics.get("watch") or {}),
    )


def _rejected_by(policy: Policy) -> str | None:
    """Returns what rejected a policy; not the reason itself, which may name scenarios or be typed by a person."""
    gate: Any = policy.metrics.get("gate") or {}
    watch: Any = policy.metrics.get("watch") or {}
    if policy.state != "rejected":
        return None
    if watch.get("verdict") in ("roll back", "inconclusive"):
        return "canary test"
    margin = (gate.get("config") or {}).get("margin", 0.0)
    failed = gate.get("ruined") or any(not each.get("passed", True) for each in gate.get("checks") or ())
    return "gate" if gate and (failed or gate.get("lower_bound", -1.0) <= margin) else "decision"


def _gate(gate: Any) -> Gate | None:
    if not gate:
        return None
    its = {name: gate[name] for name in Gate.model_fields if name in gate and name != "checks"}
    checks = gate.get("checks")
    if checks is not None:
        its |= {"checks": len(checks), "checks_failed": sum(not each.get("passed", True) for each in checks)}
    return Gate(**its | {"level": (gate.get("config") or {}).get("level")})


def _watched(watch: Any) -> Watched | None:
    if not watch:
        return None
    signals = {
        name: Signal(challenger=one["challenger"], champion=one["champion"], compared=one.get("compared", 0))
        for name, one in (watch.get("signals") or {}).items()
        if all(isinstance(one.get(arm), int | float) for arm in ("challenger", "champion"))
    }
    return Watched(verdict=watch["verdict"], hours=watch.get("hours", 0.0), signals=signals)


def write_manifest(policy: Policy, directory: Path) -> str:
    """Writes the manifest of the copy in `directory`, whose other files are complete; returns the manifest's sha256."""
    hashes = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(directory.iterdir())}
    manifest = {"files": hashes, "base_sha256": policy.base_sha256}
    manifest[_EVIDENCE] = evidence_of(policy).model_dump(mode="json", exclude_none=True)
    content = (json.dumps(_finite(manifest), indent=2, sort_keys=True) + "\n").encode()
    (directory / MANIFEST).write_bytes(content)
    return hashlib.sha256(content).hexdigest()


@dataclass(frozen=True, slots=True)
class Received:
    """A copy of a policy that was checked: the contents of its files, and its evidence."""

    config: dict[str, Any]  # of `adapter_config.json`, only with settings that are understood
    weights: bytes = field(repr=False)
    rank: int
    evidence: Evidence
    origin: dict[str, str]  # the sha256 of its manifest, or of the weights of a LoRA without one
    probe: dict[str, Any] | None = field(default=None, repr=False)  # as an entry of a manifest; exports have none


def read_copy(directory: Path, base: Base, *, sha256: str | None = None) -> Received:
    """Reads and checks a copy that `policies export` wrote, or the directory of an adapter, against the base model.

    Raises `AdapterRejected` if a file is missing, unknown, unsafe, or is not what the manifest promises; if the
    manifest has not this `sha256`; or if it was trained on another base.
    """
    name = directory.name
    if not (directory / MANIFEST).exists():
        raise AdapterRejected(
            f"{directory} has no {MANIFEST}, so it is no policy with its evidence; `art-patch policies export` of this "
            "release, without --merged, writes one"
        )
    content = files.read_manifest(directory)
    found = hashlib.sha256(content).hexdigest()
    if sha256 is not None and found != sha256.lower():
        raise AdapterRejected(f"{directory}: {MANIFEST} has the sha256 {found}, not {sha256}: it is another copy")
    manifest = files.parse_object(name, MANIFEST, content)
    contents = files.read_verified(directory, manifest, MOST_BYTES)
    if manifest.get("base_sha256") != base.sha256:
        raise AdapterRejected(
            f"{directory} was trained on another base (fingerprint {str(manifest.get('base_sha256'))[:12]}) than "
            f"{base.directory} ({base.sha256[:12]}), which this project serves"
        )
    config = files.parse_object(name, CONFIG, contents[CONFIG])
    rank, _ = check_content(name, config, contents[WEIGHTS], base, max_rank=ANY_RANK)
    probe = read_probe(name, manifest, base)
    kept = settings_of(config)
    entry = None if probe is None else probe.entry()
    origin = {"manifest_sha256": found}
    return Received(kept, contents[WEIGHTS], rank, _evidence(directory, manifest), origin, entry)


def settings_of(config: dict[str, Any]) -> dict[str, Any]:
    """Returns what an `adapter_config.json` that was checked says of the weights; all else of it is ours."""
    ours = {"task_type": "CAUSAL_LM", "bias": "none", "lora_dropout": 0.0, "inference_mode": True}
    kept = {key: config[key] for key in _SETTINGS if key in config}
    return {**kept, **ours, "use_rslora": bool(config.get("use_rslora"))}


def _evidence(directory: Path, manifest: dict[str, Any]) -> Evidence:
    # The manifest that a trainer writes has these entries beside others, and knows of no test.
    own = {name: manifest.get(name) for name in ("parent", "art_patch", "made_at")}
    own |= {"policy": directory.name, "settings": manifest.get("config") or {}, "judges": manifest.get("judges") or ()}
    try:
        imported = manifest.get(IMPORTED)
        brought = imported.get(_EVIDENCE, own) if isinstance(imported, dict) else own
        found = Evidence.model_validate(_finite(manifest.get(_EVIDENCE, brought)))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise AdapterRejected(
            f"{directory}: the evidence in {MANIFEST} cannot be read ({where:.100}: {first['msg']:.200})"
        ) from error
    if (size := len(json.dumps(found.model_dump(mode="json")))) > _MOST_EVIDENCE:
        raise AdapterRejected(f"{directory}: the evidence in {MANIFEST} is longer than evidence is ({size} characters)")
    return found


def _finite(value: Any) -> Any:
    """Return a JSON value with `None` for what is no finite number: JSON has none, and databases refuse them."""
    return json.loads(json.dumps(value), parse_constant=lambda _: None)
