"""Files of adapters: publishes, reads and deletes them.

A policy `NAME@STEP` is the directory `adapters_root/NAME@STEP`. It holds `adapter_config.json`,
`adapter_model.safetensors`, `MANIFEST.json` (with the sha256 of the other files and of the base model, and with how
the policy was made) and perhaps PEFT's `README.md`. The directory appears by an atomic rename and is never changed
afterwards. So what comes later, such as the result of the gate, is in the ledger alone. Reading follows no symbolic
link, opens plain files only, and hashes the same bytes that it returns. A file that is refused raises an
`AdapterRejected` that names the file and the remedy.

The module imports neither torch nor transformers, because the trainer, both engines and the command line share it.
"""

import errno
import hashlib
import hmac
import json
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, cast

from art_patch._lib.atomic_files import sync, take_place
from art_patch.errors import AdapterRejected

NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}@[0-9]{1,9}")
MANIFEST = "MANIFEST.json"
DATA = "data"  # entry of the manifest with the digests of what the policy learned from; no copy has it
CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"

_REQUIRED_FILES = frozenset({CONFIG, WEIGHTS})
_KNOWN_FILES = _REQUIRED_FILES | {"README.md"}
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
_SMALL_FILE_BYTES = 1 << 20  # of every file but the weights and the manifest, which names each run by a digest
_MANIFEST_BYTES = 16 << 20


def check_name(name: object) -> str:
    """Returns `name` if it is a well-formed policy name, else raises `AdapterRejected`."""
    if not isinstance(name, str) or not NAME_PATTERN.fullmatch(name):
        raise AdapterRejected(
            f"{name!r} is not a policy name. Use NAME@STEP: letters, digits, '.', '_', '-' (64 at most), '@', digits."
        )
    return name


@contextmanager
def unpublished(target: Path) -> Generator[Path]:
    """Yields a directory beside `target` for an adapter's files, deleted later unless `publish_adapter` took it."""
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    # A name with a leading dot is no policy name, so no engine can be asked to load what is half written. The same
    # parent means the same file system, which the rename needs.
    directory = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def publish_adapter(
    tmp_dir: str | os.PathLike[str], final_dir: str | os.PathLike[str], *, base_sha256: str,
    extra: Mapping[str, Any] | None = None,
) -> Path:  # fmt: skip
    """Publishes a finished adapter atomically and returns its final directory.

    The function writes `MANIFEST.json`, flushes every file and the directory to disk, and then renames `tmp_dir` to
    `final_dir`. After a crash at any moment the policy is either complete or absent.

    Args:
        tmp_dir: Directory with the adapter's files, on the same file system as `final_dir`.
        final_dir: `adapters_root/NAME@STEP`; must not exist, because a published policy is never changed.
        extra: More entries for the manifest, as JSON values: run id, step or parent policy, for example.
    """
    source, target = Path(tmp_dir), Path(final_dir)
    name = check_name(target.name)
    if os.path.lexists(target):
        raise AdapterRejected(f"{target} exists already and a policy never changes. Publish under the next step.")
    files = _list_files(name, source) - {MANIFEST}
    _check_file_set(name, files)
    hashes = {file: _hash_and_sync(source / file) for file in sorted(files)}
    manifest = {**(extra or {}), "files": hashes, "base_sha256": base_sha256}
    manifest_path = source / MANIFEST
    manifest_path.write_text(json.dumps(manifest, indent=2, sort_keys=True) + "\n")
    for file in (*files, MANIFEST):  # the directory kept others out so far; a copy of it may not
        (source / file).chmod(0o600)
    _hash_and_sync(manifest_path)
    sync(source)  # fsync of a file keeps its content; its name is kept by the directory
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        # No test before the rename can be enough: another process may publish between the two. The rename itself
        # fails on a directory that holds files, so the first process wins.
        take_place(source, target)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            reason = "another process published it meanwhile. Publish under the next step."
        elif error.errno == errno.EXDEV:
            reason = f"{source} lies on another file system. Write the adapter next to {target.parent} first."
        else:
            raise
        raise AdapterRejected(f"{target} could not be published: {reason}") from error
    return target


def data_digests(key: str, groups: Mapping[str, Iterable[str]], alone: Iterable[str]) -> dict[str, Any]:
    """Returns what the manifest says of the data of an update: a keyed digest of each group, and one of other runs.

    `groups` has the ids of each group's runs by its own id; `alone` are the runs in no group. The digests tell two
    updates on the same data from others. Without the project's `key` nobody can test whether an id is among them:
    apps choose some ids, and a name is easily guessed.
    """

    def digest(*ids: str) -> str:
        content = json.dumps(ids).encode()
        return hmac.digest(key.encode(), content, hashlib.sha256).hex()[:32]

    others = sorted(alone)
    return {
        "groups": [digest(group, *sorted(runs)) for group, runs in groups.items()],
        "runs_alone": len(others),
        "alone": digest("", *others) if others else None,
    }


def manifest_to_share(path: Path) -> str:
    """Returns the text of a manifest for a copy that leaves this machine: without the data's digests and the probe."""
    text = path.read_text("utf-8")
    manifest = parse_object(path.parent.name, MANIFEST, text.encode())
    kept = {name: value for name, value in manifest.items() if name not in (DATA, "probe")}  # it quotes a run
    return text if kept == manifest else json.dumps(kept, indent=2, sort_keys=True) + "\n"


def remove_adapter(root: Path, name: str) -> None:
    """Deletes the published adapter `root/name`, if there is one."""
    directory, hidden = root / name, root / f".{name}.discarded"
    if directory.is_dir():
        shutil.rmtree(hidden, ignore_errors=True)  # a process that was killed between the next two lines left it
        directory.rename(hidden)  # so that no other process sees a half-deleted policy
        shutil.rmtree(hidden)


