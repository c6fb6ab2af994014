"""One vLLM server process and its children: command line, environment variables, shutdown, and clean-up after a crash.

Every process of a vLLM inherits an environment variable that names the art-patch server which started it. The next
server in the same directory uses that variable to find processes whose server has ended, and kills them.
"""

import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from art_patch._lib.process import Child, carriers_of, end_of_log, guarded, is_alive, open_log, own_name
from art_patch.errors import ConfigError

Device = Literal["cpu", "cuda"]

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # the values that vLLM accepts for `--max-lora-rank`

# Most LoRAs in one batch: champion, former champion, candidate and canary. Requests for a fifth LoRA wait.
LORAS_AT_ONCE = 4

# LoRAs kept in memory. For one more, vLLM drops the least recently used, and reads it again at its next request.
LORAS_LOADED = 16

SHUTDOWN_S = 20  # seconds that vLLM may take after SIGTERM to finish running requests

MARK = "ART_PATCH_SERVED_BY"  # variable that marks every process of a vLLM with the server that started it

# The folder that vLLM's own interpreter imports from; no other file of ours is in it.
_IN_WORKER = Path(__file__).with_name("in_worker")

_OURS = frozenset({
    "--api-key", "--enable-lora", "--generation-config", "--host", "--logprobs-mode", "--lora-modules",
    "--max-cpu-loras", "--max-lora-rank", "--max-loras", "--middleware", "--model", "--port", "--root-path",
    "--scheduling-policy", "--served-model-name", "--shutdown-timeout", "--tensor-parallel-size", "-tp",
    "--trust-remote-code", "--uds",
})  # fmt: skip

# By how the checkpoint's `model_type` begins; the first that fits.
_TOOL_PARSERS = {
    "qwen3_5": "qwen3_coder", "qwen": "hermes", "llama4": "llama4_pythonic", "llama": "llama3_json",
    "mistral": "mistral", "gemma": "gemma4", "granite": "granite", "gpt_oss": "openai",  # vLLM takes no other for it
    "deepseek_v3": "deepseek_v3", "kimi_k2": "kimi_k2",
}  # fmt: skip

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
# that were never checked.
_REMOVED_PREFIXES = ("VLLM_LORA_RESOLVER", "ART_PATCH_", "OPENAI_")

_LOG_BYTES = 16 << 20
_TAIL_BYTES = 64 << 10
_PREFIX = re.compile(r"^\(\w+ pid=\d+\) ", re.MULTILINE)
# With the indented lines below an error: pydantic says there what is wrong.
_ERROR = re.compile(r"(?:^|\s)((?:\w+\.)*\w*(?:Error|Exception): .{1,400}(?:\n  \S.{1,400}){0,2})")


@dataclass(frozen=True, slots=True)
class VllmOptions:
    """Settings from which the command line and the environment variables of one vLLM are made."""

    python: Path  # interpreter of the environment that vLLM is installed in
    base: Path  # directory of the base model, which is served as `NAME@0`
    name: str
    model_type: str = ""  # from the checkpoint's config
    device: Device = "cpu"
    dtype: str = "auto"  # number type in vLLM's spelling; `auto` is the checkpoint's own
    max_model_len: int | None = None  # most tokens of prompt and answer; `None` is the checkpoint's own
    max_lora_rank: int = 16  # largest rank that may be loaded; vLLM's memory and time grow with it
    gpu_memory_utilization: float | None = None  # share of the GPU's whole memory; `None` is vLLM's default
    tensor_parallel_size: int = 1  # GPUs that one replica spreads over
    threads: int | None = None  # CPU threads; used on a CPU only
    tool_parser: str | None = None  # vLLM's name of the format of the model's calls; `None` goes by `model_type`
    extra: tuple[str, ...] = ()  # more arguments of `vllm serve`


