"""`art-patch policies export`, `push`, `import` and `fork`: copy a policy to a directory, a hub, or into a project."""

from __future__ import annotations

import tempfile
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from art_patch import insights, pipeline, policies, store, types
from art_patch._lib.atomic_files import placing
from art_patch.cli import output
from art_patch.cli.followers import warn_if_rejected_there
from art_patch.cli.options import ActingProject
from art_patch.cli.typed_options import Option, command
from art_patch.errors import AdapterRejected, ConfigError
from art_patch.policies import Dtype
from art_patch.settings import Settings

POLICY = typer.Argument(help="NAME@STEP of a policy in any state.")
_ANY_RANK = 1 << 16  # a copy is not served, so no engine limits its rank


@dataclass(frozen=True, slots=True)
class Copying:
    """The options that choose what a copy of a policy contains."""

    merged: Annotated[bool, Option("Merge base and LoRA into one model. Default: the LoRA in PEFT's layout.")] = False
    dtype: Annotated[
        Dtype, Option("Precision of merged weights: auto for the base's own, or float32, bfloat16, float16.")
    ] = "auto"
    base: Annotated[Path | None, Option("Directory of the base model, if it has been moved.")] = None
    base_id: Annotated[
        str | None, Option("Name of the base on the hub, ORG/NAME. Default: the name in the hub's cache.")
    ] = None
    license: Annotated[str | None, Option("License for the model card, such as apache-2.0. Default: none.")] = None


@command
def export_policy(
    policy: Annotated[str, POLICY],
    directory: Annotated[Path, typer.Argument(help="Directory to write; it is created, or must be empty.")],
    copying: Copying,
    project: ActingProject,
) -> None:
    """Write a policy to a directory: as a LoRA for PEFT, or merged for transformers, vLLM and llama.cpp.

    A LoRA goes with a manifest that `policies import` reads in another project: its origin, and the results of its gate
    and canary test. First the LoRA's files are checked against its manifest, and its base model is checked. The
    directory appears only when it is complete, and only you can read it. The audit log notes who exported which policy.
    No engine is needed.

    Exit codes: 0 written; 2 the directory is not empty; 19 there is no such policy; 9 the base is missing; 11 the LoRA
    is damaged, or belongs to another base.
    """
    _require(copying.merged)
    target = directory.absolute()
    with project.opened() as (settings, opened):
        source = _read(settings, opened, policy, copying)
        with placing(target) as work, output.bars(quiet=project.as_json) as progress:
            local = source.base_id or str(source.base.directory.absolute())
            copy = _write(source, copying, work, base_name=local, progress=progress)
            detail = copy.detail() | {"directory": str(target)}
            opened.transfers.note_copy("export policy", who=project.actor("policies export"), detail=detail)
    if not project.answered(copy.facts() | {"directory": str(target)}):
        output.say(f"{copy.words()} in {output.visible(target)}")
        if copy.manifest_sha256 is not None:
            output.say(f"  `policies import --sha256 {copy.manifest_sha256}` takes this copy alone")


@command
def import_policy(
    directory: Annotated[
        str,
        typer.Argument(
            help="Directory of `policies export`, or of a LoRA of PEFT; or OWNER/NAME[@REVISION] on the hub."
        ),
    ],
    project: ActingProject,
    name: Annotated[
        str | None, Option("NAME@STEP in this project. Default: its own name if that is free, else the next step.")
    ] = None,
    sha256: Annotated[
        str | None,
        Option("Refuse all but the copy whose manifest has this hash, or the LoRA whose weights have it."),
    ] = None,
) -> None:
    """Import a policy from another project, such as from staging, with its origin and the results of its tests.

    Or adopt a plain LoRA of PEFT, as another trainer wrote it: of any rank, on any linear layers. Nothing tells on what
    base it was trained, so PEFT computes a few log-probabilities, which the engine must compute, too.

    The LoRA is checked: files, hashes, base model, and with a running engine whether that can load it. It becomes a
    candidate. It serves nobody until it is tested here: `art-patch promote NAME@STEP --canary 5`. If it was rejected
    where it comes from, the command says by what.

    Exit codes: 0 imported; 2 the name exists; 11 the copy is damaged, is not that copy, belongs to another base, or the
    engine refuses it; 16 the hub has it not for you, or cannot be reached; 19 this project has no base model yet.
    """
    _require(False)
    with policies.lora_directory(directory) as place, project.opened() as (settings, opened):
        # A LoRA that brings no probe along gets one, for which the base is loaded.
        _require((place / policies.WEIGHTS).exists() and not (place / policies.MANIFEST).exists())
        engine, who = pipeline.find_engine(settings, opened.ledger), project.actor("policies import")
        found = pipeline.import_policy(opened, engine, settings.adapters, place, name=name, sha256=sha256, who=who)
    policy, origin = found.policy, found.policy.metrics[types.IMPORTED]
    facts = {"policy": policy.name, "state": policy.state, "rank": found.rank, "loaded": found.loaded}
    facts |= {"rejected_there": insights.rejected_there(policy), **origin}
    if project.answered(facts):
        return
    tried = "the engine can load it" if found.loaded else "no engine runs that could try to load it"
    output.say(f"{policy.name} is a candidate, {origin['evidence']['policy']} where it comes from; {tried}")
    if "weights_sha256" in origin:
        output.say("  on which base it was trained is not on record; names and shapes of its layers fit")
    elif "state" not in origin["evidence"]:  # the directory of an adapter, which no test has written into
        output.say("  whether it was tested or rejected there is not on record")
    output.say(f"  `art-patch policies show {policy.name}` shows its evidence")
    output.say(f"  `art-patch promote {policy.name} --canary 5` tests it here; before that it answers nobody")
    warn_if_rejected_there(policy)


