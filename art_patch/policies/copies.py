"""Writes a copy of a policy for other tools, the LoRA alone in PEFT's layout or merged into its base, and uploads it.

In: an adapter that passed `validate_adapter`, whose files are not read again, the base model, and the ledger's record
of the policy. Out: files in a directory that the caller made, among them a `README.md` (the model card).

transformers writes the merged model. The base's tokenizer files, chat template and generation config are copied beside
it unchanged. The merged model must have no tensor that the base lacks. If the trainer stored a probe, it must also
compute the trainer's log-probabilities.

A copy holds no path of this machine. That of a LoRA gets a `MANIFEST.json` of its own (`evidence`), without what the
trainer's manifest says of the data. The model card is written from the ledger's record alone, without texts of users,
trajectories, names of people and the reasons that people typed for decisions. It states a licence only if the user gave
one.

`Hub` uploads large files one by one, and then one commit makes all files visible. A push that fails before the commit
leaves an existing repository unchanged and a new one empty. An existing repository is changed only with `update=True`.
Nothing is sent before `Hub.open_repository` is called. `HF_ENDPOINT` sets the address of the hub. The token comes from
`HF_TOKEN` or from `hf auth login`. Every error of the hub or of the connection is raised as a `HubError`.
"""

import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, cast

from art_patch.errors import AdapterRejected, ConfigError, HubError, ModelNotFound
from art_patch.policies.base_models import BaseModel, load_model, read_base_model
from art_patch.policies.files import CONFIG, MANIFEST, WEIGHTS, Dtype, some
from art_patch.policies.validation import Probe, ValidatedAdapter, check_probe
from art_patch.types import Policy

Step = Callable[[int, int, str], None]  # called with steps done, their total, and what was done last

README = "README.md"
SHARD_SIZE = "5GB"
_STEPS = 4

# Files of a base that a merged model takes over as they are.
BESIDE_WEIGHTS = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "vocab.txt", "merges.txt", "spiece.model", "sentencepiece.bpe.model", "tekken.json", "tiktoken.model",
    "chat_template.jinja", "chat_template.json", "generation_config.json",
)  # fmt: skip
_WRITTEN = frozenset({README, "config.json", CONFIG, MANIFEST, *BESIDE_WEIGHTS})


@dataclass(frozen=True, slots=True)
class Merged:
    """Facts about a merged model that `write_merged` wrote."""

    dtype: str  # of the merged weights, such as "bfloat16"
    gap_nats: float | None  # the probe's largest difference from the trainer's log-probabilities, if there is a probe
    left_out: tuple[str, ...]  # tensors of the base's files that are not in the merged model: transformers skips them


