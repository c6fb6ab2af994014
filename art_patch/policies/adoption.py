"""Reads a plain LoRA of PEFT, as any trainer writes one, to become a policy: of any rank, on any linear layers.

In: a directory with `adapter_config.json` and `adapter_model.safetensors`, or the id of a repository with them; other
files beside them are not read. Out: a `Received`, as of a copy of a policy, whose config says in our few words what the
weights are: which layers there are is read from the weights. Layers with ranks or scales of their own get the largest
rank, filled up with zeros, and their scale in B, because engines serve one rank and one scale a LoRA.

No manifest tells the base model on which it was trained: that names and shapes fit is all that can be checked. So PEFT
itself computes a probe here, from the LoRA as it was found, and whoever serves the policy must compute the same.
"""

import hashlib
import json
import math
import os
import re
import tempfile
import warnings
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from art_patch.errors import AdapterRejected, HubError
from art_patch.policies import files
from art_patch.policies.base_models import BaseModel, load_model
from art_patch.policies.copies import is_repository
from art_patch.policies.evidence import ANY_RANK, MOST_BYTES, Evidence, Received, settings_of
from art_patch.policies.files import CONFIG, MANIFEST, WEIGHTS
from art_patch.policies.validation import LORA_KEY, Probe, check_config, check_content, check_pattern, lora_key

_LAYERS = ("layers_to_transform", "layers_pattern", "exclude_modules")  # the weights say which layers there are
_PATTERNS = ("rank_pattern", "alpha_pattern")
_PROBE_TOKENS = 48
_MOST_KEYS = 4_096  # of a pattern
_MOST_FILLED = 8  # times the size of the file
_QUESTION = ({"role": "user", "content": "What is 2 + 2? Say it in one word, and why that is so."},)


@contextmanager
def lora_directory(named: str) -> Generator[Path]:
    """Gives the block a directory: `named` itself, or the adapter files of the hub's repository OWNER/NAME[@REVISION].

    Raises `HubError` if the hub cannot be reached or has no such repository for this user.
    """
    path = Path(named).expanduser()
    repository, _, revision = named.partition("@")
    if not is_repository(repository) or path.exists():
        yield path.absolute()
        return
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import disable_progress_bars, logging

    disable_progress_bars()
    logging.set_verbosity_error()  # that no file matches, this says by itself
    # As `Hub` does: the library reads the variable once, when it is imported.
    endpoint = os.environ.get("HF_ENDPOINT", "").rstrip("/") or None
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary) / repository.partition("/")[2]
        try:
            snapshot_download(
                repository, revision=revision or None, allow_patterns=[CONFIG, WEIGHTS, MANIFEST], local_dir=str(place),
                endpoint=endpoint,
            )  # fmt: skip
        except Exception as error:  # offline, no such id, no access: the hub raises a dozen types
            why = _why_not_had(error, endpoint or "https://huggingface.co", repository, revision)
            raise HubError(f"{named} is no directory here, and {why}; nothing was imported") from error
        kept = Path(temporary) / "files" / place.name  # without what the hub's client notes beside them
        kept.mkdir(parents=True)
        for file in place.iterdir():
            if file.is_file():
                file.rename(kept / file.name)
        if not (kept / WEIGHTS).exists():
            raise AdapterRejected(f"{named} has no {WEIGHTS}: it is no LoRA of PEFT, or a pickle, which is not read")
        yield kept


def _why_not_had(error: BaseException, endpoint: str, repository: str, revision: str) -> str:
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    if isinstance(error, GatedRepoError):  # a kind of the next but one
        return f"its owners let nobody in unasked: ask at {endpoint}/{repository}, and run `hf auth login`"
    if isinstance(error, RevisionNotFoundError):
        return f"{repository} on {endpoint} has no revision {revision!r}; give a branch, a tag or a commit"
    if isinstance(error, RepositoryNotFoundError):
        return f"{endpoint} shows you no {repository}; check the name, and for a private one run `hf auth login`"
    cause = error.__cause__ or error  # without an answer the library looks into its cache, and says that it has none
    status = getattr(getattr(cause, "response", None), "status_code", None)
    if status is not None:
        return f"{endpoint} answered {status}; try again later"
    return f"{endpoint} cannot be asked ({type(cause).__name__}: {' '.join(str(cause).split())[:200]})"