def command_line(options: VllmOptions, socket: Path) -> list[str]:
    """Returns the command line that starts a vLLM listening on the unix socket `socket`."""
    # Not `vllm serve`: a CPU build under another distribution name lacks the metadata that its console script reads.
    line = [str(options.python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(options.base)]
    line += ["--served-model-name", f"{options.name}@0", "--uds", str(socket), "--dtype", options.dtype]
    line += ["--enable-lora", "--max-lora-rank", str(options.max_lora_rank), "--max-loras", str(LORAS_AT_ONCE)]
    # By default vLLM keeps no more adapters in memory than fit into one batch, and reports log-probabilities at
    # temperature 1 whatever the request's was.
    line += ["--max-cpu-loras", str(LORAS_LOADED), "--logprobs-mode", "processed_logprobs"]
    # `vllm`: not the checkpoint's generation config, which would set top_p and others where the caller left them out.
    known = (parser for prefix, parser in _TOOL_PARSERS.items() if options.model_type.startswith(prefix))
    parser = options.tool_parser or next(known, "hermes")
    line += ["--generation-config", "vllm", "--enable-auto-tool-choice", "--tool-call-parser", parser]
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


def variables_of(
    options: VllmOptions, inherited: Mapping[str, str], *, gpus: Sequence[str] | None = None
) -> dict[str, str]:
    """Returns the environment variables of a vLLM process; the `inherited` ones override our defaults only.

    What the HTTP contract needs stays. If `gpus` is `None`, their `CUDA_VISIBLE_DEVICES` decides.
    """
    removed = {name for name in inherited if name in _REMOVED or name.startswith(_REMOVED_PREFIXES)}
    kept = {name: value for name, value in inherited.items() if name not in removed}
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
    """Returns the user's own arguments for vLLM; raises a `ConfigError` if art-patch sets one of them itself."""
    for argument in extra:
        # argparse takes `--logprobs_mode` for `--logprobs-mode`, and `--port=1` in one word.
        flag = argument.partition("=")[0].replace("_", "-")
        if flag in _OURS:
            why = "is set by art-patch serve and cannot be given to vLLM; see art-patch serve --help"
            raise ConfigError(f"{flag} {why}")
    return tuple(extra)


def check_rank(rank: int) -> int:
    """Returns the smallest value of `RANKS` that is at least `rank`; a `ConfigError` if there is none."""
    if not 1 <= rank <= RANKS[-1]:
        raise ConfigError(f"--max-lora-rank {rank}: vLLM serves ranks from 1 to {RANKS[-1]}")
    return next(known for known in RANKS if known >= rank)


class VllmProcess:
    """A running vLLM and its children, in one process group, which `art_patch._lib.group_guard` kills as a whole."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], *, log: Path, home: Path) -> None:
        """Starts the process for the server of the directory `home`; a `log` that is too large is renamed first."""
        self.log = log
        with suppress(FileNotFoundError):
            if log.stat().st_size > _LOG_BYTES:
                log.replace(log.with_suffix(".old.log"))
        with open_log(log) as output:
            self._start = output.tell()
            variables = {**environment, MARK: mark(home)}
            self._process = Child(guarded("vLLM", command), variables, stdout=output, stderr=subprocess.STDOUT)

    @property
    def pid(self) -> int:
        """Process id of the guard process, which is also the id of vLLM's process group."""
        return self._process.pid

    def alive(self) -> bool:
        """Whether vLLM runs. If it has ended, this call also kills what is left of its process group."""
        if self._process.poll() is None:
            return True
        self._process.kill_group()  # the guard itself may have been killed
        return False

    def terminate(self) -> None:
        """Sends SIGTERM, on which vLLM finishes its running requests and ends; does not wait for that."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kills vLLM and every process that it started, and waits until vLLM has ended."""
        self._process.kill_group()
        self._process.wait()
        self._process.close_pipes()

    def last_words(self) -> str:
        """Returns up to three errors from vLLM's log, root cause first; its last five lines if it holds no error."""
        text = _PREFIX.sub("", end_of_log(self.log, _TAIL_BYTES, start=self._start))
        found = dict.fromkeys(_ERROR.findall(text))
        errors = [error for error in found if "EngineDeadError" not in error]  # only a consequence of the real error
        return "\n".join(errors[:3] or text.splitlines()[-5:]) or "it wrote nothing"


def mark(home: Path) -> str:
    """Returns the value of the environment variable `MARK` for child processes of this server process."""
    return f"{home}:{own_name()}"


def marked(home: Path) -> list[int]:
    """Returns the ids of all processes started by any server of the directory `home`; empty without `/proc`."""
    return [pid for pid, _ in carriers_of(f"{MARK}={home}:")]


def sweep(home: Path) -> int:
    """Kills processes that servers of the directory `home` left running when they ended; returns their number."""
    found = 0
    # Again and again, because a process may fork while the others are being killed.
    for _ in range(20):
        orphans = [pid for pid, server in carriers_of(f"{MARK}={home}:") if not is_alive(server)]
        if not orphans:
            break
        found = max(found, len(orphans))
        for pid in orphans:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    return found
