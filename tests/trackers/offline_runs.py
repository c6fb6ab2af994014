"""Reads W&B's offline runs back: records of protobuf in a log of LevelDB's form, as `wandb sync` reads them.

wandb 0.31 has no reader that Python could call, so this one is ours: a header of seven bytes, then blocks of 32 KiB
with pieces of records, each with its checksum, length and kind (whole, first, middle, last).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from wandb.proto.wandb_internal_pb2 import Record  # pyright: ignore[reportMissingImports]

_BLOCK, _HEADER = 32 * 1024, 7
_WHOLE, _LAST = 1, 4


def records(file: Path) -> Iterator[Any]:
    data, at, pieces = file.read_bytes(), _HEADER, b""
    assert data.startswith(b":W&B")
    while at + _HEADER <= len(data):
        left = _BLOCK - at % _BLOCK
        if left < _HEADER:  # too short for a piece: zeros
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        at += _HEADER + length
        pieces += data[at - length : at]
        if kind in (_WHOLE, _LAST):
            yield Record.FromString(pieces)
            pieces = b""


def read_run(directory: Path) -> dict[str, Any]:
    """What one offline run would tell W&B, without times and W&B's own keys; tables as they are in its files."""
    (file,) = directory.glob("*.wandb")
    run: dict[str, Any] = {"config": {}, "history": [], "summary": {}, "tables": {}, "artifacts": {}}
    for record in records(file):
        kind = record.WhichOneof("record_type")
        if kind == "run":
            one = record.run
            run |= {"name": one.display_name, "job": one.job_type, "group": one.run_group, "resume": one.resume}
            run |= {"id": one.run_id, "project": one.project, "entity": one.entity}
            run["config"] |= _plain(one.config.update)
        elif kind == "config":
            run["config"] |= _plain(record.config.update)
        elif kind == "summary":
            run["summary"] |= {key: value for key, value in _plain(record.summary.update).items() if not _table(value)}
        elif kind == "history":
            row = _plain(record.history.item)
            for key in [key for key, value in row.items() if _table(value)]:
                run["tables"][key] = json.loads((directory / "files" / row.pop(key)["path"]).read_text())
            run["history"] += [row] if row else []
        elif kind == "artifact" and record.artifact.type != "run_table":
            one = record.artifact
            files = {entry.path: Path(entry.local_path).read_text() for entry in one.manifest.contents}
            about = {"type": one.type, "aliases": sorted(one.aliases), "metadata": json.loads(one.metadata)}
            run["artifacts"][one.name] = {**about, "files": files}
    return run


def _plain(items: Iterable[Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for item in items:
        *outer, last = item.nested_key or [item.key]
        inner = found
        for key in outer:
            inner = inner.setdefault(key, {})
        inner[last] = json.loads(item.value_json)
    return {key: value for key, value in found.items() if not key.startswith("_")}


def _table(value: Any) -> bool:
    return isinstance(value, dict) and value.get("_type") == "table-file"