def read_lora(directory: Path, base: BaseModel, *, sha256: str | None = None) -> Received:
    """Reads and checks a plain LoRA against the base model; `sha256` is that of its weights file.

    Raises `AdapterRejected` if a file is missing or unsafe, has not this `sha256`, or does not fit the base; or if it
    changes more than linear layers, such as an embedding, a bias or DoRA's magnitudes, which engines do not serve.
    """
    name = directory.name
    if not (directory / WEIGHTS).exists():
        pickled = (directory / WEIGHTS.replace(".safetensors", ".bin")).exists()
        why = "is a pickle, which may run code when read; save it as" if pickled else "has no"
        raise AdapterRejected(f"{directory} {why} {WEIGHTS}, so it is neither a policy's copy nor a LoRA of PEFT")
    config = files.read_json(directory, CONFIG)
    weights = files.read_file(directory, WEIGHTS, MOST_BYTES)
    found = hashlib.sha256(weights).hexdigest()
    if sha256 is not None and found != sha256.lower():
        raise AdapterRejected(f"{directory}: {WEIGHTS} has the sha256 {found}, not {sha256}: it is another LoRA")
    plain, uniform = _uniform(name, config, weights)
    rank, _ = check_content(name, plain, uniform, base, max_rank=ANY_RANK)
    kept = settings_of(plain)
    found_in = {key: config[key] for key in ("r", "lora_alpha", *_PATTERNS) if key in config}
    probe = _probe(name, kept | found_in, weights, base)
    entry = None if probe is None else probe.entry()
    return Received(kept, uniform, rank, Evidence(policy=name[:64]), {"weights_sha256": found}, entry)


def _uniform(name: str, config: Mapping[str, Any], weights: bytes) -> tuple[dict[str, Any], bytes]:
    """Returns config and weights with one rank and one scale, and with the layers' names in place of patterns."""
    from safetensors import SafetensorError
    from safetensors.torch import load, save

    try:
        tensors = load(weights)
    except SafetensorError as error:
        raise AdapterRejected(f"{name}: {WEIGHTS} is not a whole safetensors file ({error}).") from error
    layers = {match["module"] for key in tensors if (match := LORA_KEY.fullmatch(key))}
    plain = {key: value for key, value in config.items() if key not in (*_LAYERS, *_PATTERNS)}
    named: Any = config.get("target_modules")
    if not isinstance(named, str | list | None):
        raise AdapterRejected(f"{name}: {CONFIG}: target_modules = {named!r:.100}. Give the list of module names.")
    if isinstance(named, list) and (left := [key for key in layers if not f".{key}".endswith(_ends(named))]):
        raise AdapterRejected(f"{name}: {WEIGHTS} holds {files.some(sorted(left))}, which target_modules does not name")
    # In place of a pattern, too: one of a stranger might take forever, and the weights say which layers there are.
    plain["target_modules"] = sorted(layers)
    check_config(name, plain, ANY_RANK)
    ranks = _ranks(layers, tensors)
    if not any(config.get(pattern) for pattern in _PATTERNS) or set(ranks) != layers:
        return plain, weights  # as it is; what is wrong with it, its check says
    _check_patterns(name, config, ranks, tensors, len(weights))
    import torch

    most, root = max(ranks.values()), bool(config.get("use_rslora"))
    usual = float(config["lora_alpha"]) / (math.sqrt(config["r"]) if root else config["r"])  # most layers stay exact
    for layer, rank in ranks.items():
        down, up = (tensors[lora_key(layer, side)].float() for side in "AB")
        scale = _own(config, "alpha_pattern", layer, "lora_alpha") / (math.sqrt(rank) if root else rank) / usual
        fill = torch.zeros(most - rank, down.shape[1]), torch.zeros(up.shape[0], most - rank)
        tensors[lora_key(layer, "A")] = torch.cat([down, fill[0]]).contiguous()
        tensors[lora_key(layer, "B")] = torch.cat([up * scale, fill[1]], 1).contiguous()
    alpha = int(usual * most) if (usual * most).is_integer() else usual * most
    return plain | {"r": most, "lora_alpha": alpha, "use_rslora": False}, save(tensors)


def _ends(names: list[Any]) -> tuple[str, ...]:
    return tuple(f".{name}" for name in names)


def _ranks(layers: set[str], tensors: Mapping[str, Any]) -> dict[str, int]:
    """Returns the rank of each layer whose A and B are matrices of numbers that fit one another."""
    pairs: dict[str, list[Any]] = {layer: [tensors.get(lora_key(layer, side)) for side in "AB"] for layer in layers}
    return {
        layer: pair[0].shape[0]
        for layer, pair in pairs.items()
        if all(side is not None and side.dim() == 2 and side.is_floating_point() for side in pair)
        and pair[0].shape[0] == pair[1].shape[1]
    }


