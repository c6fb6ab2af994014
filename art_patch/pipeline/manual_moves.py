"""What people decide about a policy: promote, test, reject, go back, import. For commands and the page of these names.

Each function checks all that can be checked first, and changes nothing in a `dry_run`. The engine is needed where the
policy must be proven; a rejection and the way back must work while it is down.

A policy of another project is imported as a candidate that no test of this project has seen, whatever it was where it
comes from. It serves nobody before it has been tested here, and no cycle trains from it, tests it by itself or rejects
it. Its parent is not here, so it has none; origin and evidence stand in its metrics.
"""

from __future__ import annotations

import json
import re
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from art_patch import policies, promotion
from art_patch.errors import AdapterRejected, ArtPatchError, ConfigError, EngineError, NotFound, TransitionError
from art_patch.pipeline.carry_over import unfinished_jobs
from art_patch.pipeline.cycle_run import why_none_serves
from art_patch.serving import EngineClient
from art_patch.settings import Settings
from art_patch.store import Ledger, Store
from art_patch.types import IMPORTED, JSON, UPSTREAM_ARM, Policy, PolicyState


@dataclass(frozen=True, slots=True)
class Promoted:
    """What a promotion by a person did: the policy is champion now, or is tested as a canary first."""

    policy: Policy  # as it was before
    state: PolicyState
    percent: float | None  # share of the sessions of a canary
    control_percent: float  # of the control group that there is, or begins
    champion: str | None  # after the change; `None`: upstream
    before: str | None  # the champion before


@dataclass(frozen=True, slots=True)
class Rejected:
    """A policy that was rejected."""

    was: PolicyState
    unloaded: bool  # by the engine
    champion: str | None


@dataclass(frozen=True, slots=True)
class RolledBack:
    """Who answers after a rollback; the same as `before` if only a test has ended, or nothing was to be done."""

    target: str  # a policy, or "upstream"
    before: str
    test_ended: str | None
    state: PolicyState | None  # of the policy whose test has ended


def find_engine(settings: Settings, ledger: Ledger, *, within_s: float = 5.0) -> EngineClient | None:
    """Return a client of the project's engine, or `None` if the engine does not answer within `within_s`."""
    engine = EngineClient.of_route(settings, ledger.route())
    return engine if engine is not None and engine.health(timeout_s=within_s) else None


def unload(settings: Settings, ledger: Ledger, rejected: str) -> bool:
    """Ask the engine to unload a policy that gets no more calls; return whether it did."""
    # Nothing is lost if this fails: the next promotion unloads what is not wanted.
    with suppress(ConfigError, EngineError):
        if (engine := find_engine(settings, ledger)) is not None:
            engine.unload(rejected)
            return True
    return False


def promote_named(
    settings: Settings, ledger: Ledger, policy: str, *, percent: float | None = None, shadow: bool = False,
    who: str, reason: str | None = None, dry_run: bool = False,
) -> Promoted:  # fmt: skip
    """Make a policy champion; or test it on `percent` of the sessions or as a `shadow`; or change a canary's share.

    Raises `ConfigError` for a share that is none, `EngineError` without an engine, and what `promotion` raises.
    """
    if shadow and percent is not None:
        raise ConfigError("--canary and --shadow exclude each other; a shadow can become a canary later")
    if percent is not None and not 0 < percent <= 100:
        raise ConfigError(f"--canary {percent:g} is no share of the sessions; give a percentage above 0 and up to 100")
    state = "shadow" if shadow else "champion" if percent is None else "canary"
    route = ledger.route()
    control = route.control_percent or promotion.control_group_to_come(ledger)
    is_canary = percent is not None and (route.challenger, route.challenger_state) == (policy, "canary")
    chosen = promotion.check_promotion(ledger, policy, state, percent=percent)
    done = "promoted" if state == "champion" else "its share changed" if is_canary else "tested"
    why = reason or f"{done} by hand"
    if is_canary and percent is not None:
        # The engine serves a canary already; only its share in the route changes.
        if not dry_run:
            promotion.change_share(ledger, policy, percent, who=who, reason=why)
    elif (engine := find_engine(settings, ledger)) is None:
        raise EngineError("no engine is running, so the policy cannot be proven; start `art-patch serve` and try again")
    elif dry_run:
        pass  # whether the engine can serve it, only loading it shows
    elif state != "champion":
        promotion.challenge(ledger, engine, policy, state=state, percent=percent, who=who, reason=why)
    else:
        promotion.promote(ledger, engine, policy, who=who, reason=why)
    champion = policy if state == "champion" else ledger.route().champion
    return Promoted(chosen, state, percent, control, champion, route.champion)