@command
def fork_policy(
    policy: Annotated[str, POLICY],
    project: ActingProject,
    agent: Annotated[str, Option("Name of the agent that begins with this policy.", name="as")],
    into: Annotated[str | None, Option("Project of that agent. Default: one of the agent's name.")] = None,
) -> None:
    """Begin another agent with a policy: copy it into another project of this home, with the results of its tests.

    A project that is not there yet begins with the same base model. The policy is a candidate there, as one that was
    imported: it answers nobody until it is tested, such as with `art-patch promote other@1 --canary 5`.

    Exit codes: 0 copied; 2 it is the base model, or the project has another agent; 11 the LoRA is damaged, or that
    project has another base; 19 there is no such policy.
    """
    _require(False)
    target = project.settings(project=into or agent)
    who = project.actor("policies fork")
    with project.opened() as (settings, opened):
        if target.project == settings.project:
            raise ConfigError(f"{target.project} is the policy's own project, and has one agent; name another --into")
        source, copy = pipeline.read_to_fork(opened, settings.adapters, policy, agent=agent)
        with closing(store.open_store(target.store_url, project=target.project)) as other:
            engine = pipeline.find_engine(target, other.ledger)
            found = pipeline.fork_policy(source, copy, other, engine, target.adapters, agent=agent, who=who)
        detail = {"policy": policy, "directory": str(target.adapters / found.policy.name)}
        opened.transfers.note_copy("export policy", who=who, detail=detail)
    facts = {
        "policy": found.policy.name,
        "project": target.project,
        "state": found.policy.state,
        "loaded": found.loaded,
    }
    if project.answered(facts | found.policy.metrics[types.IMPORTED]):
        return
    output.say(f"{found.policy.name} is a candidate in the project {target.project}, a copy of {policy}")
    output.say(f"  `art-patch promote {found.policy.name} --canary 5 --project {target.project}` tests it there")


@command
def push(
    policy: Annotated[str, POLICY],
    repository: Annotated[str, typer.Argument(metavar="REPO", help="Repository on the hub: OWNER/NAME.")],
    copying: Copying,
    project: ActingProject,
    private: Annotated[bool | None, Option("Visibility of a new repository. Default: private.", off="--public")] = None,
    update: Annotated[
        bool, Option("Add a commit to an existing repository; it replaces the model files there.")
    ] = False,
    dry_run: Annotated[bool, Option("Make the files, print what would be sent, and contact no hub.")] = False,
) -> None:
    """Upload a policy to a model hub: Hugging Face's, or the one that HF_ENDPOINT names.

    HF_TOKEN or `hf auth login` is needed. The upload holds weights, configuration, tokenizer and a model card with the
    gate's metrics. It holds no recorded text and no path of this machine. Before anything is sent, the audit log notes
    who sends which policy.

    Exit codes: 0 sent, or shown; 2 no token, or an option is wrong; 19 there is no such policy; 9 the base is missing;
    11 the LoRA is damaged, or belongs to another base; 16 the hub refused, or cannot be reached.
    """
    if update and private is not None:
        raise ConfigError("--update leaves a repository as visible as it is; leave --private and --public out")
    policies.check_repository(repository)
    _require(copying.merged, "huggingface_hub")
    hub = None if dry_run else policies.Hub()
    with project.opened() as (settings, opened):
        source = _read(settings, opened, policy, copying)
        with (
            tempfile.TemporaryDirectory(prefix=".push.", dir=settings.directory) as work,
            output.bars(quiet=project.as_json) as shown,
        ):
            copy = _write(source, copying, Path(work), base_name=source.base_id, progress=shown)
            # With --update the repository keeps its visibility, whichever that is.
            visibility = None if update else private is not False
            facts: dict[str, Any] = {"repository": repository, "private": visibility, "dry_run": dry_run}
            if hub is None:
                _say_push(copy, facts, project)
                return
            opened_there = hub.open_repository(repository, private=private is not False, update=update)
            facts |= {"url": opened_there.url, "private": opened_there.private}
            who, detail, sizes = project.actor("policies push"), copy.detail() | facts, copy.files
            # Noted before and after: an upload that breaks off may have reached the hub.
            opened.transfers.note_copy("push policy", who=who, detail=detail)
            facts["commit"] = hub.upload(
                opened_there, Path(work), list(sizes), message=f"{policy} by art-patch",
                sent=lambda done, name: shown("upload", done, len(sizes), f"{name}, {_size(sizes[name])}"),
            )  # fmt: skip
            opened.transfers.note_copy("pushed policy", who=who, detail=detail | {"commit": facts["commit"]})
    _say_push(copy, facts, project)


