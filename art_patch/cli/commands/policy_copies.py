"""`art-patch policies export` and `art-patch policies push`: a policy's weights for tools that know nothing of us."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from art_patch.cli.options.opening import opened_store
from art_patch.cli.options.shared import HomeOption, JsonOption, ProjectOption, StoreOption, WhoOption, who_am_i
from art_patch.policies import Dtype

if TYPE_CHECKING:
    from art_patch.policies import BaseModel, Merged, ValidatedAdapter
    from art_patch.settings import Settings
    from art_patch.store import Store
    from art_patch.types import Policy

PolicyArgument = Annotated[str, typer.Argument(help="NAME@STEP, in whatever state.")]
MergedOption = Annotated[
    bool, typer.Option("--merged", help="Base and LoRA as one model, instead of the LoRA in PEFT's layout.")
]
DtypeOption = Annotated[
    Dtype, typer.Option("--dtype", help="Of merged weights: the base's own, or float32, bfloat16, float16.")
]
BaseOption = Annotated[
    Path | None,
    typer.Option("--base", help="Where the base model lies, if it was moved since.", show_default=False),
]
BaseIdOption = Annotated[
    str | None,
    typer.Option("--base-id", help="The base's name on the hub, ORG/NAME; known of one from the hub's cache."),
]
LicenseOption = Annotated[
    str | None, typer.Option("--license", help="For the card, as the hub writes it: apache-2.0; none unless given.")
]


def export_policy(
    policy: PolicyArgument,
    directory: Annotated[Path, typer.Argument(help="Where to; is made, or empty.")],
    merged: MergedOption = False,
    dtype: DtypeOption = "auto",
    base: BaseOption = None,
    base_id: BaseIdOption = None,
    license: LicenseOption = None,
    project: ProjectOption = None,
    home: HomeOption = None,
    store: StoreOption = None,
    who: WhoOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write a policy as PEFT reads a LoRA, or merged, as transformers, vLLM and llama.cpp read a model.

    The LoRA is checked against its manifest and its base first. The directory appears when it is whole, and can be read
    by you alone; the audit log says who took what. Needs no engine.
    Exit codes: 0 written; 2 the directory is not empty; 8 there is no such policy; 9 the base is gone; 11 the LoRA is
    damaged, or of another base.
    """
    from art_patch._lib.atomic_files import placing
    from art_patch.cli.views.output import answer, bars, stdout
    from art_patch.cli.views.safe_text import visible

    _require(merged)
    target, given = directory.absolute(), _Given(merged, dtype, base, base_id, license)
    with opened_store(project=project, home=home, store=store) as (settings, opened):
        source = _read(settings, opened, policy, given)
        with placing(target) as work, bars(quiet=as_json) as progress:
            local = source.base_id or str(source.base.directory.absolute())
            copy = _write(source, given, work, base_name=local, progress=progress)
            detail = copy.detail() | {"directory": str(target)}
            opened.transfers.note_copy("export policy", who=who_am_i(who, "policies export"), detail=detail)
    if as_json:
        answer(copy.facts() | {"directory": str(target)})
        return
    stdout().print(f"{copy.words()} in {visible(str(target))}", markup=False, soft_wrap=True)