def reject_named(
    settings: Settings, ledger: Ledger, policy: str, *, who: str, reason: str, dry_run: bool = False
) -> Rejected:
    """Reject a policy for good; a running engine unloads it."""
    was, unloaded = promotion.check_promotion(ledger, policy, "rejected").state, False
    if not dry_run:
        # Before the engine is asked, for the same reason as in a rollback.
        promotion.reject(ledger, None, policy, who=who, reason=reason)
        unloaded = policy not in promotion.wanted(ledger) and unload(settings, ledger, policy)
    return Rejected(was, unloaded, ledger.route().champion)


def roll_back(
    settings: Settings, ledger: Ledger, *, to: str | None = None, who: str, reason: str, dry_run: bool = False
) -> RolledBack:
    """End the test if there is one, else let the champion before answer again, or `to`: a policy, or "upstream"."""
    before, tested = _answering(ledger), ledger.challenger()
    # From upstream nobody goes back to a policy unasked: a second rollback would undo the first.
    stays = to == before or (to is None and (tested is not None or before == UPSTREAM_ARM))
    # First of all: what cannot be gone back to is refused before anything is changed.
    target = before if stays else promotion.rollback_target(ledger, to)
    if dry_run:
        ended = tested.name if tested else None
        state = ledger.after_test(ended) if ended else None
    else:
        ended = _go_back(settings, ledger, target, who=who, reason=reason)
        policy = ledger.policy(ended) if ended else None
        state = policy.state if policy else None
    return RolledBack(target, before, ended, state)


def _answering(ledger: Ledger) -> str:
    champion = ledger.champion()
    return champion.name if champion is not None else UPSTREAM_ARM


def _go_back(settings: Settings, ledger: Ledger, to: str, *, who: str, reason: str) -> str | None:
    """End the test, if there is one, and let `to` answer; return the name of the policy whose test has ended."""
    # The ledger comes first: an engine that hangs must not delay what takes a bad policy off the traffic.
    ended = None
    with suppress(TransitionError):  # somebody else has just ended it, or promoted the policy
        ended = promotion.give_up(ledger, None, who=who, reason=reason)
    # So also if a server has promoted the tested policy in this moment.
    if _answering(ledger) != to:
        try:
            # A rollback is urgent: an engine that takes longer than a second is not waited for.
            promotion.rollback(ledger, find_engine(settings, ledger, within_s=1.0), to=to, who=who, reason=reason)
        except ArtPatchError as error:
            if ended is not None:
                error.args = (f"the test of {ended} has ended, but {to} does not answer yet: {error}",)
            raise
    if ended is not None and ended not in promotion.wanted(ledger):
        unload(settings, ledger, ended)
    return ended


# --- policies of other projects ---


@dataclass(frozen=True, slots=True)
class Imported:
    """A policy that was imported."""

    policy: Policy
    rank: int
    loaded: bool  # whether a running engine has loaded it, to see whether it can


