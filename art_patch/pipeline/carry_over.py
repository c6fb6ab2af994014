"""What a cycle goes on with from earlier ones, and what it gives up: killed updates, and candidates without a proof.

Of what a killed cycle may leave, two things stay, because the next cycle continues them: an update whose policy is not
in the ledger yet, if it can still be finished, and a candidate that was trained from the present champion. All else
goes: other updates (with a copy of the tokens that they trained on) and their adapters, the stores of the gate's runs,
half-written adapters, policies that an engine has loaded and does not need, and candidates whose champion has changed,
which are rejected.

A candidate that its gate rejects only for lack of proof, because it seemed better than the champion, may be continued:
the next update starts from it, and what both updates gained together is easier to prove. It never serves itself. After
a candidate that did not seem better, the next update starts from the champion again. So a line of candidates of which
none is better goes on by chance only, and every second one ends it. A line grows no longer than the champion's answers
can teach: of a candidate that is too far from them, the one before is continued.
"""

import shutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from art_patch import policies, promotion, training
from art_patch.errors import Busy, EngineError
from art_patch.pipeline.cycle_run import Cycle
from art_patch.pipeline.running_cycle import project_lock
from art_patch.types import CONTINUABLE, IMPORTED, JSON, Policy

REPRODUCTION = "reproduction"  # name of the project's directory of an update that is made again, and of its lock
GATE_RUNS = "gate"  # name of the project's directory for scratch stores, which exist only while a gate repeats runs
_SEEMS_BETTER = "seems_better"
_MOST_FAR = 0.2  # share of its rows that a candidate may leave out because the champion's answers are far from it


def sweep_leftovers(run: Cycle, champion: Policy) -> None:
    """Delete what a killed cycle left and no later cycle can continue."""
    ledger = run.store.ledger
    known = {policy.name: policy for policy in ledger.policies()}
    for job in unfinished_jobs(run.adapters.parent):
        # The policy is in the ledger, so the cycle was killed between its registration and this deletion.
        if job.name in known:
            shutil.rmtree(job)
    shutil.rmtree(run.adapters.parent / GATE_RUNS, ignore_errors=True)
    policies.remove_unpublished(run.adapters)
    # Each candidate was to be tested against one champion. Against another one it would start from older weights.
    for policy in known.values():
        rival = rival_of(policy, known)
        imported = IMPORTED in policy.metrics  # it was to be tested against nobody in particular
        if policy.state == "candidate" and policy.path and rival != champion.name and not imported:
            reason = f"{champion.name} became champion before it was tested against {rival}"
            ledger.move(policy.name, "rejected", who=run.who, reason=reason)
    # While the engine is down, unused policies stay loaded; the next cycle unloads them.
    with suppress(EngineError):
        for name in promotion.unwanted(ledger, run.engine.models()):
            run.engine.unload(name)


def untested_candidate(run: Cycle, champion: Policy) -> Policy | None:
    """Return a candidate that an earlier cycle trained from this champion and that no gate has decided on."""
    # Without a path it has no adapter; a directory that is gone was deleted by a person.
    known = {policy.name: policy for policy in run.store.ledger.policies()}
    waiting = [p for p in known.values() if p.state == "candidate" and p.path and rival_of(p, known) == champion.name]
    return waiting[-1] if waiting and Path(waiting[-1].path or "").is_dir() else None


def unfinished_jobs(project: Path) -> list[Path]:
    """Return the directories `training/NAME@STEP` of updates that were begun; a successful update deletes its own."""
    return sorted((project / "training").glob("*@*"))


def discard_jobs(jobs: Iterable[Path], adapters: Path, known: Collection[str]) -> None:
    """Delete updates that no cycle will continue, and their adapters; those of `known` policies stay."""
    for job in jobs:
        if job.name not in known:
            policies.remove_adapter(adapters, job.name)
        shutil.rmtree(job)