def push(
    policy: PolicyArgument,
    repository: Annotated[str, typer.Argument(metavar="REPO", help="OWNER/NAME on the hub.")],
    merged: MergedOption = False,
    dtype: DtypeOption = "auto",
    private: Annotated[
        bool | None,
        typer.Option("--private/--public", help="Who sees a new repository.  [default: private]", show_default=False),
    ] = None,
    update: Annotated[
        bool, typer.Option("--update", help="Add a commit to a repository that is there; its model files give way.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Make the files, say what would be sent, and ask nobody.")
    ] = False,
    base: BaseOption = None,
    base_id: BaseIdOption = None,
    license: LicenseOption = None,
    project: ProjectOption = None,
    home: HomeOption = None,
    store: StoreOption = None,
    who: WhoOption = None,
    as_json: JsonOption = False,
) -> None:
    """Send a policy to a model hub: Hugging Face's, or the one of HF_ENDPOINT. HF_TOKEN or `hf auth login` is needed.

    Weights, configuration, tokenizer and a card that says what was measured; nothing that was recorded, no path of
    yours. Private unless you say --public. The audit log says who sent what before it is sent.
    Exit codes: 0 sent, or shown; 2 no token, or an option is wrong; 8 there is no such policy; 9 the base is gone; 11
    the LoRA is damaged, or of another base; 16 the hub refused, or cannot be reached.
    """
    from art_patch.cli.views.output import bars
    from art_patch.errors import ConfigError
    from art_patch.policies import Hub, check_repository

    if update and private is not None:
        raise ConfigError("--update leaves a repository as visible as it is; leave --private and --public out")
    check_repository(repository)
    _require(merged, "huggingface_hub")
    hub, given = None if dry_run else Hub(), _Given(merged, dtype, base, base_id, license)
    with opened_store(project=project, home=home, store=store) as (settings, opened):
        source = _read(settings, opened, policy, given)
        with tempfile.TemporaryDirectory(prefix=".push.", dir=settings.directory) as work, bars(quiet=as_json) as shown:
            copy = _write(source, given, Path(work), base_name=source.base_id, progress=shown)
            facts: dict[str, Any] = {"repository": repository, "private": private is not False, "dry_run": dry_run}
            if update:
                facts["private"] = None  # as it is
            if hub is None:
                _say_push(copy, facts, as_json)
                return
            opened_there = hub.open_repository(repository, private=private is not False, update=update)
            facts |= {"url": opened_there.url, "private": opened_there.private}
            me, detail = who_am_i(who, "policies push"), copy.detail() | facts
            opened.transfers.note_copy("push policy", who=me, detail=detail)
            sizes = copy.files
            facts["commit"] = hub.upload(
                opened_there, Path(work), list(sizes), message=f"{policy} by art-patch",
                sent=lambda done, name: shown("upload", done, len(sizes), f"{name}, {_size(sizes[name])}"),
            )  # fmt: skip
            opened.transfers.note_copy("pushed policy", who=me, detail=detail | {"commit": facts["commit"]})
    _say_push(copy, facts, as_json)


@dataclass(frozen=True, slots=True)
class _Given:
    """What the command line says about the copy."""

    merged: bool
    dtype: Dtype
    base: Path | None
    base_id: str | None
    license: str | None


@dataclass(frozen=True, slots=True)
class _Source:
    """A policy that was checked."""

    policy: Policy
    base: BaseModel
    base_id: str | None
    adapter: ValidatedAdapter


@dataclass(frozen=True, slots=True)
class _Copy:
    """A policy's files, written."""

    source: _Source
    merged: Merged | None
    files: dict[str, int]

    def facts(self) -> dict[str, Any]:
        """What the command answers."""
        gap_nats, left_out = (self.merged.gap_nats, self.merged.left_out) if self.merged else (None, ())
        return self.detail() | {"probe_gap_nats": gap_nats, "left_out": list(left_out), "files": self.files}

    def detail(self) -> dict[str, Any]:
        """What the audit log keeps."""
        policy = self.source.policy
        kind, dtype = ("merged", self.merged.dtype) if self.merged else ("adapter", None)
        return {
            "policy": policy.name, "kind": kind, "dtype": dtype, "adapter_sha256": self.source.adapter.sha256,
            "base_sha256": policy.base_sha256, "base_id": self.source.base_id, "bytes": sum(self.files.values()),
        }  # fmt: skip

    def words(self) -> str:
        """The same for a reader."""
        from art_patch.policies import some

        size = f"{len(self.files)} files, {_size(sum(self.files.values()))}"
        if self.merged is None:
            return f"{self.source.policy.name}: LoRA, {size}"
        words = f"{self.source.policy.name}: merged model in {self.merged.dtype}, {size}"
        if self.merged.gap_nats is not None:
            words += f", within {self.merged.gap_nats:.1g} nats of what its trainer computed"
        if self.merged.left_out:
            words += f", without {some(list(self.merged.left_out))}, which transformers does not load"
        return words