def remove_unpublished(root: Path) -> None:
    """Deletes what killed processes left in `root`: adapters that were not published yet, or half deleted."""
    for directory in root.glob(".*@*.*"):
        shutil.rmtree(directory)


def adapter_directory(root: Path, name: str) -> Path:
    """Returns the resolved directory of the adapter `name` in `root`; refuses a symbolic link and a place outside."""
    real_root = root.resolve()
    directory = real_root / name
    if directory.is_symlink():
        raise AdapterRejected(f"{name}: {directory} is a symbolic link. Publish a real directory.")
    if not directory.is_dir():
        # Not final: a trainer may publish it a moment later.
        raise AdapterRejected(
            f"{name}: no directory {directory}. Publish the adapter there with publish_adapter().", final=False
        )
    if directory.resolve().parent != real_root:
        raise AdapterRejected(f"{name}: {directory} lies outside {real_root}. Publish the adapter inside it.")
    return directory


def _list_files(name: str, directory: Path) -> set[str]:
    entries = list(directory.iterdir())
    for entry in entries:
        if entry.is_symlink():
            raise AdapterRejected(f"{name}: {entry.name} is a symbolic link. Publish the file itself.")
        if not entry.is_file():
            raise AdapterRejected(f"{name}: {entry.name} is not a plain file. Remove it and publish again.")
    return {entry.name for entry in entries}


def _check_file_set(name: str, files: set[str]) -> None:
    if pickles := sorted(file for file in files if file.endswith(_PICKLES)):
        raise AdapterRejected(f"{name}: {some(pickles)} may run code when read. Save as {WEIGHTS} only.")
    if unknown := sorted(files - _KNOWN_FILES):
        raise AdapterRejected(f"{name}: {some(unknown)} does not belong to an adapter. Remove it and publish again.")
    if missing := sorted(_REQUIRED_FILES - files):
        raise AdapterRejected(f"{name}: {some(missing)} is missing. Save the adapter again and publish it.")


def read_verified(directory: Path, manifest: dict[str, Any], max_bytes: int) -> dict[str, bytes]:
    """Reads every file of an adapter, compares its sha256 with the manifest, and returns the contents by file name.

    Files beside those of the manifest are refused, and weights of more than `max_bytes`.
    """
    name = directory.name
    files = _list_files(name, directory) - {MANIFEST}
    _check_file_set(name, files)
    hashes = manifest.get("files")
    if not isinstance(hashes, dict):
        raise AdapterRejected(f"{name}: {MANIFEST} lists no files. Publish the adapter again with publish_adapter().")
    hashes = cast("dict[str, Any]", hashes)
    if set(hashes) != files:
        raise AdapterRejected(
            f"{name}: {MANIFEST} does not match the directory ({some(sorted(set(hashes) ^ files))}). "
            "Publish the adapter again; never edit a published one."
        )
    contents: dict[str, bytes] = {}
    for file in sorted(files):
        content = read_file(directory, file, max_bytes if file == WEIGHTS else _SMALL_FILE_BYTES)
        # The bytes in memory are hashed and then used: a second read of the file might find another content.
        if hashlib.sha256(content).hexdigest() != hashes[file]:
            raise AdapterRejected(
                f"{name}: {file} is not what {MANIFEST} promises (sha256 differs). It was changed or cut short after "
                "publishing; restore it or train the step again."
            )
        contents[file] = content
    return contents


def read_file(directory: Path, file: str, max_bytes: int) -> bytes:
    """Reads a plain file of an adapter's directory, of at most `max_bytes`; no link is followed."""
    try:
        # Somebody may have put a link or a FIFO there since the directory was listed; a FIFO would hang the server.
        descriptor = os.open(directory / file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise AdapterRejected(
            f"{directory.name}: {file} cannot be read ({error.strerror}). Publish the adapter with publish_adapter().",
            final=False,
        ) from error
    info = os.fstat(descriptor)  # of what was opened, whatever bears the name by now
    if not stat.S_ISREG(info.st_mode):
        os.close(descriptor)
        raise AdapterRejected(f"{directory.name}: {file} is not a plain file. Publish the adapter again.")
    with open(descriptor, "rb") as handle:
        if info.st_size > max_bytes:
            raise AdapterRejected(
                f"{directory.name}: {file} has {info.st_size} bytes, more than the limit of {max_bytes}. "
                "Train a smaller rank, or raise the limit."
            )
        return handle.read(max_bytes + 1)  # bounded too: the file may grow after the check


def read_json(directory: Path, file: str) -> dict[str, Any]:
    """Reads a file of an adapter's directory, of at most 16 MiB, as a JSON object."""
    return parse_object(directory.name, file, read_file(directory, file, _MANIFEST_BYTES))


def read_manifest(directory: Path) -> bytes:
    """Returns the content of an adapter's manifest, as `read_json` reads it."""
    return read_file(directory, MANIFEST, _MANIFEST_BYTES)


def parse_object(name: str, file: str, content: bytes) -> dict[str, Any]:
    """Parses `content` as a JSON object; an `AdapterRejected` names the adapter `name` and its file `file`."""
    try:
        parsed = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise AdapterRejected(f"{name}: {file} is not JSON ({error}). Publish the adapter again.") from error
    if not isinstance(parsed, dict):
        raise AdapterRejected(f"{name}: {file} is not a JSON object. Publish the adapter again.")
    return cast("dict[str, Any]", parsed)


def _hash_and_sync(path: Path) -> str:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        os.fsync(file.fileno())
    return digest


def some(names: list[str]) -> str:
    """Returns a short list for an error message: the first three names, and the number of the remaining ones."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


# Precision of a copy's weights; "auto" is the base's own. Here, so that the help of commands loads no numpy.
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
