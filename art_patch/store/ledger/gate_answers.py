"""Keeps what candidate and champion answered in a gate, for people to read; nothing is learned from it.

One row for each held-out turn that was asked. It belongs to the recorded run of that turn: an erasure of the run's user
and retention delete it with the run. Texts are compressed, as messages are.
"""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import delete, insert, select

from art_patch._lib.ids import new_id
from art_patch.store.backends.database import Part
from art_patch.store.queries.loading import rows_in
from art_patch.store.schema import tables
from art_patch.store.schema.codec import expand, parse, squeeze
from art_patch.types import JSON

_A = tables.gate_answers


@dataclass(frozen=True, slots=True)
class GateTurn:
    """A held-out turn that a gate asked, with both answers: each has a `message`, a `finish_reason` and a `score`.

    `score` is the mean of the judge's; `None` if the judge gave none.
    """

    call_id: str  # the recorded call whose prompt was asked
    trajectory_id: str
    group_id: str  # the newest group of the turn's scenario, which names it in the gate's results
    candidate: tuple[JSON, ...]
    champion: tuple[JSON, ...]


class GateAnswers(Part):
    """What both policies answered in the newest gate of each pair."""

    def keep(self, policy: str, against: str, turns: Sequence[GateTurn]) -> None:
        """Keep the answers of the candidate `policy` and of `against`, in place of those of an earlier gate of both.

        A turn whose call was erased meanwhile is left out.
        """
        rows = [
            {"id": new_id(), "call_id": turn.call_id, "trajectory_id": turn.trajectory_id, "group_id": turn.group_id}
            | {"policy": policy, "against": against, "answers": _packed(turn)}
            for turn in turns
        ]
        calls, policies = tables.calls.c, tables.policies.c
        with self._database.write(durable=True) as connection:
            connection.execute(delete(_A).where(_A.c.policy == policy, _A.c.against == against))
            agent_id = connection.scalar(select(policies.agent_id).where(policies.name == policy))
            # In this transaction: an erasure that ended while the gate ran deletes nothing any more.
            keys = [turn.call_id for turn in turns]
            there = {key for (key,) in rows_in(connection, select(calls.id), calls.id, keys)}
            kept = [row | {"agent_id": agent_id} for row in rows if row["call_id"] in there]
            if kept and agent_id is not None:
                connection.execute(insert(_A), kept)

    def of(self, policy: str, against: str, groups: Sequence[str]) -> Mapping[str, list[GateTurn]]:
        """Return the turns of the scenarios that these groups name, by group."""
        columns = _A.c.call_id, _A.c.trajectory_id, _A.c.group_id, _A.c.answers
        query = select(*columns).where(_A.c.policy == policy, _A.c.against == against).order_by(_A.c.id)
        found: dict[str, list[GateTurn]] = defaultdict(list)
        with self._database.read() as connection:
            for call, run, group, answers in rows_in(connection, query, _A.c.group_id, groups):
                sides = parse(expand(answers))
                turn = GateTurn(call, run, group, tuple(sides["candidate"]), tuple(sides["champion"]))
                found[group].append(turn)
        return found


def _packed(turn: GateTurn) -> bytes:
    # Escaped, so that half of a surrogate pair has a form in UTF-8.
    return squeeze(json.dumps({"candidate": turn.candidate, "champion": turn.champion}).encode())
