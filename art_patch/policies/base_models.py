"""Base models on disk: identifies one by its checkpoint, names its parts as transformers does, and loads it.

`read_base_model` returns the shape of every tensor of a checkpoint, and its fingerprint, without loading its weights.
It raises `ModelNotFound` when the directory is not a usable checkpoint. Importing the module imports neither torch nor
transformers, because the trainer, both engines and the command line share it.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

from art_patch.errors import ModelNotFound

_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors format itself
_SAMPLE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class BaseModel:
    """A base model's checkpoint: its directory, its fingerprint, and the shape of every tensor."""

    directory: Path
    # Fingerprint of its config, the headers and sizes of its weight files, and 4 KiB of each tensor. An adapter fits
    # this base only if the adapter's manifest names the same fingerprint.
    sha256: str
    # Maps the name of each tensor in the checkpoint, such as `model.layers.0.mlp.up_proj.weight`, to its shape; names
    # are those that transformers gives to modules. A language head that is tied to the embedding is in no file, but is
    # listed as `lm_head.weight`.
    weight_shapes: dict[str, tuple[int, ...]] = field(repr=False)


_Tensor = tuple[int, int, str, tuple[int, ...]]  # first byte, end, name and shape

# Makers of models that also see name the parts of a checkpoint otherwise than transformers names the modules. Adapters
# have the names of transformers, which peft takes and vLLM maps to its own. By `model_type`: how a name begins in the
# checkpoint, and in transformers.
_LLAVA = (("language_model.model.", "model.language_model."), ("language_model.lm_head.", "lm_head."))
_QWEN_VL = (("visual.", "model.visual."), ("model.", "model.language_model."))
_NAMED_OTHERWISE: Mapping[str, Sequence[tuple[str, str]]] = {
    "gemma3": _LLAVA, "mistral3": _LLAVA, "qwen2_vl": _QWEN_VL, "qwen2_5_vl": _QWEN_VL,
}  # fmt: skip

# Architectures that their makers call otherwise than transformers and vLLM do, so as to bring their own code.
_CALLED_OTHERWISE = {"kimi_k2": "deepseek_v3"}
_OF_CODE = ("model_type", "auto_map")


def auto_class(config: Any) -> Any:
    """Returns the class of transformers that loads a model with this config, as what it answers chats with.

    Of a model that also sees, the whole model is loaded, because its modules have other names there than in a model of
    the language part alone, and vLLM maps the names of the whole.
    """
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    made = getattr(config, "architectures", None) or ()
    sees = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and not any(name.endswith("CausalLM") for name in made)
    return transformers.AutoModelForImageTextToText if sees else transformers.AutoModelForCausalLM


def why_unknown(model_type: str) -> str | None:
    """Returns in transformers' own words that the installed release does not know a `model_type`; `None` if it does."""
    spec = find_spec("transformers")
    # Most types have a folder. For the others transformers is imported, which takes seconds.
    if spec is None or spec.origin is None or not model_type.isidentifier() or model_type in _CALLED_OTHERWISE:
        return None
    if (Path(spec.origin).parent / "models" / model_type).is_dir():
        return None
    from transformers import CONFIG_MAPPING, AutoConfig

    if model_type in CONFIG_MAPPING:
        return None
    try:
        AutoConfig.for_model(model_type)
    except ValueError as error:
        return str(error).partition(". ")[0]
    return None


def read_config(base: str | os.PathLike[str]) -> Any:
    """Returns the config of a base model as transformers reads it."""
    from transformers import AutoConfig, PretrainedConfig

    fields, _ = PretrainedConfig.get_config_dict(base)
    if (known := _CALLED_OTHERWISE.get(str(fields.get("model_type")))) is None:
        return AutoConfig.from_pretrained(base, trust_remote_code=False)
    return AutoConfig.for_model(known, **{name: value for name, value in fields.items() if name not in _OF_CODE})


def load_model(base: str | os.PathLike[str], **options: Any) -> Any:
    """Loads a base model with `from_pretrained` and these `options`, from safetensors alone, without remote code."""
    config = read_config(base)
    return auto_class(config).from_pretrained(base, config=config, use_safetensors=True, **options)


