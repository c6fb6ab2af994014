"""Writes rows to files and reads them: JSON lines, or Parquet through pyarrow (extra `parquet`).

Only one page of rows is in memory at a time. A file holds users' data, so it is made with mode 0600. It is written as
`NAME.part` and renamed to `NAME` when it is complete. An existing file is replaced only with `force`. The name `-`
means stdout for writing and stdin for reading.
"""

import json
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import IO, Any, Literal, cast

from art_patch._lib.atomic_files import replacing
from art_patch.errors import ConfigError, MalformedFile

Kind = Literal["json", "json_list", "text", "number", "integer", "boolean"]

# Parquet needs the type of each column beforehand; a column has the same type in every format.
_COLUMNS_BY_KIND: Mapping[Kind, str] = {
    "json_list": "messages prompt completion chosen rejected tools",
    "json": "record",
    "text": "format id origin name user_id session_id scenario_key group_id",
    "number": "score_chosen score_rejected reward best_reward started_at",
    "integer": "calls siblings",
    "boolean": "parallel_tool_calls",
}
_COLUMNS_BY_FORMAT = {
    "chat": "messages tools parallel_tool_calls",
    "sft": "messages tools",
    "sft-prompt": "prompt completion tools",
    "preference": "prompt chosen rejected tools score_chosen score_rejected scenario_key group_id",
    "grpo": "prompt tools scenario_key group_id reward best_reward siblings",
    "trajectories": "format id started_at origin name user_id session_id scenario_key calls record",
}
_KINDS: Mapping[str, Kind] = {name: kind for kind, names in _COLUMNS_BY_KIND.items() for name in names.split()}
COLUMNS: Mapping[str, Mapping[str, Kind]] = {
    name: {column: _KINDS[column] for column in columns.split()} for name, columns in _COLUMNS_BY_FORMAT.items()
}
"""Columns of each format in a Parquet file, in order. An import of `trajectories` reads only `record`."""

STREAM = "-"
_PAGE_ROWS = 200
_GROUP_ROWS = 1_000  # of a Parquet file: fewer make it slow to read, more keep more in memory
_MAGIC = b"PAR1"
_LINE_BYTES = 256 << 20  # no run is as long, and a file without line ends must not fill the memory

Row = Mapping[str, Any]
Write = Callable[[Row], None]

_encode = json.JSONEncoder(separators=(",", ":"), default=repr).encode


@contextmanager
def writing(
    path: str, columns: Mapping[str, Kind] | None, *, parquet: bool = False, force: bool = False
) -> Generator[Write]:
    """Give the block a function that writes a row. The file appears when the block ends; if it raises, there is none.

    Args:
        columns: the columns of a Parquet file. JSON lines have all keys of each row.
        parquet: whether to write Parquet. If false, JSON lines are written, whatever the name of the file.
    """
    make = _parquet_writer(columns or {}) if parquet else _lines_writer
    if path == STREAM:
        with make(sys.stdout.buffer) as write:
            yield write
        sys.stdout.buffer.flush()
        return
    target = Path(path)
    if target.is_dir():
        raise ConfigError(f"{path} is a directory; name a file in it")
    if target.exists() and not force:
        raise ConfigError(f"{path} is there already; name another file, or replace it with --force")
    try:
        with replacing(target, draft=target.with_name(f"{target.name}.part")) as file, make(file) as write:
            yield write
    except OSError as error:
        why = f"{path} cannot be written: {error.strerror}; free some space, or name another directory"
        raise ConfigError(why) from error


@contextmanager
def reading(path: str) -> Generator[Callable[[], Iterator[tuple[str, Row]]]]:
    """Give the block a function that yields all rows, each with its place (`line 3`). It can be called repeatedly.

    A missing file raises `ConfigError`; the function raises `MalformedFile` with the place of a malformed row.
    """
    with _opened(path) as file:
        name = "stdin" if path == STREAM else path
        magic = _part(file.read, len(_MAGIC), name)
        # By content and not by name, because stdin has no name.
        read = _read_parquet if magic == _MAGIC else _read_lines

        def rows() -> Iterator[tuple[str, Row]]:
            file.seek(0)
            return read(file, name)

        yield rows


@contextmanager
def _opened(path: str) -> Generator[IO[bytes]]:
    if path == STREAM:
        # A file is read twice: once to check all rows, once to import them.
        with tempfile.TemporaryFile() as file:
            shutil.copyfileobj(sys.stdin.buffer, file)
            file.seek(0)
            yield file
        return
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a FIFO would wait for somebody who writes
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    # A pipe (`<(...)` of a shell) cannot be read twice, and a device such as /dev/zero has no end.
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ConfigError(f"{path} is no file; name one, or give `-` and send it to stdin")
    with open(descriptor, "rb") as file:
        yield file


@contextmanager
def _lines_writer(file: IO[bytes]) -> Generator[Write]:
    def write(row: Row) -> None:
        file.write(_encode(dict(row)).encode("ascii") + b"\n")

    yield write


