"""One optimizer step beside TRL's and a plain padded one on a CUDA card: tokens a second and peak memory.

::

    python tests/gpu/grpo_step.py [--json] [--size 0.6b 7b] [--device cuda] [--micro-batch-tokens 16384]

The work is that of `tests/benchmarks/grpo_step.py`: `siblings`, 8 groups x 8, 512 shared and 64 sampled tokens, and
`turns`, 4 groups x 4 trajectories x 6 turns. Models are random, in the shapes of Qwen 3 0.6B and Qwen 2.5 7B, with one
LoRA of rank 8; bf16 weights and a fp32 LoRA on all sides; none recomputes blocks. TRL and `Plain` get micro-batches of
8 rows of one length, we as many distinct tokens as `TrainConfig` says. `--size tiny --device cpu` tries the program
where there is no card, in fp32.

Metrics, for each size and work: `tokens_per_s` (of rows, whether computed or shared), `vs_trl` and `vs_plain` (the
other's time / ours, the best of three each, one after the other), `memory_vs_trl` (peak of what torch allocated, model
included). A side that cannot run is left out, and `why_not` says why.

Seen on 2026-11-27 on an NVIDIA H200 with torch 2.11, TRL 1.16 and micro-batches of 2,400 tokens, another program on the
card: `siblings_0.6b` 57,680 tokens/s, 2.1 times as fast as TRL with 0.48 of its memory; `turns_0.6b` 20,800 tokens/s,
0.53 times as fast with 0.43 of its memory. Three quarters of our time are Python's: a step launches 24,000 kernels.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402 - the line above makes ours importable

from art_patch.training import TrainConfig  # noqa: E402
from tests.benchmarks.grpo_step import SHAPE, WORK, Ours, Trl, make_model, row_of, trained, trajectories  # noqa: E402
from tests.support.benchmark_report import Target, finish, say  # noqa: E402

SIZES: dict[str, dict[str, Any]] = {
    "tiny": SHAPE,
    "0.6b": {
        "vocab_size": 151_936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True,
    },
    "7b": {
        "vocab_size": 152_064, "hidden_size": 3584, "intermediate_size": 18_944, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4, "head_dim": 128, "tie_word_embeddings": False,
    },
    "8b": {
        "vocab_size": 151_936, "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": False,
    },
    "32b": {
        "vocab_size": 151_936, "hidden_size": 5120, "intermediate_size": 25_600, "num_hidden_layers": 64,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": False,
    },
}  # fmt: skip
REPEATS = 3


class Plain:
    """The step as a plain loop makes it: padded rows, transformers' own attention, logits of all sampled tokens."""

    def __init__(self, model: Any) -> None:
        self.model = model.eval()
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(trained(model), lr=1e-6)

    def step(self, work: str, groups: int | None = None) -> None:
        self.optimizer.zero_grad()
        given = [run for group in WORK[work][:groups] for run in group]
        tokens = sum(len(part) for run in given for part in run.parts[::2])
        for batch in trajectories(given):
            batch = {name: each.to(self.model.device) for name, each in batch.items()}
            answer, sampled = batch["completion_ids"], batch["tool_mask"]
            mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
            logits = self.model(
                input_ids=torch.cat([batch["prompt_ids"], answer], 1), attention_mask=mask,
                logits_to_keep=answer.shape[1] + 1, use_cache=False,
            ).logits[:, :-1]  # fmt: skip
            logprobs = logits.float().log_softmax(-1).gather(-1, answer[..., None])[..., 0]
            ratio, advantage = torch.exp(logprobs - batch["old_per_token_logps"]), batch["advantages"][:, None]
            loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
            ((loss * sampled).sum() / tokens).backward()
        torch.nn.utils.clip_grad_norm_(trained(self.model), 1.0)
        self.optimizer.step()


def seconds(work: Callable[[], None], device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    begun = time.perf_counter()
    work()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begun


def peak_gib(device: str) -> float:
    return torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0.0


def measured(side: Ours | Trl | Plain, work: str, device: str) -> tuple[float, float]:
    """Best time of a step (s), and peak memory (GiB)."""
    side.step(work, groups=1)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    return min(seconds(lambda: side.step(work), device) for _ in range(REPEATS)), peak_gib(device)


def compare(size: str, device: str, micro_batch_tokens: int) -> dict[str, Any]:
    precision = "bf16" if device == "cuda" else "fp32"
    sides: dict[str, Callable[[Any], Ours | Trl | Plain]] = {
        "ours": lambda model: Ours(model, micro_batch_tokens),
        "plain": Plain,
        "trl": lambda model: Trl(model, precision),
    }
    metrics: dict[str, Any] = {}
    found: dict[str, dict[str, tuple[float, float]]] = {}
    for name, make in sides.items():  # one at a time: two models of 7 B with their activations fill a card
        try:
            side = make(make_model(precision, SIZES[size], device))
            found[name] = {work: measured(side, work, device) for work in WORK}
            say(f"{size}, {name}: seconds and GiB of a step {found[name]}")
        except Exception as error:
            metrics.setdefault("why_not", {})[f"{name}_{size}"] = f"{type(error).__name__}: {error}".splitlines()[0]
        side = None
        if device == "cuda":
            torch.cuda.empty_cache()
    for work, groups in WORK.items():
        if "ours" not in found:
            break
        tokens = sum(len(row_of(run).ids_T) for group in groups for run in group)
        seconds_of, gib_of = ({name: each[work][part] for name, each in found.items()} for part in (0, 1))
        metrics[f"{work}_{size}_tokens_per_s"] = tokens / seconds_of["ours"]
        metrics |= {f"{work}_{size}_{name}_s": taken for name, taken in seconds_of.items()}
        others = [name for name in found if name != "ours"]
        metrics |= {f"{work}_{size}_vs_{name}": seconds_of[name] / seconds_of["ours"] for name in others}
        if gib_of["ours"]:
            metrics[f"{work}_{size}_gib"] = gib_of["ours"]
            metrics |= {f"{work}_{size}_memory_vs_{name}": gib_of["ours"] / gib_of[name] for name in others}
    return metrics


def main() -> None:
    """Measure what is asked for."""
    parser = argparse.ArgumentParser(description="One optimizer step beside TRL's on a CUDA card.")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--size", nargs="+", choices=tuple(SIZES), default=["0.6b", "7b"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--micro-batch-tokens", type=int, default=TrainConfig().micro_batch_tokens)
    asked = parser.parse_args()
    if asked.device == "cuda" and not torch.cuda.is_available():
        sys.exit("no CUDA device; `--size tiny --device cpu` tries the program without one")
    metrics: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if asked.device == "cuda" else "cpu", "date": time.strftime("%Y-%m-%d")
    }  # fmt: skip
    for size in asked.size:
        metrics |= compare(size, asked.device, asked.micro_batch_tokens)
    targets = [
        Target(f"{work}_{size}_vs_trl", 1, None, "times faster than TRL") for size in asked.size for work in WORK
    ]
    finish(metrics, targets, as_json=asked.json)


if __name__ == "__main__":
    main()