@dataclass(frozen=True, slots=True)
class _Source:
    """A policy that was checked against its manifest and its base."""

    policy: types.Policy
    base: policies.BaseModel
    base_id: str | None
    adapter: policies.ValidatedAdapter


@dataclass(frozen=True, slots=True)
class _Copy:
    """The files of a policy as they were written, with their sizes in bytes."""

    source: _Source
    merged: policies.Merged | None
    files: dict[str, int]
    manifest_sha256: str | None  # a merged model has no manifest

    def facts(self) -> dict[str, Any]:
        gap_nats, left_out = (self.merged.gap_nats, self.merged.left_out) if self.merged else (None, ())
        return self.detail() | {"probe_gap_nats": gap_nats, "left_out": list(left_out), "files": self.files}

    def detail(self) -> dict[str, Any]:
        # The part of the answer that the audit log keeps.
        policy = self.source.policy
        kind, dtype = ("merged", self.merged.dtype) if self.merged else ("adapter", None)
        return {
            "policy": policy.name, "kind": kind, "dtype": dtype, "adapter_sha256": self.source.adapter.sha256,
            "base_sha256": policy.base_sha256, "base_id": self.source.base_id, "bytes": sum(self.files.values()),
            "manifest_sha256": self.manifest_sha256,
        }  # fmt: skip

    def words(self) -> str:
        size = f"{len(self.files)} files, {_size(sum(self.files.values()))}"
        if self.merged is None:
            return f"{self.source.policy.name}: LoRA, {size}"
        words = f"{self.source.policy.name}: merged model in {self.merged.dtype}, {size}"
        if self.merged.gap_nats is not None:
            words += f", within {self.merged.gap_nats:.1g} nats of what its trainer computed"
        if self.merged.left_out:
            words += f", without {policies.some(list(self.merged.left_out))}, which transformers does not load"
        return words


def _require(merged: bool, *more: str) -> None:
    """Raise `ConfigError` for a package that is missing, before any file is read or written."""
    for package in ("numpy", "safetensors", *(("torch", "transformers", "peft") if merged else ()), *more):
        try:
            import_module(package)
        except ModuleNotFoundError:
            raise ConfigError(f'a copy of a policy needs {package}; run: pip install "art-patch[train]"') from None


def _read(settings: Settings, opened: store.Store, name: str, copying: Copying) -> _Source:
    if copying.dtype != "auto" and not copying.merged:
        raise ConfigError("--dtype is of merged weights; give it with --merged")
    policy = pipeline.require_policy_to_copy(opened, name)
    base = policies.read_base_model(copying.base or Path(policy.base))
    # A LoRA on another base would load without an error and answer nonsense.
    if base.sha256 != policy.base_sha256:
        raise AdapterRejected(
            f"{name} was trained on {policy.base} (fingerprint {policy.base_sha256[:12]}), and what lies at "
            f"{base.directory} is another model ({base.sha256[:12]}); name its own with --base"
        )
    adapter = policies.validate_adapter(settings.adapters, name, base, max_rank=_ANY_RANK)
    return _Source(policy, base, copying.base_id or policies.hub_id_of(policy.base), adapter)


def _write(source: _Source, copying: Copying, work: Path, *, base_name: str | None, progress: output.Bars) -> _Copy:
    merged = None
    if copying.merged:
        step = partial(progress, "merge")
        merged = policies.write_merged(source.adapter, source.base, work, dtype=copying.dtype, step=step)
    else:
        policies.write_adapter(source.adapter, work, base_name=base_name)
    dtype, found = merged.dtype if merged else None, source.adapter
    card = policies.Copied(source.policy, found.sha256, found.rank, dtype, source.base_id, copying.license)
    policies.write_card(card, work)
    sha256 = None if copying.merged else policies.write_manifest(source.policy, work)
    return _Copy(source, merged, {path.name: path.stat().st_size for path in sorted(work.iterdir())}, sha256)


def _say_push(copy: _Copy, facts: dict[str, Any], project: ActingProject) -> None:
    if project.answered(copy.facts() | facts):
        return
    seen = {True: "private", False: "public", None: "as visible as it is"}[facts["private"]]
    if facts["dry_run"]:
        output.say(f"nothing was sent; to {facts['repository']} ({seen}) would go {copy.words()}")
    else:
        output.say(f"{copy.words()}, at {facts['url']} ({seen}), commit {facts['commit'][:12]}")
    for name, size in copy.files.items():
        output.say(f"  {name}  {_size(size)}")


def _size(size: float) -> str:
    """Return a size in units of 1000, as model hubs show it."""
    for unit in ("B", "kB", "MB"):
        if size < 1_000:
            return f"{size:.3g} {unit}"
        size /= 1_000
    return f"{size:.3g} GB"