def resolve_model_dir(base: str | os.PathLike[str]) -> Path:
    """Returns the local directory of `base`, a model directory or a Hugging Face id, which is downloaded if needed."""
    path = Path(base).expanduser()
    if path.is_dir():
        return path
    if path.is_absolute() or str(base).startswith((".", "~")):
        raise ModelNotFound(f"there is no directory {path}. Give a model directory or a Hugging Face id.")
    from huggingface_hub import snapshot_download

    # No pickled weights: they may run code when read, and only safetensors are used.
    patterns = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]
    try:
        return Path(snapshot_download(str(base), allow_patterns=patterns))
    except Exception as error:  # offline, no such id, no access: the hub raises a dozen types
        raise ModelNotFound(
            f"{base} is neither a directory nor in the Hugging Face cache, and could not be downloaded ({error})."
        ) from error


def read_base_model(model_dir: str | os.PathLike[str]) -> BaseModel:
    """Reads the tensor shapes and the fingerprint of the checkpoint in a local directory."""
    directory = Path(model_dir)
    config = _config_bytes(directory)
    shapes: dict[str, tuple[int, ...]] = {}
    digest = hashlib.sha256(config)
    for path in _weight_files(directory):
        header, tensors = _read_header(path)
        digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        digest.update(header)
        # Two fine-tunes of one architecture agree in every header; a page of each tensor tells them apart.
        with path.open("rb") as file:
            for begin, end, name, shape in tensors:
                shapes[name] = shape
                file.seek(8 + len(header) + begin)  # the file is the header's size in 8 bytes, the header, the tensors
                digest.update(file.read(min(_SAMPLE_BYTES, end - begin)))
    fields = json.loads(config)
    shapes = {_module_name(name, fields.get("model_type")): shape for name, shape in shapes.items()}
    _add_tied_head(shapes, fields)
    return BaseModel(directory, digest.hexdigest(), shapes)


def base_fingerprint(model_dir: str | os.PathLike[str]) -> str:
    """Returns the fingerprint of the base model in a local directory: the hex digest in `BaseModel.sha256`."""
    return read_base_model(model_dir).sha256


def _module_name(name: str, model_type: object) -> str:
    pairs = _NAMED_OTHERWISE.get(str(model_type), ())
    if not name.startswith(tuple(new for _, new in pairs)):  # else transformers has saved it as it names it
        for old, new in pairs:
            if name.startswith(old):
                return new + name.removeprefix(old)
    return name


def _config_bytes(directory: Path) -> bytes:
    try:
        content = (directory / "config.json").read_bytes()
        if not isinstance(json.loads(content), dict):
            raise ValueError("not an object")
    except (OSError, ValueError) as error:
        raise ModelNotFound(
            f"no base model in {directory}: config.json is missing or broken ({error}). "
            "Give a directory that save_pretrained() wrote."
        ) from error
    return content


def _weight_files(directory: Path) -> list[Path]:
    index = directory / "model.safetensors.index.json"
    if index.exists():
        try:
            weight_map = cast("dict[str, str]", json.loads(index.read_bytes())["weight_map"])
            files = [directory / name for name in sorted(set(weight_map.values()))]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelNotFound(f"{index} is broken ({error}). Download the model again.") from error
    else:
        files = sorted(directory.glob("*.safetensors"))
    if missing := [path.name for path in files if not path.is_file()]:
        raise ModelNotFound(f"{directory} lacks {', '.join(missing)}. Download the model again.")
    if not files:
        raise ModelNotFound(
            f"{directory} holds no *.safetensors file. Convert the model with save_pretrained(); pickles are not read."
        )
    return files


def _read_header(path: Path) -> tuple[bytes, list[_Tensor]]:
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            if not 2 <= size <= _MAX_HEADER_BYTES:
                raise ValueError(f"header of {size} bytes")
            header = file.read(size)
        # In the order of the file, whatever the order of the header: the fingerprint reads forward only.
        return header, sorted(_tensors(json.loads(header)))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelNotFound(f"{path} is not a safetensors file ({error}). Download the model again.") from error


def _tensors(header: dict[str, Any]) -> Iterator[_Tensor]:
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            yield int(begin), int(end), name, tuple(int(size) for size in entry["shape"])


# A tied language head is in no file, but a LoRA may name it.
def _add_tied_head(shapes: dict[str, tuple[int, ...]], config: dict[str, Any]) -> None:
    if config.get("tie_word_embeddings") and "lm_head.weight" not in shapes:
        for name, shape in list(shapes.items()):
            if name.endswith("embed_tokens.weight"):
                shapes["lm_head.weight"] = shape