def _check_patterns(
    name: str, config: Mapping[str, Any], ranks: Mapping[str, int], tensors: Mapping[str, Any], size: int
) -> None:
    """Refuses patterns that are no numbers by names or are not of these weights, and what would fill the memory."""
    for pattern in _PATTERNS:
        values: Any = config.get(pattern) or {}
        if not isinstance(values, dict) or len(values) > _MOST_KEYS:
            raise AdapterRejected(
                f"{name}: {CONFIG}: {pattern} must be a number by name of layer, {_MOST_KEYS:,} at most"
            )
        for key, value in values.items():
            if type(value) not in (int, float) or not 0 < value < ANY_RANK:
                raise AdapterRejected(
                    f"{name}: {CONFIG}: {pattern} of {key:.100} is {value!r:.100}, no positive number"
                )
            check_pattern(name, pattern, key)
            try:
                re.compile(key)
            except re.error as error:
                raise AdapterRejected(f"{name}: {CONFIG}: {pattern} has {key!r:.100}, no pattern ({error})") from error
    for layer, rank in ranks.items():
        if rank != (said := _own(config, "rank_pattern", layer, "r")):
            raise AdapterRejected(f"{name}: {layer} has the rank {rank}, and {CONFIG} says {said:g}: save both anew")
    filled = 4 * max(ranks.values()) * sum(sum(tensor.shape) - rank for rank, tensor in _sides(ranks, tensors))
    if filled > _MOST_FILLED * size + (64 << 20):
        raise AdapterRejected(
            f"{name}: with one rank for all layers, as engines need it, it would have {filled >> 20:,} MiB in place of "
            f"{size >> 20:,}; train it with ranks that are nearer to one another"
        )


def _sides(ranks: Mapping[str, int], tensors: Mapping[str, Any]) -> list[tuple[int, Any]]:
    return [(rank, tensors[lora_key(layer, side)]) for layer, rank in ranks.items() for side in "AB"]


def _own(config: Mapping[str, Any], pattern: str, layer: str, otherwise: str) -> float:
    """Returns a layer's value of a pattern, by the first key that PEFT would take."""
    for key, value in (config.get(pattern) or {}).items():
        if re.match(rf"(.*\.)?({key})$", layer):
            return float(value)
    return float(config[otherwise])


def _probe(name: str, config: Mapping[str, Any], weights: bytes, base: BaseModel) -> Probe | None:
    """Lets PEFT compute the likeliest next tokens of a question with the LoRA; `None` if the base has no tokenizer."""
    import torch
    from peft import PeftModel
    from transformers import AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(base.directory)
        text = tokenizer.apply_chat_template(list(_QUESTION), tokenize=False, add_generation_prompt=True)
        ids_T = tokenizer.encode(text, add_special_tokens=False)[-_PROBE_TOKENS:]  # T tokens; V vocabulary
    except Exception:  # OSError, ValueError, ImportError, jinja's errors, and the package tokenizers raises `Exception`
        return None
    disable_progress_bar()  # the command shows its own
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with tempfile.TemporaryDirectory() as work, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft asks transformers by old names
        (Path(work) / CONFIG).write_text(json.dumps({**config, "base_model_name_or_path": str(base.directory)}))
        (Path(work) / WEIGHTS).write_bytes(weights)
        whole = load_model(base.directory, dtype=dtype)
        try:
            model: Any = PeftModel.from_pretrained(whole, work).to(device).eval()
        except (RuntimeError, ValueError, TypeError, KeyError, AttributeError) as error:
            why = " ".join(str(error).split())[:200]
            raise AdapterRejected(f"{name}: PEFT cannot load it ({type(error).__name__}: {why})") from error
        ids_BT = torch.tensor([ids_T], device=device)
        with torch.inference_mode():
            tuned_TV = model(input_ids=ids_BT).logits[0, :-1].float().log_softmax(-1)
            with model.disable_adapter():
                base_TV = model(input_ids=ids_BT).logits[0, :-1].float().log_softmax(-1)
    targets_T1 = tuned_TV.argmax(dim=-1, keepdim=True)
    tuned, bare = (tuple(each.gather(1, targets_T1).squeeze(1).tolist()) for each in (tuned_TV, base_TV))
    if not all(map(math.isfinite, tuned)):
        raise AdapterRejected(f"{name}: what PEFT computes with it is not finite; it cannot be served")
    return Probe(tuple(ids_T), tuned, bare, str(dtype).removeprefix("torch."), tuple(targets_T1.squeeze(1).tolist()))
