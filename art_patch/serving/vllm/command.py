"""The command line and the environment of one vLLM process. Pure: options in, strings out.

Users add arguments through `extra`; `check_extra` refuses those that the contract needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from art_patch.errors import ConfigError

Device = Literal["cpu", "cuda"]

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM takes for `--max-lora-rank`."""

LORAS_AT_ONCE = 4
"""Policies in one batch: the champion, the one before it, a candidate and a canary. More would wait for each other."""

LORAS_LOADED = 16
"""Policies in memory. Beyond it vLLM drops the one used least recently, and reads it from disk when it is asked for."""

_IN_WORKER = Path(__file__).with_name("in_worker")
"""What vLLM's own interpreter imports of ours; nothing else of ours is to be found there."""

SHUTDOWN_S = 20
"""How long vLLM finishes what it has begun."""

_OURS = frozenset(
    {
        "--api-key", "--enable-lora", "--generation-config", "--host", "--logprobs-mode", "--lora-modules",
        "--max-cpu-loras", "--max-lora-rank", "--max-loras", "--middleware", "--model", "--port", "--root-path",
        "--scheduling-policy", "--served-model-name", "--shutdown-timeout", "--tensor-parallel-size", "-tp",
        "--trust-remote-code", "--uds",
    }
)  # fmt: skip

_TOOL_PARSERS = {
    "qwen": "hermes",
    "llama": "llama3_json",
    "mistral": "mistral",
    "gemma": "gemma4",
    "granite": "granite",
}
"""By how the checkpoint's `model_type` begins."""

