"""Tells why a base model is of no use here, before anything is downloaded, started, sampled or judged for it.

Only its small files are read (config, tokenizer, chat template) and, if the checkpoint is here, the headers of its
weights: no weights, and no torch. Where these leave it open, as for a model that also sees, `require_servable` builds
the model without weights.
"""

import json
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from art_patch import policies, training
from art_patch.errors import ConfigError, ModelNotFound

_CURE = "serve another base: a causal language model, with a tokenizer and a chat template"
_SMALL = ["*.json", "*.jinja", "*.txt", "*.model"]
_HUB_S = 3.0
_CAUSAL = ("CausalLM", "LMHeadModel", "ForConditionalGeneration")
_TEXT = ("text_config", "language_config")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_OTHER_SENSES = ("vision_config", "audio_config", "text_config")


def check_base(base: str, *, has_template: bool = False, closely: bool = True) -> None:
    """Raise `ConfigError` if no policy of this base could be served or trained, with the reason and what to do.

    Args:
        base: a model directory, or a Hugging Face id, of which only the small files are downloaded.
        has_template: the engine may get its chat template from elsewhere.
        closely: build a model that may also see or hear without weights, which takes the seconds of importing torch.
    """
    directory = _small_files(base)
    if directory is None:
        return  # whoever loads the model says why it cannot be found
    config = _object(directory / "config.json")
    require_known(base, str(config.get("model_type")))
    # Of a hub's model some weights may be missing, from a download that was interrupted and goes on later.
    has_weights = Path(base).expanduser().is_dir() and any(directory.glob("*.safetensors"))
    if (why := _why_useless(directory, config, has_template, has_weights)) is not None:
        raise ConfigError(f"{base} cannot be used: {why}; {_CURE}")
    installed = find_spec("torch") is not None and find_spec("transformers") is not None
    if closely and installed and has_weights and any(config.get(name) for name in _OTHER_SENSES):
        training.require_servable(str(directory))


def untrained(base: str) -> str | None:
    """Return in words what an update leaves as it is in a mixture of experts; `None` for any other base."""
    if (directory := _small_files(base)) is None or not (directory / "config.json").is_file():
        return None
    config = _object(directory / "config.json")
    parts = [config, *(part for name in _TEXT if isinstance(part := config.get(name), dict))]
    if not any(isinstance(count := part.get(name), int) and count > 1 for part in parts for name in _EXPERTS):
        return None
    return "its routed experts and routers get no LoRA: mainly its attention learns"


def require_known(base: str, model_type: str) -> None:
    """Raise `ConfigError` if the installed transformers is older than this type of model, with the release to take."""
    if find_spec("transformers") is None:
        return  # an app's environment: whoever serves and trains has it
    have, since = version("transformers"), training.family_of(model_type).since
    if tuple(map(int, have.split(".")[:2])) < since:
        wanted = ".".join(map(str, since))
        why = f"does not compute {model_type}, which {wanted} does; run: pip install 'transformers>={wanted}'"
    elif (unknown := policies.why_unknown(model_type)) is not None:
        why = f"says: {unknown}; upgrade transformers, or serve another base"
    else:
        return
    raise ConfigError(f"{base} cannot be used: the transformers that is installed ({have}) {why}")


def _small_files(base: str) -> Path | None:
    directory = Path(base).expanduser()
    if directory.is_dir():
        return directory
    if directory.is_absolute() or base.startswith((".", "~")):
        return None
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(base, allow_patterns=_SMALL, etag_timeout=_HUB_S))
    except Exception:  # offline, no such id, no access: the hub raises a dozen types
        return None


def _why_useless(directory: Path, config: Mapping[str, Any], has_template: bool, has_weights: bool) -> str | None:
    given: Any = config.get("architectures")
    names = [str(name) for name in given] if isinstance(given, list) else []
    if config.get("is_encoder_decoder"):
        return "it is an encoder-decoder"
    if names and not any(name.endswith(_CAUSAL) for name in names):
        return f"it is a {names[0]}, which does not continue a text"
    if not any(_has(directory, ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json"))):
        if any(directory.glob("tokenization_*.py")):
            return "its tokenizer is code of its makers, which is never run; convert it to tokenizer.json"
        return "it has no tokenizer"
    # The tokenizer of `tekken.json` writes a chat by itself.
    files = ("chat_template.jinja", "chat_template.json", "additional_chat_templates", "tekken.json")
    templates = _has(directory, files)
    tokenizer = directory / "tokenizer_config.json"
    if not (has_template or any(templates) or (tokenizer.is_file() and _object(tokenizer).get("chat_template"))):
        return "it has no chat template, so no chat can be answered (vLLM takes one: `-- --chat-template FILE`)"
    if has_weights and not any(map(_is_linear, policies.read_base_model(directory).weight_shapes.items())):
        return "its checkpoint has no plain linear layers for a LoRA, as where it was quantised"
    return None


def _is_linear(weight: tuple[str, tuple[int, ...]]) -> bool:
    # In a numbered block, so neither an embedding nor a head. Packed 4-bit weights are one long column.
    name, shape = weight
    return name.endswith(".weight") and len(shape) == 2 and min(shape) > 1 and any(map(str.isdigit, name.split(".")))


def _has(directory: Path, names: Iterable[str]) -> Iterable[bool]:
    return ((directory / name).exists() for name in names)


def _object(path: Path) -> dict[str, Any]:
    try:
        found: Any = json.loads(path.read_bytes())
        if not isinstance(found, dict):
            raise ValueError("not an object")
    except (OSError, ValueError, RecursionError) as error:
        raise ModelNotFound(f"no base model in {path.parent}: {path.name} is missing or broken ({error})") from error
    return found
