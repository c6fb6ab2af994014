"""Memory of an update: the forecast against measured peaks, and a base packed in 4 bits against bfloat16.

::

    python tests/benchmarks/families_memory.py [--json] [--cases "qwen3 fp32" ...]

Progress goes to stderr; with `--json` the last line of stdout is one object of named metrics, with `missed` listing the
targets that were not met. Each update runs in a process of its own, on a random base; its peak is the growth of the
largest resident memory (`VmHWM`) since the imports, files that are mapped into memory included. Five minutes.

- `forecast_error`: largest relative difference of `step_bytes` from the measured peak, over 12 shapes. On a CPU: the
  formulas for GPUs stay untried.
- `bits4_memory`: peak of an update of a random 0.6 B base (Qwen 3's) in 4 bits, as a share of that in bfloat16.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from art_patch.doctor.base_shape import read_shape  # noqa: E402 - the line above makes tests importable
from art_patch.doctor.memory import Update, step_bytes  # noqa: E402
from tests.support.benchmark_report import Target, finish, say  # noqa: E402

TARGETS = (
    Target("forecast_error", None, 0.15, "of the peak of 12 shapes on a CPU"),
    Target("bits4_memory", None, 0.6, "of the peak of an update in bfloat16"),
)


class Case(NamedTuple):
    """An update whose peak is measured."""

    kind: str
    sizes: dict[str, int | bool]
    prompt: int = 512  # tokens that all siblings have in common
    answer: int = 128  # tokens of each of four siblings
    dtype: str = "float32"
    bits: int = 16
    recompute: bool = False


def sizes(width: int, inner: int, layers: int, heads: int, keys: int, vocabulary: int, **more: Any) -> dict[str, Any]:
    """The fields of a config."""
    return {
        "hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": keys, "head_dim": 64, "vocab_size": vocabulary, "max_position_embeddings": 8192, **more,
    }  # fmt: skip


SMALL = sizes(768, 2048, 8, 12, 4, 32_000)
QWEN_06B = sizes(1024, 3072, 28, 16, 8, 151_936) | {"head_dim": 128, "tie_word_embeddings": True}
CASES = {
    "qwen3 fp32": Case("qwen3", SMALL),
    "qwen3 bf16": Case("qwen3", SMALL, dtype="bfloat16"),
    "qwen3 bf16, long": Case("qwen3", SMALL, 2048, 256, "bfloat16"),
    "qwen3 bf16, recomputed": Case("qwen3", SMALL, 2048, 256, "bfloat16", recompute=True),
    "qwen3 fp32, many words": Case("qwen3", sizes(512, 1536, 6, 8, 8, 151_936), 512, 64),
    "llama fp32, deep": Case("llama", sizes(512, 1408, 24, 8, 8, 32_000), 512, 64),
    "llama bf16, wide": Case("llama", sizes(2048, 5632, 3, 32, 4, 32_000), 512, 64, "bfloat16"),
    "qwen2 fp32, 4 bits, recomputed": Case("qwen2", sizes(1024, 4864, 10, 16, 2, 32_000), 1024, 64, "float32", 4, True),
    "gemma3 bf16": Case("gemma3_text", sizes(640, 2048, 10, 4, 1, 65_536) | {"head_dim": 256}, 512, 64, "bfloat16"),
    "qwen3 0.6 B, bf16": Case("qwen3", QWEN_06B, 128, 16, "bfloat16", 16, True),
    "qwen3 0.6 B, 8 bits": Case("qwen3", QWEN_06B, 128, 16, "bfloat16", 8, True),
    "qwen3 0.6 B, 4 bits": Case("qwen3", QWEN_06B, 128, 16, "bfloat16", 4, True),
}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--cases", nargs="+", choices=tuple(CASES), default=tuple(CASES))
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.worker:
        part, name, home = asked.worker
        WORKERS[part](CASES[name], Path(home))
        return
    peaks: dict[str, float] = {}
    errors: dict[str, float] = {}
    for name in asked.cases:
        with tempfile.TemporaryDirectory() as home:
            for part in WORKERS:
                line = [sys.executable, __file__, "--worker", part, name, home]
                done = subprocess.run(line, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            peaks[name] = json.loads(done.stdout.splitlines()[-1])["peak_bytes"]
            told = step_bytes(read_shape(home), update_of(CASES[name]))
        errors[name] = told / peaks[name] - 1
        say(f"{name}: {peaks[name] / 2**20:.0f} MiB, forecast {told / 2**20:.0f} MiB ({errors[name]:+.1%})")
    metrics: dict[str, Any] = {"forecast_error": max(map(abs, errors.values())), "forecast_errors": errors}
    four, whole = (peaks.get(f"qwen3 0.6 B, {end}") for end in ("4 bits", "bf16"))
    if four and whole:
        metrics["bits4_memory"] = four / whole
    finish(metrics, TARGETS, as_json=asked.json)


def update_of(case: Case) -> Update:
    """What the forecast is asked."""
    return Update(
        tokens=case.prompt + 4 * case.answer, predicted=4 * case.answer, bits=case.bits,
        float_bytes=2 if case.dtype == "bfloat16" else 4, recompute=case.recompute, cuda=False,
    )  # fmt: skip


# --- in processes of their own ---


def make(case: Case, home: Path) -> None:
    """Write the base."""
    import torch
    import transformers

    torch.manual_seed(0)
    torch.set_default_dtype(getattr(torch, case.dtype))
    config = transformers.AutoConfig.for_model(case.kind, dtype=case.dtype, **case.sizes)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(home)


def measure(case: Case, home: Path) -> None:
    """Make an update, and print its peak."""
    import torch

    torch.set_num_threads(1)
    # Packages and kernels are loaded by a first update, of next to no size.
    tiny = case._replace(sizes=case.sizes | sizes(64, 64, 1, 1, 1, 32_000), prompt=8, answer=8)
    make(tiny, home / "tiny")
    make_update(tiny, home / "tiny")
    before = high_water()
    make_update(case, home)
    print(json.dumps({"peak_bytes": high_water() - before}))


def make_update(case: Case, home: Path) -> None:
    """Make an update of a group of four siblings."""
    import torch

    from art_patch.policies import base_fingerprint
    from art_patch.training import Example, Row, Sibling, TrainConfig, TrainGroup, TrainJob
    from art_patch.training.loop.update import update

    generator = torch.Generator().manual_seed(0)

    def some(tokens: int) -> tuple[int, ...]:
        return tuple(torch.randint(8, 30_000, (tokens,), generator=generator).tolist())

    prompt, siblings = some(case.prompt), list[Sibling]()
    for number, advantage in enumerate((1.0, -1.0, 0.5, -0.5)):
        ids, sampled = (*prompt, *some(case.answer)), (False,) * case.prompt + (True,) * case.answer
        row = Row(ids, sampled, (-10.0,) * len(ids), (1.0,) * len(ids))
        siblings.append(Sibling(f"t{number}", Example((row,), advantage), True))
    bounds = dict.fromkeys(("max_drift_nats", "max_gap_nats", "max_kl_nats", "max_clip_fraction"))
    config = TrainConfig(
        dtype=case.dtype, base_bits=case.bits, gradient_checkpointing=case.recompute, learning_rate=1e-6, **bounds
    )
    job = TrainJob(
        base=str(home), base_sha256=base_fingerprint(home), parent=None, target=home / "adapters" / "agent@1",
        config=config, groups=(TrainGroup("g", tuple(siblings)),),
    )  # fmt: skip
    update(job, home / "job")


def high_water() -> int:
    """The largest resident memory of this process so far, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024


WORKERS = {"make": make, "measure": measure}


if __name__ == "__main__":
    main()