_FORCED = {
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
    "VLLM_COMPUTE_NANS_IN_LOGITS": "1",
    "VLLM_SERVER_DEV_MODE": "0",  # its routes ask for no key
    "HF_HUB_OFFLINE": "1",  # a LoRA's path that is a hub id would be downloaded
    "TRANSFORMERS_OFFLINE": "1",
    "SPT_NOENV": "1",  # setproctitle would overwrite the variable by which a process is known to be ours
}
_DEFAULTS = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "PYTHONUNBUFFERED": "1"}
_DEFAULTS_CPU = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process less to start: 5 to 8 s
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}
_REMOVED = ("VLLM_API_KEY", "VLLM_KEEP_ALIVE_ON_ENGINE_DEATH", "VLLM_PORT", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
# The app's secrets (its provider's key, its store's password) have no business in vLLM; a resolver could load adapters
# that nobody has checked.
_REMOVED_PREFIXES = ("VLLM_LORA_RESOLVER", "ART_PATCH_", "OPENAI_")


@dataclass(frozen=True, slots=True)
class VllmOptions:
    """How vLLM is run.

    Attributes:
        python: interpreter of the environment that vLLM is installed in.
        base: directory of the base model.
        name: the bare base is served as `NAME@0`.
        model_type: from the checkpoint's config.
        dtype: as vLLM has it; `auto` is the checkpoint's own.
        max_model_len: tokens of prompt and answer; `None` is the checkpoint's own.
        max_lora_rank: largest rank that may be loaded; memory and time go by it.
        gpu_memory_utilization: share of the GPU's whole memory; `None` is vLLM's default.
        tensor_parallel_size: GPUs that one replica spreads over.
        tool_parser: vLLM's name of the format in which the model writes calls; `None` goes by `model_type`.
        extra: more arguments of `vllm serve`.
    """

    python: Path
    base: Path
    name: str
    model_type: str = ""
    device: Device = "cpu"
    dtype: str = "auto"
    max_model_len: int | None = None
    max_lora_rank: int = 16
    gpu_memory_utilization: float | None = None
    tensor_parallel_size: int = 1
    threads: int | None = None
    tool_parser: str | None = None
    extra: tuple[str, ...] = ()


def command(options: VllmOptions, socket: Path) -> list[str]:
    """Return the command line of a vLLM that listens on `socket`."""
    # Not `vllm serve`: a CPU build under another distribution name lacks the metadata that its console script reads.
    line = [str(options.python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(options.base)]
    line += ["--served-model-name", f"{options.name}@0", "--uds", str(socket), "--dtype", options.dtype]
    line += ["--enable-lora", "--max-lora-rank", str(options.max_lora_rank), "--max-loras", str(LORAS_AT_ONCE)]
    # By default vLLM keeps no more adapters in memory than fit into one batch, and reports log-probabilities at
    # temperature 1 whatever the request's was.
    line += ["--max-cpu-loras", str(LORAS_LOADED), "--logprobs-mode", "processed_logprobs"]
    # `vllm`: not the checkpoint's generation config, which would set top_p and others where the caller left them out.
    line += ["--generation-config", "vllm", "--enable-auto-tool-choice", "--tool-call-parser", _tool_parser(options)]
    line += ["--scheduling-policy", "priority"]
    # Without a timeout vLLM hangs on SIGTERM.
    line += ["--shutdown-timeout", str(SHUTDOWN_S), "--disable-uvicorn-access-log", "--disable-fastapi-docs"]
    if options.max_model_len is not None:
        line += ["--max-model-len", str(options.max_model_len)]
    if options.device == "cpu":
        line += ["--enforce-eager"]  # with LoRAs nothing is compiled on a CPU anyway
        # Makes vLLM import our correction of its CPU kernels; nothing is called on the class.
        line += ["--worker-extension-cls", "art_patch_cpu_loras.Extension"]
    else:
        line += ["--tensor-parallel-size", str(options.tensor_parallel_size)]
        if options.gpu_memory_utilization is not None:
            line += ["--gpu-memory-utilization", f"{options.gpu_memory_utilization:g}"]
    return line + list(options.extra)


def environment(
    options: VllmOptions, inherited: Mapping[str, str], *, gpus: Sequence[str] | None = None
) -> dict[str, str]:
    """Return the variables of a vLLM process.

    Args:
        options: how it is run.
        inherited: ours; what the user set there wins over our defaults, not over what the contract needs.
        gpus: those this replica may use; `None` leaves the choice as it is.
    """
    kept = {
        name: value
        for name, value in inherited.items()
        if name not in _REMOVED and not name.startswith(_REMOVED_PREFIXES)
    }
    defaults = dict(_DEFAULTS)
    if options.device == "cpu":
        defaults |= _DEFAULTS_CPU
        # Only the folder of that one file: nothing else of ours, and nothing of the user's, may shadow vLLM's modules.
        kept["PYTHONPATH"] = str(_IN_WORKER)
        if options.threads is not None:
            kept["OMP_NUM_THREADS"] = str(options.threads)
    chosen = {} if gpus is None else {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}
    # Order is precedence: the user's variables over our defaults, the contract's over the user's.
    return {**defaults, **kept, **_FORCED, **chosen}


def check_extra(extra: Sequence[str]) -> tuple[str, ...]:
    """Return the user's own arguments for vLLM.

    Raises:
        ConfigError: one of them is ours to set.
    """
    for argument in extra:
        # argparse takes `--logprobs_mode` for `--logprobs-mode`, and `--port=1` in one word.
        flag = argument.partition("=")[0].replace("_", "-")
        if flag in _OURS:
            raise ConfigError(
                f"{flag} is set by art-patch serve and cannot be given to vLLM; see art-patch serve --help"
            )
    return tuple(extra)


def check_rank(rank: int) -> int:
    """Return the smallest rank that vLLM can be started for and that covers this one.

    Raises:
        ConfigError: it can serve none as large.
    """
    if not 1 <= rank <= RANKS[-1]:
        raise ConfigError(f"--max-lora-rank {rank}: vLLM serves ranks from 1 to {RANKS[-1]}")
    return next(known for known in RANKS if known >= rank)


def _tool_parser(options: VllmOptions) -> str:
    known = (parser for prefix, parser in _TOOL_PARSERS.items() if options.model_type.startswith(prefix))
    return options.tool_parser or next(known, "hermes")
