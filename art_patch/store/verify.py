"""Proving the store sound: what is referred to exists, what is chained matches."""

from __future__ import annotations

import json

from sqlalchemy import select, text

from art_patch.chain import node_id
from art_patch.store import tables
from art_patch.store.codec import expand
from art_patch.store.connect import Database
from art_patch.store.ledger import GENESIS, audit_hash

_DANGLING = {
    "{} messages whose parent is missing":
        "SELECT count(*) FROM nodes n WHERE n.parent != x'' AND n.parent NOT IN (SELECT id FROM nodes)",
    "{} calls whose prompt is missing":
        "SELECT count(*) FROM calls WHERE prompt != x'' AND prompt NOT IN (SELECT id FROM nodes)",
    "{} calls whose tools are missing":
        "SELECT count(*) FROM calls WHERE tools IS NOT NULL AND tools NOT IN (SELECT id FROM blobs)",
    "{} answers whose message is missing":
        "SELECT count(*) FROM choices WHERE answer NOT IN (SELECT id FROM nodes)",
    "{} answers whose call is missing":
        "SELECT count(*) FROM choices WHERE call_id NOT IN (SELECT id FROM calls)",
    "{} calls whose trajectory is missing":
        "SELECT count(*) FROM calls WHERE trajectory_id NOT IN (SELECT id FROM trajectories)",
    "{} trajectories whose group is missing":
        "SELECT count(*) FROM trajectories WHERE group_id IS NOT NULL AND group_id NOT IN (SELECT id FROM groups)",
    "{} groups whose scenario is missing":
        "SELECT count(*) FROM groups WHERE scenario_key NOT IN (SELECT key FROM scenarios)",
}  # fmt: skip


def verify(database: Database) -> list[str]:
    """Return every inconsistency found, in words; empty means sound."""
    found: list[str] = []
    with database.read() as connection:
        check = connection.execute(text("PRAGMA integrity_check")).scalars().all()
        found += [f"sqlite: {line}" for line in check if line != "ok"]
        for sentence, query in _DANGLING.items():
            if count := connection.scalar(text(query)):
                found.append(sentence.format(count))
        for node in connection.execute(select(tables.nodes)):
            if node_id(node.parent, json.loads(expand(node.body))) != node.id:
                found.append(f"message {node.id.hex()} does not match its hash")
        champions = connection.scalars(
            select(tables.policies.c.name).where(tables.policies.c.state == "champion")
        ).all()
        if len(champions) > 1:
            found.append(f"{len(champions)} champions: {', '.join(champions)}")
        previous = GENESIS
        for entry in connection.execute(select(tables.audit).order_by(tables.audit.c.id)):
            if entry.previous != previous or entry.hash != audit_hash(
                previous, entry.at, entry.who, entry.action, entry.detail
            ):
                found.append(f"audit entry {entry.id} was altered or an entry before it is gone")
                break
            previous = entry.hash
    return found
