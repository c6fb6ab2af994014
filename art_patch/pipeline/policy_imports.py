"""Takes a policy of another project in: checks its copy, publishes its LoRA here, and adds it to the ledger.

It becomes a candidate that no test of this project has seen, whatever it was where it comes from. It serves nobody
before it has been tested here, and no cycle trains from it, tests it by itself or rejects it. Its parent is not here,
so it has none; origin and evidence stand in its metrics.
"""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass
from pathlib import Path

from art_patch import policies, serving
from art_patch.errors import AdapterRejected, ConfigError, EngineError, NotFound
from art_patch.pipeline.carry_over import unfinished_jobs
from art_patch.pipeline.cycle_run import why_none_serves
from art_patch.store import Store
from art_patch.types import IMPORTED, JSON, Policy


@dataclass(frozen=True, slots=True)
class Imported:
    """A policy that was imported."""

    policy: Policy
    rank: int
    loaded: bool  # whether a running engine has loaded it, to see whether it can


def import_policy(
    store: Store, engine: serving.EngineClient | None, adapters: Path, directory: Path, *, name: str | None = None,
    sha256: str | None = None, who: str, now: float | None = None,
) -> Imported:  # fmt: skip
    """Import the policy in `directory` as `name`; without one, under its own name if that is free, else the next step.

    Raises:
        NotFound: this project has no base model yet to compare with.
        ConfigError: `name` exists, or is none of this project's names.
        AdapterRejected: the copy is damaged, unsafe, or not the one with this `sha256`; it belongs to another base; or
            the running `engine` refuses it, for example for its rank.
    """
    leader = store.ledger.leader()
    if leader is None:
        raise NotFound(f"there is no base model to compare with: {why_none_serves(store)}")
    base = policies.read_base_model(policies.resolve_model_dir(leader.base))
    if base.sha256 != leader.base_sha256:
        raise AdapterRejected(f"{leader.base} is not the base model any more on which {leader.name} was made")
    copy = policies.read_copy(directory, base, sha256=sha256)
    chosen = _name_for(store, adapters, leader.model, copy.evidence.policy, name)
    at = time.time() if now is None else now
    evidence = copy.evidence.model_dump(mode="json", exclude_none=True)
    origin: JSON = {"at": at, "manifest_sha256": copy.manifest_sha256, "evidence": evidence}
    policy = Policy(
        chosen, leader.base, leader.base_sha256, "candidate", at, str(adapters / chosen), None, {IMPORTED: origin}
    )
    _publish(copy, policy, adapters / chosen)
    try:
        loaded = _loads(engine, chosen)
        detail = {"policy": chosen, "from": copy.evidence.policy, "manifest_sha256": copy.manifest_sha256}
        if copy.evidence.rejected_by is not None:
            detail["rejected_by"] = copy.evidence.rejected_by
        store.transfers.add_policy(policy, who=who, detail=detail, now=at)
    except BaseException:
        policies.remove_adapter(adapters, chosen)
        raise
    return Imported(policy, copy.rank, loaded)


def _name_for(store: Store, adapters: Path, model: str, own: str, name: str | None) -> str:
    taken = {policy.name for policy in store.ledger.policies()}
    # Engines cache adapters by name; and an update that is under way will publish under its own.
    taken |= {path.name for path in (*adapters.glob("*@*"), *unfinished_jobs(adapters.parent))}
    if name is not None:
        policies.check_name(name)
        if name in taken:
            raise ConfigError(f"{name} exists already, and a policy never changes; give another --name, or none")
        if not _is_step_of(model, name):
            raise ConfigError(f"--name {name}: policies of this project are named {model}@STEP, from step 1 on")
        return name
    steps = [int(each.rpartition("@")[2]) for each in taken if each.rpartition("@")[0] == model]
    return own if _is_step_of(model, own) and own not in taken else f"{model}@{max(steps, default=0) + 1}"


def _is_step_of(model: str, name: str) -> bool:
    step = name.removeprefix(f"{model}@")
    # `agent@007` would be a second name of `agent@7`, and `agent@00` one of the base model.
    return step != name and re.fullmatch("[1-9][0-9]{0,8}", step) is not None


def _publish(copy: policies.Received, policy: Policy, target: Path) -> None:
    with policies.unpublished(target) as directory:
        config = copy.config | {"base_model_name_or_path": policy.base}
        (directory / policies.CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        (directory / policies.WEIGHTS).write_bytes(copy.weights)
        extra: JSON = {IMPORTED: policy.metrics[IMPORTED]}
        if copy.probe is not None:
            extra = {**extra, policies.ENTRY: copy.probe}
        policies.publish_adapter(directory, target, base_sha256=policy.base_sha256, extra=extra)


def _loads(engine: serving.EngineClient | None, name: str) -> bool:
    """Let a running engine load the policy and unload it; `AdapterRejected` if it refuses, `False` if it cannot now."""
    if engine is None:
        return False
    try:
        engine.load(name)
        engine.unload(name)
    except AdapterRejected:
        raise
    except EngineError:
        return False
    return True