def forget_unfinished(directory: Path, known: Collection[str]) -> bool:
    """Delete all files of killed updates and gates of a project unless they are at work; return whether that was done.

    An erasure needs this, because the files may contain the user's data. The next cycle begins these updates and gates
    again from the store. `known` has the names of all policies in the ledger.
    """
    done = True
    for what, names in (("cycle", ("training", GATE_RUNS)), (REPRODUCTION, (REPRODUCTION,))):
        if not (left := [path for name in names if (path := directory / name).exists()]):
            continue
        # Under their own lock files. The store's lease is not needed: these files are on this machine only.
        try:
            with project_lock(directory, what):
                if what == "cycle":
                    discard_jobs(unfinished_jobs(directory), directory / "adapters", known)
                for path in left:
                    shutil.rmtree(path)
        except Busy:
            done = False
    return done


# --- lines of candidates ---


def marks(candidate: Policy) -> dict[str, bool]:
    """Return what the gate's metrics say of a rejected candidate that seemed better, for the updates after it."""
    trained: JSON = candidate.metrics.get("train", {})
    far, near = trained.get("far_rows", 0), trained.get("trained_rows", 0)
    return {_SEEMS_BETTER: True, CONTINUABLE: far <= _MOST_FAR * (far + near)}


def _seems_better(policy: Policy) -> bool:
    return policy.state == "rejected" and bool(policy.metrics.get("gate", {}).get(_SEEMS_BETTER))


def rival_of(policy: Policy, known: Mapping[str, Policy]) -> str | None:
    """Return the name of the champion that a candidate is tested against: its first ancestor that was not continued."""
    # Not `may_be_continued`, which ends when a line is given up.
    line = _line(policy.parent, known)
    return next((name for name in line if name not in known or not _seems_better(known[name])), None)


def start_of(
    policies: Sequence[Policy], champion: Policy, start: "training.Start"
) -> tuple[Policy, tuple[Policy, ...]]:
    """Return the policy that the next update starts from, and the candidates that are not continued any more.

    `policies` are all of the store, oldest first; `start` is the setting of `TrainConfig`. Candidates of former
    champions are not continued either, unless the champion goes on from them.
    """
    own = champion
    if start == "base":
        own = replace(champion, name=f"{champion.model}@0", path=None, parent=None, metrics={})
    known = {policy.name: policy for policy in policies}
    tried = [each for each in policies if each.name != champion.name and rival_of(each, known) == champion.name]
    line = set(_line(champion.name, known))
    ours = (each for each in policies if each.model == champion.model)  # others may be another agent's
    given_up = tuple(each for each in ours if each.may_be_continued and each.name not in line)
    newest = next((each for each in reversed(tried) if each.may_be_continued or not _seems_better(each)), champion)
    if start != "candidate" or not newest.may_be_continued or not newest.path or not Path(newest.path).is_dir():
        return own, given_up
    line = set(_line(newest.name, known))
    return newest, tuple(each for each in given_up if each.name not in line)


def _line(name: str | None, known: Mapping[str, Policy]) -> list[str]:
    """Return the name and those of all ancestors, the nearest first."""
    line: dict[str, None] = {}
    # A name comes once, so that a store with parents in a circle blocks no cycle.
    while name is not None and name not in line:
        line[name] = None
        name = known[name].parent if name in known else None
    return list(line)


def distances_to(champion: Policy, policies: Sequence[Policy]) -> dict[str, int]:
    """Return how many updates lie between each policy and the champion; a policy of other origin is left out."""
    known = {policy.name: policy for policy in policies}
    # By lineage and not by number: rejected candidates have numbers too, and a policy that was rolled back has the
    # larger one.
    ours = {name: steps for steps, name in enumerate(_line(champion.name, known))}
    met = {name: next(((n, each) for n, each in enumerate(_line(name, known)) if each in ours), None) for name in known}
    return {name: at[0] + ours[at[1]] for name, at in met.items() if at is not None}
