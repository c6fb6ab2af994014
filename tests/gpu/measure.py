"""What a CUDA card has to show, by one command: correctness, speed and memory of the trainer's step.

::

    bash tests/gpu/run.sh [--cpu] [--only SECTION ...] [--seconds 540]

It prints a table, and as the last line one object of named metrics: `missed` lists targets that were not met, and
`why_not` what could not be measured, with the reason. Each section is a process of its own, most needed first. One that
fails or takes too long leaves what it had measured, and the others go on. After `--seconds` all that there is is
printed. Models are random, of the shapes of Qwen 3, in bf16 with a LoRA of rank 8.

- `attention`: `kernel_works`; `gap_WAY`: relative distance of outputs and gradients (the largest) from float32, of each
  way to compute a tree, with and without a window; `row_vs_flash_SIZE`: time of attention over one row of 32,768
  tokens, forward and backward, by that of torch's `scaled_dot_product_attention`; `tree_WAY_s`: of 8 siblings of 1,024
  tokens after 8,192 shared ones. `row_operations_WAY`: how many operations torch starts for attention over that row in
  one layer of 0.6 B, forward and backward; they are counted without computing anything.
- `correctness`: log-probabilities (nats) and gradients (relative) of whole models, among them such with windows and
  attention sinks. `fp32_...`: card against CPU, both float32. `bf16_...`: the distance of the card's bf16 from float32,
  by that of the CPU's bf16.
- `step`: see `grpo_step.py`: `siblings` and `turns` beside TRL and a plain padded step, 0.6 B.
- `0.6b`, `8b`, `32b`: a step of one row of 4,096 and of 32,768 tokens, the last 1,024 sampled, and of 8 siblings of
  1,024 after 24,576 shared: `tokens_per_s` (of rows), `gib`, and `forecast`, the forecast of `art-patch doctor` by that
  peak. Blocks are recomputed. `0.6b_row_32k_vs_plain`: our time by that of transformers' own attention.

`--cpu` tries the program without a card: all shapes are tiny, and a stand-in computes what the kernel does on CUDA.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.support.benchmark_report import Target, finish, say  # noqa: E402 - the line above makes ours importable

TARGETS = (
    Target("kernel_works", 1, None, "torch's FlashAttention is as plain torch"),
    *(Target(f"gap_{way}", None, 0.03, "of bf16 from float32") for way in ("flash", "masks", "tiles")),
    *(Target(f"row_vs_flash_{size}", None, 1.3, "times torch's flash attention") for size in ("0.6b", "8b", "32b")),
    Target("fp32_logprob_gap", None, 1e-4, "card against CPU, nats"),
    Target("fp32_gradient_gap", None, 1e-3, "card against CPU, relative"),
    Target("bf16_logprob_gap", None, 2, "times the CPU's own gap"),
    Target("bf16_gradient_gap", None, 2, "times the CPU's own gap"),
    Target("siblings_0.6b_vs_trl", 3, None, "times faster than TRL"),
    Target("turns_0.6b_vs_trl", 2, None, "times faster than TRL"),
    Target("0.6b_row_32k_vs_plain", None, 1.3, "times transformers' own attention"),
)
SECTIONS = {"attention": 90, "correctness": 90, "step": 150, "0.6b": 90, "8b": 100, "32b": 150}  # most seconds each
KINDS = ("qwen3", "gemma3_text", "gpt_oss")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--only", nargs="+", choices=tuple(SECTIONS), default=None)
    parser.add_argument("--seconds", type=float, default=540)
    parser.add_argument("--section", choices=tuple(SECTIONS), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.section:
        Section(asked.section, asked.cpu).run()
        return
    begun = time.monotonic()
    metrics: dict[str, Any] = {"date": time.strftime("%Y-%m-%d")}
    why_not: dict[str, str] = {}
    for name in asked.only or (("attention", "correctness", "step", "0.6b") if asked.cpu else SECTIONS):
        left = asked.seconds - (time.monotonic() - begun)
        most = left if asked.cpu else min(left, SECTIONS[name])
        found, why = in_process(name, asked.cpu, most) if left > 5 else ({}, "no time was left")
        why_not |= found.pop("why_not", {})
        metrics |= found
        if why:
            why_not[name] = why
        say(f"{name}: {time.monotonic() - begun:.0f} s after the start{', ' + why if why else ''}")
    metrics["seconds"] = round(time.monotonic() - begun)
    targets = [target for target in TARGETS if not asked.cpu or "_vs_" not in target.figure]  # times of a card
    finish(metrics, targets, as_json=False)
    for name, why in why_not.items():
        print(f"not measured: {name}: {why}")
    finish({**metrics, "why_not": why_not}, targets, as_json=True)


def in_process(name: str, cpu: bool, seconds: float) -> tuple[dict[str, Any], str]:
    """What a section measured, and why it ended early if it did."""
    why = ""
    with tempfile.TemporaryFile("w+") as lines:
        line = [sys.executable, __file__, "--section", name, *(["--cpu"] if cpu else [])]
        try:
            # The models of `--cpu` are so small that threads mostly wait for each other.
            threads = {"OMP_NUM_THREADS": "1"} if cpu else {}
            code = subprocess.run(line, stdout=lines, timeout=seconds, check=False, env=os.environ | threads).returncode
            why = f"its process ended with {code}" if code else ""
        except subprocess.TimeoutExpired:
            why = f"not done after {seconds:.0f} s"
        lines.seek(0)
        metrics: dict[str, Any] = {"why_not": {}}
        for found in (json.loads(line) for line in lines if line.startswith("{")):
            metrics["why_not"] |= found.pop("why_not", {})
            metrics |= found
    return metrics, why


class Section:
    """One section, in its own process: a line of JSON for each thing that was measured, or why it was not."""

    def __init__(self, name: str, cpu: bool) -> None:
        import torch

        warnings.filterwarnings("ignore")
        self.name, self.cpu, self.torch = name, cpu, torch
        self.device = "cpu" if cpu else "cuda"
        if not cpu and not torch.cuda.is_available():
            sys.exit("no CUDA device; --cpu tries the program without one")

    def run(self) -> None:
        if self.name == "correctness":  # it computes on both sides
            self.correctness()
            return
        with self.card_side():
            {"attention": self.attention, "step": self.step}.get(self.name, self.sizes)()

    def card_side(self) -> AbstractContextManager[None]:
        """With `--cpu`, what is for the card takes the way that it takes there, with a stand-in for the kernel."""
        from tests.support.flash_stand_in import as_on_cuda

        return as_on_cuda() if self.cpu else nullcontext()

    def tell(self, name: str, measure: Callable[[], dict[str, Any]]) -> None:
        try:
            found = measure()
        except Exception as error:
            found = {"why_not": {name: " ".join(f"{type(error).__name__}: {error}".split())[:200]}}
        print(json.dumps(found), flush=True)
        gc.collect()
        if not self.cpu:
            self.torch.cuda.empty_cache()

    def best_s(self, work: Callable[[], Any], repeats: int = 3) -> float:
        from tests.gpu.grpo_step import seconds

        work()
        return min(seconds(work, self.device) for _ in range(repeats))

    # --- attention by itself ---

    def attention(self) -> None:
        self.tell("device", self.versions)
        self.tell("kernel_works", self.kernel_works)
        for way in ("flash", "masks", "tiles"):
            self.tell(f"gap_{way}", lambda way=way: {f"gap_{way}": self.gap_of(way)})
        shared, own = (64, 8) if self.cpu else (8192, 1024)
        for way in ("flash", "masks", "tiles"):
            self.tell(f"tree_{way}_s", lambda way=way: {f"tree_{way}_s": self.tree_s(way, shared, own)})
        for size, heads in {"0.6b": 16, "8b": 32, "32b": 64}.items():
            self.tell(f"row_vs_flash_{size}", lambda size=size, heads=heads: self.row_vs_flash(size, heads))
        for way in ("flash", "tiles"):
            name = f"row_operations_{way}"
            self.tell(name, lambda name=name, way=way: {name: self.row_operations(way)})

    def versions(self) -> dict[str, Any]:
        from importlib.metadata import version

        card = "cpu" if self.cpu else self.torch.cuda.get_device_name()
        return {"device": card, **{name: version(name) for name in ("torch", "transformers", "peft")}}

    def kernel_works(self) -> dict[str, Any]:
        from art_patch.training.flash import works

        shapes = ((16, 8, 128), (64, 8, 64), (8, 8, 256))
        return {
            "kernel_works": int(all(works(self.torch.device(self.device), self.torch.bfloat16, *s) for s in shapes))
        }

    def inputs(self, tokens: int, heads: int, dtype: Any, keys: int = 8, width: int = 128) -> list[Any]:
        draw = self.torch.Generator(self.device).manual_seed(0)
        shapes = [(1, count, tokens, width) for count in (heads, keys, keys)]
        return [
            self.torch.randn(shape, generator=draw, device=self.device, dtype=dtype).requires_grad_()
            for shape in shapes
        ]

    def forest(self, rows: list[Any], device: str = "") -> Any:
        from art_patch.training.attention import Forest
        from art_patch.training.data.packing import tree_of

        tree = tree_of(rows)
        return Forest(tree.nodes, self.torch.from_numpy(tree.depth_P).to(device or self.device))

    def by(self, way: str, inputs: list[Any], forest: Any, window: int | None = None) -> Any:
        from art_patch.training import attention, flash

        if way == "flash":
            return flash.by_flash(*inputs, forest.calls(window), None)
        return {"masks": attention.by_masks, "tiles": attention.by_tiles}[way](*inputs, forest, None, window)

    def gap_of(self, way: str) -> float:
        import numpy as np

        draw, scale = np.random.default_rng(0), 1 if self.cpu else 24
        prompt, middle = draw.integers(0, 99, 60 * scale), draw.integers(0, 99, 20 * scale)
        rows = [
            np.concatenate([prompt, *more, draw.integers(0, 99, 9 * scale)]) for more in ([], [], [middle], [middle])
        ]
        forest, worst = self.forest(rows), 0.0
        exact = self.inputs(len(forest.depth_P), 16, self.torch.float32)
        for window in (None, 32 * scale):
            outcomes = []
            for each, dtype in ((way, self.torch.bfloat16), ("tiles", self.torch.float32)):
                given = [x.detach().to(dtype).requires_grad_() for x in exact]
                out = self.by(each, given, forest, window)
                outcomes.append((out, *self.torch.autograd.grad(out.float().square().sum(), given)))
            gaps = [
                float(((one.float() - other).norm() / other.norm()).detach())
                for one, other in zip(*outcomes, strict=True)
            ]
            worst = max(worst, *gaps)
        return worst

    def both_ways(self, way: str, inputs: list[Any], forest: Any) -> Callable[[], Any]:
        return lambda: self.torch.autograd.grad(self.by(way, inputs, forest).sum(), inputs)

    def tree_s(self, way: str, shared: int, own: int) -> float:
        import numpy as np

        prompt = np.arange(shared)
        forest = self.forest([np.concatenate([prompt, np.arange(own) + shared + own * k]) for k in range(8)])
        inputs = self.inputs(len(forest.depth_P), 16, self.torch.bfloat16)
        return self.best_s(self.both_ways(way, inputs, forest))

    def row_vs_flash(self, size: str, heads: int) -> dict[str, Any]:
        import numpy as np

        tokens = 256 if self.cpu else 32_768
        inputs, forest = self.inputs(tokens, heads, self.torch.bfloat16), self.forest([np.arange(tokens)])

        def plain() -> Any:
            out = self.torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=True, enable_gqa=True)
            return self.torch.autograd.grad(out.sum(), inputs)

        ours_s, plain_s = self.best_s(self.both_ways("flash", inputs, forest)), self.best_s(plain)
        return {f"row_flash_{size}_s": plain_s, f"row_vs_flash_{size}": ours_s / plain_s}

    def row_operations(self, way: str) -> int:
        import numpy as np
        from torch.utils._python_dispatch import TorchDispatchMode

        class Count(TorchDispatchMode):
            started = 0

            def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                self.started += not op.is_view
                return op(*args, **(kwargs or {}))

        inputs = [
            self.torch.empty((1, heads, 32_768, 128), dtype=self.torch.bfloat16, device="meta", requires_grad=True)
            for heads in (16, 8, 8)
        ]
        forest = self.forest([np.arange(32_768)], "meta")
        with Count() as count:
            self.both_ways(way, inputs, forest)()
        return count.started

    # --- whole models ---

    def correctness(self) -> None:
        gaps: dict[str, list[float]] = {}
        for kind in KINDS:
            self.tell(f"correctness of {kind}", lambda kind=kind: self.gaps_of(kind, gaps))
        for name, values in gaps.items():
            print(json.dumps({name: max(values)}), flush=True)

    def gaps_of(self, kind: str, gaps: dict[str, list[float]]) -> dict[str, Any]:
        exact = self.outcome(kind, "float32", card=False)
        fp32 = distances(self.outcome(kind, "float32", card=True), exact)
        bf16, of_cpu = (distances(self.outcome(kind, "bfloat16", card=card), exact) for card in (True, False))
        for what, each, mine, theirs in zip(("logprob", "gradient"), fp32, bf16, of_cpu, strict=True):
            gaps.setdefault(f"fp32_{what}_gap", []).append(each)
            gaps.setdefault(f"bf16_{what}_gap", []).append(mine / theirs)
        return {f"{kind}_bf16_{what}": value for what, value in zip(("logprob", "gradient"), bf16, strict=True)}

    def outcome(self, kind: str, dtype: str, *, card: bool) -> tuple[Any, Any]:
        """Log-probabilities, and the gradient of a sum in which each has its own weight, both float64 on the CPU."""
        import numpy as np

        from art_patch.training import Example, Row
        from art_patch.training.data.packing import packs_of
        from art_patch.training.scoring import Scorer
        from tests.support.families import make_model, with_lora

        draw = np.random.default_rng(0)
        prompt, examples = draw.integers(3, 64, 40).tolist(), []
        for _ in range(6):
            ids = (*prompt, *draw.integers(3, 64, 20).tolist())
            examples.append(Example((Row(ids, (False,) * 40 + (True,) * 20, (0.0,) * 60, (1.0,) * 60),)))
        model = with_lora(make_model(kind, hidden_size=64, max_position_embeddings=128))
        device = self.device if card else "cpu"
        model = model.to(device, getattr(self.torch, dtype))
        with self.card_side() if card else nullcontext():
            scorer = Scorer(model)
            if not scorer.shares:
                raise RuntimeError(f"row by row: {scorer.why_apart}")
            logprobs = []
            for pack in packs_of(examples, 1 << 20):
                logprob_N = scorer.score(pack).logprob_N
                weights = self.torch.linspace(-1, 1, len(logprob_N), device=device)
                (logprob_N * weights).sum().backward()
                logprobs.append(logprob_N.detach())
        grads = [weight.grad.flatten() for weight in model.parameters() if weight.grad is not None]
        return tuple(self.torch.cat(each).double().cpu() for each in (logprobs, grads))  # type: ignore[return-value]

    def step(self) -> None:
        from tests.gpu.grpo_step import TrainConfig, compare

        size = "tiny" if self.cpu else "0.6b"
        self.shorten()
        self.tell("step", lambda: compare(size, self.device, TrainConfig().micro_batch_tokens))

    def sizes(self) -> None:
        from art_patch.training.loop.loading import _recompute_blocks
        from tests.benchmarks.grpo_step import WORK, Ours, make_model, runs
        from tests.gpu.grpo_step import SIZES, Plain

        short, long, sampled = (32, 64, 8) if self.cpu else (4096, 32_768, 1024)
        WORK["row_4k"] = runs(1, 1, short - sampled, sampled, 0, 1)
        WORK["row_32k"] = runs(1, 1, long - sampled, sampled, 0, 1)
        WORK["siblings_32k"] = runs(1, 8, long - 8 * sampled if not self.cpu else 32, sampled, 0, 1)
        shape = SIZES["tiny" if self.cpu else self.name]

        def load() -> Any:
            model = make_model("bf16", shape, self.device)
            _recompute_blocks(model)
            return model

        self.side: Any = None
        self.tell(self.name, lambda: setattr(self, "side", Ours(load(), 1 << 20)) or {})
        for work in ("row_4k", "row_32k", "siblings_32k") if self.side else ():
            self.tell(f"{self.name}_{work}", lambda work=work: self.work(work, shape))
        ours_s, self.side = getattr(self, "row_32k_s", None), None
        gc.collect()
        if self.name == "0.6b" and ours_s:

            def plain() -> dict[str, Any]:
                side = Plain(load())
                return {"0.6b_row_32k_vs_plain": ours_s / self.best_s(lambda: side.step("row_32k"), 1)}

            self.tell("0.6b_row_32k_vs_plain", plain)

    def work(self, work: str, shape: dict[str, Any]) -> dict[str, Any]:
        from art_patch.doctor.base_shape import shape_of
        from art_patch.doctor.memory import Update, step_bytes
        from art_patch.training.data.packing import tree_of
        from tests.benchmarks.grpo_step import WORK, np, row_of
        from tests.gpu.grpo_step import peak_gib

        rows = [row_of(run) for run in WORK[work][0]]
        if not self.cpu:
            self.torch.cuda.reset_peak_memory_stats()
        taken = self.best_s(lambda: self.side.step(work), 1)
        if work == "row_32k":
            self.row_32k_s = taken
        name, found = f"{self.name}_{work}", {}
        found[f"{name}_tokens_per_s"] = sum(len(row.ids_T) for row in rows) / taken
        distinct = len(tree_of([np.array(row.ids_T) for row in rows]).ids_P)
        update = Update(distinct, sum(sum(row.sampled_T) for row in rows), cuda=True)
        told = step_bytes(shape_of({"model_type": "qwen3", "torch_dtype": "bfloat16", **shape}), update) / 2**30
        if gib := peak_gib(self.device):
            found |= {f"{name}_gib": gib, f"{name}_forecast": told / gib}
        return found

    def shorten(self) -> None:
        if self.cpu:
            from tests.benchmarks.grpo_step import WORK, runs

            WORK.update(siblings=runs(1, 8, 24, 4, 0, 1), turns=runs(1, 8, 16, 4, 4, 2))


def distances(found: tuple[Any, Any], exact: tuple[Any, Any]) -> tuple[float, float]:
    """Root mean square of log-probabilities' differences (nats), and relative difference of gradients."""
    logprobs, grads = (one - other for one, other in zip(found, exact, strict=True))
    return float(logprobs.square().mean().sqrt()), float(grads.norm() / exact[1].norm())


if __name__ == "__main__":
    main()
