"""Which policy an update starts from, which champion a candidate is tested against, and how far policies are apart.

A candidate that its gate rejects only for lack of proof, because it seemed better than the champion, may be continued:
the next update starts from it, and what both updates gained together is easier to prove. It never serves itself. After
a candidate that did not seem better, the next update starts from the champion again. So a line of candidates of which
none is better goes on by chance only, and every second one ends it. A line grows no longer than the champion's answers
can teach: of a candidate that is too far from them, the one before is continued.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from art_patch.types import CONTINUABLE, JSON, Policy

if TYPE_CHECKING:
    from art_patch.training import Start

_SEEMS_BETTER = "seems_better"
_MOST_FAR = 0.2  # share of its rows that a candidate may leave out because the champion's answers are far from it


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


def start_of(policies: Sequence[Policy], champion: Policy, start: "Start") -> tuple[Policy, tuple[Policy, ...]]:
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