def write_adapter(adapter: ValidatedAdapter, directory: Path, *, base_name: str | None) -> None:
    """Writes the LoRA in PEFT's layout into `directory`; its config names the base model by `base_name`, if given."""
    # The trainer's config names the base by a path of this machine.
    config = {**adapter.config, "base_model_name_or_path": base_name}
    (directory / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    (directory / WEIGHTS).write_bytes(adapter.weights)


def write_merged(
    adapter: ValidatedAdapter, base: BaseModel, directory: Path, *, dtype: Dtype = "auto", step: Step
) -> Merged:
    """Merges the LoRA, which was checked against `base`, into it and writes one model into `directory`.

    Args:
        dtype: Precision of the written weights; "auto" keeps the base's. The LoRA's update is computed in float32, and
            its sum with the base weight is rounded once. In bfloat16 this rounding loses a part of small updates.
        step: Called after each of four steps with the number of steps done, their total, and what was done last.

    Raises:
        ConfigError: The base model is quantised; a LoRA is not merged into quantised weights.
        ModelNotFound: transformers cannot load the base model.
        AdapterRejected: The LoRA cannot be merged: it changes a language head that is tied to the embedding, the merged
            tensors differ from the base's in name or shape, or the model's log-probabilities differ from the trainer's.
    """
    from transformers import AutoTokenizer

    if "quantization_config" in json.loads((base.directory / "config.json").read_bytes()):
        raise ConfigError(f"{base.directory} is quantised, and a LoRA is not merged into that; export without --merged")
    model = _load(base.directory, dtype)
    step(1, _STEPS, "the base is loaded")
    model = _merged(model, adapter)
    step(2, _STEPS, f"{len(adapter.modules)} layers are merged")
    chosen = str(model.dtype).removeprefix("torch.")
    gap_nats = None if adapter.probe is None else _proven(adapter.name, adapter.probe, model, chosen)
    _save(model, base.directory, directory)
    step(3, _STEPS, "written")
    left_out = _left_out(adapter, base, directory)
    AutoTokenizer.from_pretrained(directory)  # type: ignore[no-untyped-call]  # does it load from these files alone?
    step(4, _STEPS, "checked")
    return Merged(chosen, gap_nats, left_out)


def _load(directory: Path, dtype: Dtype) -> Any:
    import torch
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # the command shows its own
    wanted: Any = "auto" if dtype == "auto" else getattr(torch, dtype)
    try:
        model: Any = load_model(directory, dtype=wanted)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ModelNotFound(f"{directory} cannot be loaded: {error}") from error
    return model.eval().requires_grad_(False)


def _merged(model: Any, adapter: ValidatedAdapter) -> Any:
    import torch
    from peft import get_peft_model

    if model.config.tie_word_embeddings and "lm_head" in adapter.modules:
        raise AdapterRejected(
            f"{adapter.name} changes lm_head, which the base shares with its embedding; merged, both would change. "
            "Export without --merged."
        )
    with warnings.catch_warnings():
        # peft 0.21 asks transformers 5.23 by the old name
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        tuned = get_peft_model(model, adapter.peft_config(task_type="CAUSAL_LM"))
    # In float32 whatever the base's precision: peft multiplies A and B in theirs, and only the sum is rounded.
    adapter.fill(model, "default", torch.float32)
    # safe_merge: a product that is not finite raises here, before a file is written.
    return cast("Any", tuned).merge_and_unload(progressbar=False, safe_merge=True)


def _proven(name: str, probe: Probe, model: Any, dtype: str) -> float:
    """Returns the largest distance in nats between the merged model and the trainer; refuses one beyond rounding."""
    import torch

    # Names of axes: T tokens scored, V vocabulary.
    with torch.inference_mode():
        logits_TV = model(torch.tensor([probe.token_ids])).logits[0, :-1].float()
    targets_T1 = torch.tensor(probe.targets).unsqueeze(1)
    computed = logits_TV.log_softmax(-1).gather(1, targets_T1).squeeze(1).tolist()
    return check_probe(name, probe, computed, None, dtype=dtype)


def _save(model: Any, base: Path, directory: Path) -> None:
    from transformers import GenerationConfig

    kept = [name for name in BESIDE_WEIGHTS if (base / name).is_file()]
    if "generation_config.json" in kept:
        # Some bases hold settings there that transformers refuses to save, though models work with them. So an empty
        # one is saved here, and the base's own file is copied over it.
        model.generation_config = GenerationConfig()
    model.save_pretrained(directory, max_shard_size=SHARD_SIZE)
    for name in kept:
        shutil.copyfile(base / name, directory / name)


def _left_out(adapter: ValidatedAdapter, base: BaseModel, directory: Path) -> tuple[str, ...]:
    """Returns the base's tensors that were not written; refuses a written tensor that the base has not."""
    written, known = read_base_model(directory).weight_shapes, base.weight_shapes
    # transformers may name or fuse a model's tensors otherwise than its checkpoint does, and write them in that form.
    other = [name for name, shape in written.items() if known.get(name) != shape]
    other += [f"{module}.weight" for module in adapter.modules if f"{module}.weight" not in written]
    if other:
        raise AdapterRejected(
            f"{adapter.name}: merged, the model has other tensors than its base ({some(sorted(other))}), so other "
            "tools may not read it. Export without --merged, and serve base and adapter."
        )
    return tuple(sorted(known.keys() - written.keys()))


@dataclass(frozen=True, slots=True)
class Copied:
    """Facts about a copy of a policy, from which its model card is written."""

    policy: Policy
    adapter_sha256: str  # of the file with the LoRA's weights, as hex digits
    rank: int
    merged_dtype: str | None = None  # precision of the merged weights; `None` if the copy is the LoRA alone
    base_id: str | None = None  # on the hub
    license: str | None = None  # the hub's identifier of it, such as "apache-2.0", if the user gave one


def hub_id_of(base: str) -> str | None:
    """Returns the hub id `ORG/NAME` of a base model from its directory in the Hugging Face cache, else `None`."""
    # The cache's layout: .../models--ORG--NAME/snapshots/COMMIT
    parts = PurePath(base).parts
    if len(parts) < 3 or parts[-2] != "snapshots" or not parts[-3].startswith("models--"):
        return None
    return parts[-3].removeprefix("models--").replace("--", "/")


def write_card(copied: Copied, directory: Path) -> None:
    """Writes the model card, a `README.md` with the hub's front matter, into the `directory` of the copy."""
    (directory / README).write_text(model_card(copied))


def model_card(copied: Copied) -> str:
    """Returns the text of a copy's model card, with the results of its gate and its test beside the champion."""
    licence = "Its author has not stated one. The base model's licence holds in any case."
    if copied.license:
        licence = f"`{copied.license}`, as its author says. The base model's licence holds besides."
    lines = [*_front_matter(copied), "", f"# {copied.policy.name}", "", *_what_it_is(copied), ""]
    lines += [*_measured(copied.policy), *_watched(copied.policy), "", "## Licence", "", licence, ""]
    return "\n".join(lines)


def _front_matter(copied: Copied) -> list[str]:
    merged = copied.merged_dtype is not None
    facts: dict[str, Any] = {
        "library_name": "transformers" if merged else "peft",
        "pipeline_tag": "text-generation",
        "tags": ["art-patch"] if merged else ["art-patch", "lora"],
    }
    if copied.base_id:
        facts |= {"base_model": copied.base_id, "base_model_relation": "finetune" if merged else "adapter"}
    if copied.license:
        facts["license"] = copied.license
    # JSON is YAML, and quotes whatever a name may hold
    return ["---", *(f"{name}: {json.dumps(value)}" for name, value in facts.items()), "---"]


def _what_it_is(copied: Copied) -> list[str]:
    policy = copied.policy
    base = f"`{copied.base_id}`" if copied.base_id else "not named by its author"
    form = f", merged into the base in {copied.merged_dtype}" if copied.merged_dtype else " in PEFT's layout"
    return [
        f"Step {policy.step} of the policy `{policy.model}`, trained with art_patch.",
        "",
        f"- base model: {base} (fingerprint `{policy.base_sha256}`)",
        f"- form: LoRA of rank {copied.rank}{form}",
        f"- LoRA's sha256: `{copied.adapter_sha256}`",
        f"- trained from: `{policy.parent}`" if policy.parent else "- trained from: not recorded",
        f"- state when it was copied: {policy.state}",
        "",
        "Here are weights and configuration, and no records. What the weights learned from records they may say.",
    ]  # fmt: skip


def _measured(policy: Policy) -> list[str]:
    gate: Any = policy.metrics.get("gate") or {}
    if "candidate" not in gate or "champion" not in gate:
        return ["## Measured", "", "No gate compared this policy with the one before it."]
    lines = [
        "## Measured",
        "",
        "Before it might serve, a judge ranked its answers on held-out scenarios, blind, against those of the policy",
        "that served. Scores lie from 0 to 1 and compare these two alone.",
        "",
        "| metric | value |",
        "|---|---|",
        f"| this policy | {gate['candidate']:.3f} |",
        f"| the policy that served | {gate['champion']:.3f} |",
    ]
    # Each line only where the gate recorded it: older records and other kinds of gate hold less.
    if "lower_bound" in gate:
        level = (gate.get("config") or {}).get("level")
        sure = f" with {level:.0%} confidence" if isinstance(level, float) else ""
        lines.append(f"| difference, at least{sure} | {gate['lower_bound']:+.3f} |")
    words = {"scenarios": "held-out scenarios", "judge": "judge", "rubric": "rubric"}
    lines += [f"| {said} | {gate[key]} |" for key, said in words.items() if gate.get(key) is not None]
    if "checks" in gate:
        failed = sum(not check.get("passed", True) for check in gate["checks"])
        lines.append(f"| checks failed | {failed} of {len(gate['checks'])} |")
    return lines


def _watched(policy: Policy) -> list[str]:
    """Returns the lines about the test on a share of the sessions, if there was one."""
    watch: Any = policy.metrics.get("watch") or {}
    if not watch:
        return []
    hours = f"{watch.get('hours', 0):g} hours long"
    lines = ["", f"A test beside the policy that served, {hours}, ended: {watch['verdict']}."]
    signals: dict[str, Any] = watch.get("signals") or {}
    told = [(name, one) for name, one in signals.items() if isinstance(one.get("challenger"), int | float)]
    if told:
        lines += ["", "| signal | this policy | the policy that served | comparisons |", "|---|---|---|---|"]
    for name, one in told:
        lines.append(f"| {name} | {one['challenger']:.3g} | {one['champion']:.3g} | {one['compared']} |")
    return lines


# --- the hub ---

# The rule of huggingface_hub's `validate_repo_id`, with the owner required. Checked before any file is made.
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")


def _is_ours(name: str) -> bool:
    """Tells whether the file at path `name` in a repository can come from an earlier push of a copy."""
    return "/" not in name and (name in _WRITTEN or name.endswith((".safetensors", ".safetensors.index.json")))


@dataclass(frozen=True, slots=True)
class Repository:
    """The repository on the hub to which a push uploads a model's files."""

    id: str  # OWNER/NAME
    url: str  # of its web page
    private: bool
    is_new: bool  # created for this push


def is_repository(name: str) -> bool:
    """Tells whether `name` is a well-formed repository id `OWNER/NAME`; asks no hub."""
    return _REPOSITORY.fullmatch(name) is not None and ".." not in name and "--" not in name


def check_repository(name: str) -> str:
    """Returns `name` if it is a well-formed repository id `OWNER/NAME`, else raises `ConfigError`; asks no hub."""
    if not is_repository(name):
        raise ConfigError(f"{name!r} is no repository; write OWNER/NAME, as the hub shows it")
    return name


class Hub:
    """A client of the model hub that acts with the user's token."""

    def __init__(self) -> None:
        """Reads the hub's address and the token, without a request; raises `ConfigError` if there is no token."""
        from huggingface_hub import HfApi, get_token

        # The library reads HF_ENDPOINT once, when it is imported. Read it here, so that a later change counts.
        endpoint = os.environ.get("HF_ENDPOINT", "").rstrip("/") or None
        token = get_token()
        if token is None:
            raise ConfigError(
                "there is no token for the hub; run `hf auth login`, or set HF_TOKEN to one that may write"
            )
        self._api: Any = HfApi(endpoint=endpoint, token=token, library_name="art-patch")

    def open_repository(self, name: str, *, private: bool, update: bool) -> Repository:
        """Creates the repository `name` (`OWNER/NAME`), `private` or not, or with `update` looks up the existing one.

        Raises `HubError` if it exists without `update`, is missing with `update`, or the hub refuses the request.
        """
        with self._asking(f"{name} was not opened"):
            if not update:
                url = self._api.create_repo(name, private=private)
                return Repository(name, str(url), private, True)
            found = self._api.repo_info(name)
            return Repository(name, f"{self._api.endpoint}/{name}", bool(found.private), False)

    def upload(
        self, repository: Repository, directory: Path, files: Sequence[str], *, message: str,
        sent: Callable[[int, str], None],
    ) -> str:  # fmt: skip
        """Uploads `files` of `directory`, makes them visible with one commit, and returns the commit's id.

        The commit deletes files of an earlier copy that are not in `files`; files that somebody else added stay. `sent`
        is called after each file with the number of files uploaded and the name of the newest one.
        """
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete
        from huggingface_hub.utils import disable_progress_bars

        disable_progress_bars()  # the command shows its own
        left = "it is empty now; push again with --update" if repository.is_new else "it is as it was"
        with self._asking(f"{repository.id} has nothing of it, {left}"):
            # An adapter of an earlier push beside a merged model would be neither, so it goes in the same commit.
            there = [] if repository.is_new else self._api.list_repo_files(repository.id)
            stale = sorted(file for file in there if _is_ours(file) and file not in files)
            additions = [CommitOperationAdd(name, str(directory / name)) for name in files]
            # One by one, so that progress is visible. Uploaded files stay invisible until the commit.
            for done, addition in enumerate(additions, 1):
                self._api.preupload_lfs_files(repository.id, additions=[addition])
                sent(done, addition.path_in_repo)
            operations = [*additions, *(CommitOperationDelete(name) for name in stale)]
            return str(self._api.create_commit(repository.id, operations, commit_message=message).oid)

    @contextmanager
    def _asking(self, so: str) -> Generator[None]:
        """Turns whatever the hub raises into a `HubError`; `so` says what that means for the repository."""
        try:
            yield
        except Exception as error:  # no connection, a refusal, a broken answer: the hub raises a dozen types
            raise HubError(f"{_meaning(error, str(self._api.endpoint))}; {so}") from error


def _meaning(error: BaseException, endpoint: str) -> str:
    # The library raises a RuntimeError at the end of a failed upload, and the hub's own answer is its cause.
    if isinstance(error, RuntimeError) and error.__cause__ is not None:
        error = error.__cause__
    status = getattr(getattr(error, "response", None), "status_code", None)
    said = " ".join(str(getattr(error, "server_message", None) or "").split())
    why = f" ({said})" if said else ""
    known = {
        401: f"{endpoint} does not know the token{why}; run `hf auth login` again, or set HF_TOKEN to a valid one",
        403: f"the token may not write there{why}; take one with the right to write, or a repository of your own",
        404: f"{endpoint} has no such repository{why}; leave --update out to make it",
        409: f"the repository is there already{why}; add --update for a new commit in it, or name another",
    }
    if status is not None:
        return known.get(status, f"{endpoint} answered {status}{why}")
    return f"{endpoint} cannot be asked ({type(error).__name__}: {' '.join(str(error).split())})"