def _read_lines(file: IO[bytes], name: str) -> Iterator[tuple[str, Row]]:
    for number, line in enumerate(iter(partial(_part, file.readline, _LINE_BYTES + 1, name), b""), 1):
        if len(line) > _LINE_BYTES:
            most = f"{_LINE_BYTES >> 20} MiB"
            raise MalformedFile(f"{name}, line {number}: longer than {most}; put one object on each line")
        if number == 1:
            line = line.removeprefix(b"\xef\xbb\xbf")  # a byte order mark, which Windows editors write
        if not line.strip():
            continue
        place = f"line {number}"
        try:
            # Bytes and not text: `json` tells the encoding, and an error names the byte.
            row: Any = json.loads(line.rstrip(b"\r\n"))
        except UnicodeDecodeError as error:
            raise MalformedFile(f"{name}, {place}: not UTF-8 at byte {error.start}") from None
        except json.JSONDecodeError as error:
            hint = "; put one object on each line" if line.lstrip()[:1] == b"[" else ""
            raise MalformedFile(f"{name}, {place}: not JSON: {error.msg} at column {error.colno}{hint}") from None
        except (ValueError, RecursionError) as error:
            raise MalformedFile(f"{name}, {place}: not JSON that can be read: {error}") from None
        if not isinstance(row, dict):
            raise MalformedFile(f"{name}, {place}: not an object; put one object on each line")
        yield place, cast("Row", row)


def _part(read: Callable[[int], bytes], size: int, name: str) -> bytes:
    try:
        return read(size)
    except OSError as error:  # a disk that fails, or a share that is gone
        raise ConfigError(f"{name} cannot be read: {error.strerror}") from error


def _pyarrow() -> tuple[Any, Any]:
    try:
        return import_module("pyarrow"), import_module("pyarrow.parquet")
    except ImportError:
        raise ConfigError('Parquet needs pyarrow; pip install "art-patch[parquet]", or write .jsonl') from None


def _parquet_writer(columns: Mapping[str, Kind]) -> Callable[[IO[bytes]], Any]:
    pa, pq = _pyarrow()  # before the file is made
    text = pa.string()
    plain = {"json": text, "json_list": pa.list_(text), "text": text}
    plain |= {"number": pa.float64(), "integer": pa.int64(), "boolean": pa.bool_()}
    # Messages and tools are columns of type JSON, so that each row keeps its own keys: a table of structs would give
    # every row the keys of all others, as nulls. `datasets` gives JSON back as objects.
    shown = plain | {"json": pa.json_(), "json_list": pa.list_(pa.json_())}
    before = pa.schema([(name, plain[kind]) for name, kind in columns.items()])
    schema = pa.schema([(name, shown[kind]) for name, kind in columns.items()])

    def cell(value: Any, kind: Kind) -> Any:
        if value is None or kind not in ("json", "json_list"):
            return value
        return _encode(value) if kind == "json" else [_encode(each) for each in value]

    @contextmanager
    def make(file: IO[bytes]) -> Generator[Write]:
        waiting: list[dict[str, Any]] = []
        with pq.ParquetWriter(pa.PythonFile(file, mode="w"), schema, compression="zstd") as writer:

            def flush() -> None:
                if waiting:
                    # Made as strings and cast, because `from_pylist` cannot make extension types.
                    writer.write_table(pa.Table.from_pylist(waiting, schema=before).cast(schema))
                    waiting.clear()

            def write(row: Row) -> None:
                # A row group is written at once, so rows wait in memory until it is full.
                waiting.append({name: cell(row.get(name), kind) for name, kind in columns.items()})
                if len(waiting) >= _GROUP_ROWS:
                    flush()

            yield write
            flush()

    return make


def _read_parquet(file: IO[bytes], name: str) -> Iterator[tuple[str, Row]]:
    pa, pq = _pyarrow()
    number = 0
    try:
        table = pq.ParquetFile(pa.PythonFile(file, mode="r"))
        kept = {field.name for field in table.schema_arrow if _holds_json(pa, field.type)}
        for batch in table.iter_batches(batch_size=_PAGE_ROWS):
            for row in cast("Sequence[Row]", batch.to_pylist()):
                number += 1
                yield f"row {number}", {key: _cell(value, key in kept) for key, value in row.items()}
    except (pa.ArrowException, OSError, ValueError) as error:
        raise MalformedFile(f"{name}, after row {number}: not Parquet that can be read: {error}") from error


def _holds_json(pa: Any, kind: Any) -> bool:
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _holds_json(pa, kind.value_type)
    return getattr(kind, "extension_name", "") == "arrow.json"


def _cell(value: Any, is_json: bool) -> Any:
    if is_json:
        if isinstance(value, list):
            return [_cell(each, is_json) for each in cast("list[Any]", value)]
        return json.loads(value) if isinstance(value, str) else value
    return _without_nulls(value)


def _without_nulls(value: Any) -> Any:
    # Structs of a table have every key that any row has, null where the row had none.
    if isinstance(value, dict):
        pairs = cast("dict[str, Any]", value)
        return {key: _without_nulls(item) for key, item in pairs.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in cast("list[Any]", value)]
    return value
