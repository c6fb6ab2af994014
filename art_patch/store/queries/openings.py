"""Finds how runs open: the first words of the user, for lists of runs."""

import json
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, bindparam, func, select

from art_patch.store.queries.loading import chain_of, rows_in, some_of
from art_patch.store.schema import tables
from art_patch.store.schema.codec import expand
from art_patch.trajectories import ROOT

_C = tables.calls.c
_OPENING = 4  # messages at the start of a prompt, among which the user's first one is looked for

_nodes = tables.nodes.c
_PROMPTS = select(_nodes.id).where(_nodes.id.in_(bindparam("prompts", expanding=True)))
_CHAINS = select(chain_of(tables.nodes, _PROMPTS))


def openings_of(connection: Connection, ids: Sequence[str]) -> dict[str, str]:
    """Return the first words of the user in the first prompt of each of these trajectories."""
    its = tables.calls.alias().c
    start = select(func.min(its.started_at)).where(its.trajectory_id == _C.trajectory_id).scalar_subquery()
    first = select(_C.trajectory_id, _C.prompt).where(_C.started_at == start).order_by(_C.id.desc())
    prompts = {key: prompt for key, prompt in rows_in(connection, first, _C.trajectory_id, ids)}
    # A prompt is named by its last message, so all parents up to the first message are read before any body.
    above: dict[bytes, bytes] = {}
    for some in some_of(sorted(set(prompts.values()) - {ROOT})):
        above |= {node: parent for node, parent in connection.execute(_CHAINS, {"prompts": some})}
    paths: dict[str, list[bytes]] = {}
    for key, node in prompts.items():
        path: list[bytes] = []
        while node in above:
            path.append(node)
            node = above[node]
        paths[key] = path[::-1][:_OPENING]
    wanted = {node for path in paths.values() for node in path}
    rows = rows_in(connection, select(_nodes.id, _nodes.body), _nodes.id, sorted(wanted))
    bodies = {node: json.loads(expand(body)) for node, body in rows}
    return {key: _first_words([bodies[node] for node in path if node in bodies]) for key, path in paths.items()}


def _first_words(messages: Sequence[Any]) -> str:
    for message in messages:
        if message.get("role") == "user":
            content: Any = message.get("content")
            if isinstance(content, list):  # parts: texts and pictures
                parts: list[Any] = content
                content = " ".join(str(part.get("text", "")) for part in parts if isinstance(part, dict))
            return " ".join(str(content or "").split())[:200]
    return ""