def _require(merged: bool, *more: str) -> None:
    """Name what has to be installed, before anything is done."""
    from art_patch.errors import ConfigError

    for package in ("numpy", "safetensors", *(("torch", "transformers", "peft") if merged else ()), *more):
        try:
            import_module(package)
        except ModuleNotFoundError:
            raise ConfigError(f'a copy of a policy needs {package}; run: pip install "art-patch[train]"') from None


def _read(settings: Settings, store: Store, name: str, given: _Given) -> _Source:
    """Check the policy against its manifest and its base, before anything is written."""
    from art_patch.errors import AdapterRejected, ConfigError, StoreError
    from art_patch.policies import hub_id_of, read_base_model, validate_adapter

    if given.dtype != "auto" and not given.merged:
        raise ConfigError("--dtype is of merged weights; give it with --merged")
    policy = store.ledger.policy(name)
    if policy is None:
        raise StoreError(f"there is no policy {name!r}; `art-patch policies` lists them")
    if policy.path is None:
        raise ConfigError(f"{name} is the base model itself, which lies at {policy.base}; there is nothing to copy")
    base = read_base_model(given.base or Path(policy.base))
    if base.sha256 != policy.base_sha256:
        raise AdapterRejected(
            f"{name} was trained on {policy.base} (fingerprint {policy.base_sha256[:12]}), and what lies at "
            f"{base.directory} is another model ({base.sha256[:12]}); name its own with --base"
        )
    adapter = validate_adapter(settings.adapters, name, base, max_rank=_ANY_RANK)
    return _Source(policy, base, given.base_id or hub_id_of(policy.base), adapter)


_ANY_RANK = 1 << 16
"""No engine serves it, so none sets a limit."""


def _write(
    source: _Source, given: _Given, work: Path, *, base_name: str | None, progress: Callable[[str, int, int, str], None]
) -> _Copy:
    from art_patch.policies import Copied, write_adapter, write_card, write_merged

    merged = None
    if given.merged:
        merged = write_merged(source.adapter, source.base, work, dtype=given.dtype, step=partial(progress, "merge"))
    else:
        write_adapter(source.adapter, work, base_name=base_name)
    dtype = merged.dtype if merged else None
    card = Copied(source.policy, source.adapter.sha256, source.adapter.rank, dtype, source.base_id, given.license)
    write_card(card, work)
    return _Copy(source, merged, {path.name: path.stat().st_size for path in sorted(work.iterdir())})


def _say_push(copy: _Copy, facts: dict[str, Any], as_json: bool) -> None:
    from art_patch.cli.views.output import answer, stdout

    if as_json:
        answer(copy.facts() | facts)
        return
    console = stdout()
    seen = {True: "private", False: "public", None: "as visible as it is"}[facts["private"]]
    if facts["dry_run"]:
        console.print(
            f"nothing was sent; to {facts['repository']} ({seen}) would go {copy.words()}", markup=False, soft_wrap=True
        )
    else:
        console.print(
            f"{copy.words()}, at {facts['url']} ({seen}), commit {facts['commit'][:12]}", markup=False, soft_wrap=True
        )
    for name, size in copy.files.items():
        console.print(f"  {name}  {_size(size)}", markup=False, soft_wrap=True)


def _size(size: float) -> str:
    for unit in ("B", "kB", "MB"):
        if size < 1_000:
            return f"{size:.3g} {unit}"
        size /= 1_000
    return f"{size:.3g} GB"