def import_policy(
    store: Store, engine: EngineClient | None, adapters: Path, directory: Path, *, name: str | None = None,
    sha256: str | None = None, who: str,
) -> Imported:  # fmt: skip
    """Import the policy in `directory` as `name`; without one, under its own name if that is free, else the next step.

    `directory` is a copy with the evidence of another project, or a plain LoRA of PEFT, of which nothing is known.

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
    is_copy = (directory / policies.MANIFEST).exists()
    copy = (policies.read_copy if is_copy else policies.read_lora)(directory, base, sha256=sha256)
    return _take_in(store, engine, adapters, copy, leader, name=name, who=who)


def read_to_fork(store: Store, adapters: Path, name: str, *, agent: str) -> tuple[Policy, policies.Received]:
    """Read and check a policy that an `agent` is to begin with, before another project is opened or made.

    Raises:
        NotFound: there is no such policy, or its directory is gone.
        ConfigError: it is the base model.
        AdapterRejected: its files are damaged, or its base model is another one now.
    """
    policy = require_policy_to_copy(store, name)
    policies.check_name(f"{agent}@0")
    base = policies.read_base_model(policies.resolve_model_dir(policy.base))
    if not (adapters / name).exists():
        raise NotFound(f"{name} was deleted: there is no {adapters / name}; restore it, or fork another policy")
    copy = policies.read_copy(adapters / name, base)  # with the probe, which no other copy has
    return policy, replace(copy, evidence=policies.evidence_of(policy))


def fork_policy(
    policy: Policy, copy: policies.Received, into: Store, engine: EngineClient | None, target: Path, *, agent: str,
    who: str,
) -> Imported:  # fmt: skip
    """Put what `read_to_fork` read into another project, with its evidence, as the next step of the `agent` there.

    In a project without any policy the base model begins to serve, as `AGENT@0`. `target` is that project's directory
    of adapters, and `engine` serves it.

    Raises:
        NotFound: nothing serves or learns in the other project any more.
        ConfigError: the other project has an agent of another name.
        AdapterRejected: the other project has another base model.
    """
    if not into.ledger.policies():
        into.ledger.add_base(f"{agent}@0", policy.base, policy.base_sha256, who=who)
    leader = into.ledger.leader()
    if leader is None:
        raise NotFound(f"there is nothing to put it beside in the other project: {why_none_serves(into)}")
    if leader.model != agent:
        raise ConfigError(f"the agent of that project is {leader.model}; give --as {leader.model}, or another --into")
    if leader.base_sha256 != policy.base_sha256:
        raise AdapterRejected(f"{policy.name} was trained on another base than {leader.name}, which that project has")
    return _take_in(into, engine, target, copy, leader, name=None, who=who)


def require_policy_to_copy(store: Store, name: str) -> Policy:
    """Return a policy that has a LoRA; raise `NotFound` or `ConfigError` if there is none of this name."""
    if (policy := store.ledger.policy(name)) is None:
        raise NotFound(f"there is no policy {name!r}; `art-patch policies` lists them")
    if policy.path is None:
        raise ConfigError(f"{name} is the base model itself, which lies at {policy.base}; there is nothing to copy")
    return policy


def _take_in(
    store: Store, engine: EngineClient | None, adapters: Path, copy: policies.Received, leader: Policy, *,
    name: str | None, who: str,
) -> Imported:  # fmt: skip
    """Publish what was received, let a running engine try it, and enter it in the ledger as a candidate."""
    chosen = _name_for(store, adapters, leader.model, copy.evidence.policy, name)
    at = time.time()
    evidence = copy.evidence.model_dump(mode="json", exclude_none=True)
    origin: JSON = {"at": at, **copy.origin, "evidence": evidence}
    policy = Policy(
        chosen, leader.base, leader.base_sha256, "candidate", at, str(adapters / chosen), None, {IMPORTED: origin}
    )
    try:
        publish(copy, policy, adapters / chosen)
    except AdapterRejected:
        if name is not None or not (adapters / chosen).exists():
            raise
        return _take_in(store, engine, adapters, copy, leader, name=None, who=who)  # another took this name meanwhile
    try:
        loaded = _loads(engine, chosen)
        detail = {"policy": chosen, "from": copy.evidence.policy, **copy.origin}
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
            raise ConfigError(f"--name {name}: policies of this project are named {model}@STEP, from 1 to 999999")
        return name
    steps = [int(each.rpartition("@")[2]) for each in taken if each.rpartition("@")[0] == model]
    return own if _is_step_of(model, own) and own not in taken else f"{model}@{max(steps, default=0) + 1}"


def _is_step_of(model: str, name: str) -> bool:
    step = name.removeprefix(f"{model}@")
    # `agent@007` would be a second name of `agent@7`, and `agent@00` one of the base model.
    # Names end at nine digits: after a step that is as large, nothing could be trained any more.
    return step != name and re.fullmatch("[1-9][0-9]{0,5}", step) is not None


def publish(copy: policies.Received, policy: Policy, target: Path) -> None:
    """Publish what was received as the directory of a new policy."""
    with policies.unpublished(target) as directory:
        config = copy.config | {"base_model_name_or_path": policy.base}
        (directory / policies.CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        (directory / policies.WEIGHTS).write_bytes(copy.weights)
        extra: JSON = {IMPORTED: policy.metrics[IMPORTED]}
        if copy.probe is not None:
            extra = {**extra, policies.ENTRY: copy.probe}
        policies.publish_adapter(directory, target, base_sha256=policy.base_sha256, extra=extra)


def _loads(engine: EngineClient | None, name: str) -> bool:
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
