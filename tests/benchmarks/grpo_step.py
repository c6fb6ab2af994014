"""One optimizer step on agent traffic, beside TRL's on the same tokens.

::

    python tests/benchmarks/grpo_step.py [--json] [--quick] [--only siblings turns rss] [--precision fp32 bf16]

Progress goes to stderr; with `--json` the last line of stdout is one object of named metrics, with `missed` listing the
targets that were not met; without it, a table. Needs `trl` beside torch, transformers and peft.

A step is: log-probabilities, loss (`dapo`), backward of every micro-batch, clip, AdamW; nothing is sampled. The model
is a random Qwen3 of 5.2 M parameters with a LoRA of rank 8 on its seven linear layers. Both sides run in one process,
one after the other, with one thread, and CPU time is compared, the best of each side; each makes one group's step
before that. `--quick` takes a quarter of the groups.

- `siblings_vs_trl`: 8 groups x 8 siblings, 512 shared and 64 sampled tokens. TRL gets its best case: micro-batches of 8
  rows, no gradient checkpointing.
- `turns_vs_trl_one_row`: 4 groups x 4 trajectories x 6 turns, 256 shared tokens, 32 sampled and 64 of a tool a turn.
  TRL gets each trajectory as one row with a tool mask, which is its best case.
- `turns_vs_trl_row_per_turn`: the same, TRL gets a row for each turn, as trainers do that are fed with calls, shuffled
  and padded to the longest of the step, as TRL does with what it generated. `turns_vs_trl_row_per_turn_sorted`: rows of
  one length stand together, so that TRL pays no padding, which it never does by itself.
- `rss_vs_trl`: peak memory of a process that makes the `siblings` step, torch included. `step_memory_vs_trl`: what the
  step added to it.
- `*_bf16`: the same in bf16. TRL's is autocast over fp32 weights, ours bf16 weights (as they are served) under a fp32
  LoRA. On a CPU without bf16 instructions these say little.
- `gradient_vs_trl`: relative difference of all LoRA gradients in fp32, so that what is compared is the same work.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402 - the line above makes ours importable
import torch  # noqa: E402

from art_patch.training import Example, LossConfig, Row  # noqa: E402
from art_patch.training.data.packing import packs_of  # noqa: E402
from art_patch.training.loop.loading import fuse  # noqa: E402
from art_patch.training.losses import LossInput, policy_loss  # noqa: E402
from art_patch.training.scoring import Scorer  # noqa: E402
from tests.support.benchmark_report import Target, finish, say  # noqa: E402

TARGETS = (
    Target("siblings_vs_trl", 5, None, "times less CPU time than TRL, fp32"),
    Target("turns_vs_trl_one_row", 1.6, None, "the same, TRL's best case"),
    Target("turns_vs_trl_row_per_turn", 10, None, "the same, a row a turn"),
    Target("siblings_vs_trl_bf16", 5, None, "in bf16"),
    Target("turns_vs_trl_one_row_bf16", 1.6, None, "in bf16"),
    Target("turns_vs_trl_row_per_turn_bf16", 10, None, "in bf16"),
    Target("rss_vs_trl", None, 0.5, "peak memory / TRL's"),
    Target("rss_vs_trl_bf16", None, 0.5, "in bf16"),
    Target("gradient_vs_trl", None, 1e-5, "relative difference in fp32"),
)
VOCABULARY = 2048
REPEATS = 2
MICRO_BATCH_TOKENS = 2400  # a group of `turns`, two of `siblings`
LOSS = LossConfig(name="dapo", importance_cap=None)
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@dataclass(frozen=True)
class Run:
    """A trajectory: `prompt` and then, alternating, what was sampled and what a tool gave."""

    prompt: list[int]
    parts: list[list[int]]
    logprobs: list[list[float]]
    advantage: float


def runs(groups: int, siblings: int, prompt: int, sampled: int, tool: int, turns: int) -> list[list[Run]]:
    """Random tokens, random rewards, log-probabilities near those of a random model so that some ratios are clipped."""
    draw = np.random.default_rng(0)

    def tokens(count: int) -> list[int]:
        return draw.integers(5, VOCABULARY, count).tolist()

    def run(shared: list[int]) -> Run:
        parts: list[list[int]] = []
        for turn in range(turns):
            parts += [tokens(sampled), tokens(tool)] if turn < turns - 1 else [tokens(sampled)]
        logprobs = [(-7.65 + 0.2 * draw.standard_normal(sampled)).tolist() for _ in range(turns)]
        return Run(shared, parts, logprobs, float(draw.standard_normal()))

    return [[run(shared) for _ in range(siblings)] for shared in (tokens(prompt) for _ in range(groups))]


WORK: dict[str, list[list[Run]]] = {
    "siblings": runs(8, 8, 512, 64, 0, 1),
    "turns": runs(4, 4, 256, 32, 64, 6),
}


SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32, "tie_word_embeddings": True,
}  # fmt: skip


def make_model(precision: str, shape: Mapping[str, Any] = SHAPE, device: str = "cpu") -> Any:
    """A random Qwen3 with a LoRA that is not zero; equal arguments give equal weights."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, Qwen3Config

    torch.manual_seed(0)
    with torch.device(device):  # in its precision from the start: 32 B in float32 fill no card
        base: Any = AutoModelForCausalLM.from_config(
            Qwen3Config(**shape, max_position_embeddings=4096),
            dtype=torch.bfloat16 if precision == "bf16" else torch.float32,
        )
    model = get_peft_model(base, LoraConfig(r=8, lora_alpha=16, target_modules=LINEARS, task_type="CAUSAL_LM"))
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():  # B starts at zero; then A would have no gradient
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.copy_(torch.randn(weight.shape, generator=draw).to(device) * 0.02)
    return model.to(device)


def trained(model: Any) -> list[Any]:
    return [weight for weight in model.parameters() if weight.requires_grad]


class Ours:
    """The step as the trainer makes it."""

    def __init__(self, model: Any, micro_batch_tokens: int = MICRO_BATCH_TOKENS) -> None:
        self.model = model
        self.micro_batch_tokens = micro_batch_tokens
        self.model.eval()
        fuse(self.model)
        self.scorer = Scorer(self.model)
        assert self.scorer.shares, self.scorer.why_apart
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(trained(self.model), lr=1e-6)

    def step(self, work: str, groups: int | None = None) -> None:
        self.optimizer.zero_grad()
        examples = [Example((row_of(run),), run.advantage) for group in WORK[work][:groups] for run in group]
        tokens = sum(example.sampled for example in examples)
        for pack in packs_of(examples, self.micro_batch_tokens):
            scored = self.scorer.score(pack)
            recorded_N = torch.from_numpy(pack.recorded_N).to(self.model.device)
            loss, _ = policy_loss(
                LossInput(
                    logprob_N=scored.logprob_N,
                    old_N=recorded_N,
                    recorded_N=recorded_N,
                    advantage_N=torch.from_numpy(pack.advantage_N).to(self.model.device),
                    trajectory_N=torch.from_numpy(pack.examples_E[pack.example_N]).to(self.model.device),
                    tokens_in_step=tokens,
                    trajectories_in_step=len(examples),
                    entropy_N=scored.entropy_N,
                ),
                LOSS,
            )
            loss.backward()
        torch.nn.utils.clip_grad_norm_(trained(self.model), 1.0)
        self.optimizer.step()


def row_of(run: Run) -> Row:
    ids = list(run.prompt)
    sampled = [False] * len(ids)
    logprobs = [0.0] * len(ids)
    recorded = iter(run.logprobs)
    for place, part in enumerate(run.parts):
        mine = place % 2 == 0
        ids += part
        sampled += [mine] * len(part)
        logprobs += next(recorded) if mine else [0.0] * len(part)
    return Row(tuple(ids), tuple(sampled), tuple(logprobs), (1.0,) * len(ids))


class Trl:
    """The step as TRL's trainer makes it from the same tokens."""

    def __init__(self, model: Any, precision: str) -> None:
        from datasets import Dataset
        from trl.trainer.grpo_config import GRPOConfig
        from trl.trainer.grpo_trainer import GRPOTrainer

        from tests.support.tiny import make_tokenizer

        config = GRPOConfig(
            output_dir=tempfile.mkdtemp(), report_to=[], bf16=precision == "bf16", use_cpu=model.device.type == "cpu",
            gradient_checkpointing=False, per_device_train_batch_size=8, num_generations=8, disable_dropout=True,
            loss_type="dapo", epsilon=0.2, epsilon_high=0.28, beta=0.0,
        )  # fmt: skip

        def no_reward(completions: list[Any], **_: Any) -> list[float | None]:
            return [0.0] * len(completions)

        self.trainer: Any = GRPOTrainer(
            model=model, args=config, processing_class=make_tokenizer(512), reward_funcs=no_reward,
            train_dataset=Dataset.from_list([{"prompt": "x"}] * 64),
        )  # fmt: skip
        self.trainer.current_gradient_accumulation_steps = 1
        self.model = self.trainer.model
        self.model.train()
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(trained(self.model), lr=1e-6)

    def step(self, work: str, groups: int | None = None) -> None:
        self.optimizer.zero_grad()
        of_rows = work.startswith("row_per_turn")
        given = [run for group in WORK["turns" if of_rows else work][:groups] for run in group]
        tokens = sum(len(part) for run in given for part in run.parts[::2])
        for batch in turns(given, sort=work.endswith("sorted")) if of_rows else trajectories(given):
            batch = {name: each.to(self.model.device) for name, each in batch.items()}
            batch |= {"num_items_in_batch": torch.tensor(tokens, device=self.model.device)}
            with self.trainer.compute_loss_context_manager():
                loss = self.trainer.compute_loss(self.model, batch)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(trained(self.model), 1.0)
        self.optimizer.step()


def trajectories(given: Sequence[Run]) -> Iterator[dict[str, Any]]:
    """A row for each trajectory."""
    rows: list[tuple[Any, ...]] = []
    for run in given:
        row, prompt = row_of(run), len(run.prompt)
        rows.append((run.prompt, row.ids_T[prompt:], row.sampled_T[prompt:], row.logprobs_T[prompt:], run.advantage))
    yield from batches(rows)


def turns(given: Sequence[Run], *, sort: bool) -> Iterator[dict[str, Any]]:
    """A row for each turn."""
    rows: list[tuple[Any, ...]] = []
    for run in given:
        prompt = list(run.prompt)
        for turn, logprobs in enumerate(run.logprobs):
            answer = run.parts[2 * turn]
            rows.append((list(prompt), answer, [True] * len(answer), logprobs, run.advantage))
            prompt += answer + (run.parts[2 * turn + 1] if turn < len(run.logprobs) - 1 else [])
    if sort:
        yield from batches(sorted(rows, key=lambda row: len(row[0])))
        return
    order = np.random.default_rng(0).permutation(len(rows))
    yield from batches([rows[index] for index in order], prompt_tokens=max(len(row[0]) for row in rows))


def batches(rows: Sequence[tuple[Any, ...]], size: int = 8, prompt_tokens: int = 0) -> Iterator[dict[str, Any]]:
    """Rows, `size` at a time, in TRL's words; prompts padded on the left to `prompt_tokens`."""
    for start in range(0, len(rows), size):
        prompts, answer, mask, logprobs, advantage = zip(*rows[start : start + size], strict=True)
        width = max(prompt_tokens, *map(len, prompts))
        ids = torch.tensor(answer)
        yield {
            "prompt_ids": torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts]),
            "prompt_mask": torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]),
            "completion_ids": ids,
            "completion_mask": torch.ones_like(ids),
            "tool_mask": torch.tensor(mask).long(),
            "advantages": torch.tensor(advantage, dtype=torch.float32),
            "old_per_token_logps": torch.tensor(logprobs, dtype=torch.float32),
        }


SIDES: dict[str, Callable[[str], Ours | Trl]] = {
    "ours": lambda precision: Ours(make_model(precision)),
    "trl": lambda precision: Trl(make_model("fp32"), precision),
}


def cpu_s(work: Callable[[], None]) -> float:
    begun = time.process_time()
    work()
    return time.process_time() - begun


def compare(precision: str, works: Sequence[tuple[str, str, str]]) -> dict[str, float]:
    """Both sides in turns; (figure, our work, TRL's work) each."""
    ours, trl = SIDES["ours"](precision), SIDES["trl"](precision)
    suffix = "" if precision == "fp32" else f"_{precision}"
    metrics: dict[str, float] = {}
    for figure, our_work, trl_work in works:
        ours.step(our_work, groups=1)
        trl.step(trl_work, groups=1)
        taken: dict[str, list[float]] = {"ours": [], "trl": []}
        for _ in range(1 if trl_work.startswith("row_per_turn") else REPEATS):  # these take minutes
            taken["ours"].append(cpu_s(lambda work=our_work: ours.step(work)))
            taken["trl"].append(cpu_s(lambda work=trl_work: trl.step(work)))
            taken["ours"].append(cpu_s(lambda work=our_work: ours.step(work)))
        say(
            f"{figure}{suffix}: " + ", ".join(f"{side} {[round(t, 2) for t in times]}" for side, times in taken.items())
        )
        metrics[figure + suffix] = min(taken["trl"]) / min(taken["ours"])
        metrics[figure.replace("_vs_trl", "") + suffix + "_s"] = min(taken["ours"])
    return metrics


def gradient_difference() -> float:
    """Relative difference of the gradients that both sides clip, over all works."""
    ours, trl = SIDES["ours"]("fp32"), SIDES["trl"]("fp32")
    worst = 0.0
    for our_work, trl_work in (("siblings", "siblings"), ("turns", "turns"), ("turns", "row_per_turn")):
        found: list[dict[str, Any]] = []
        for side, work in ((ours, our_work), (trl, trl_work)):
            side.optimizer = torch.optim.SGD(trained(side.model), lr=0.0)
            side.step(work)
            found.append({name: w.grad.clone() for name, w in side.model.named_parameters() if w.grad is not None})
        mine, theirs = found
        assert mine.keys() == theirs.keys()
        difference = sum(float((mine[name] - theirs[name]).norm() ** 2) for name in mine) ** 0.5
        worst = max(worst, difference / sum(float(theirs[name].norm() ** 2) for name in mine) ** 0.5)
    return worst


def peak_mib() -> float:
    # Not `ru_maxrss`: a child inherits its parent's.
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


def memory(precision: str) -> dict[str, float]:
    """Peak memory of each side, each in a process of its own."""
    peaks: dict[str, tuple[float, float]] = {}
    for side in ("ours", "trl"):
        done = subprocess.run(
            [sys.executable, __file__, "--memory-of", side, "--precision", precision],
            stdout=subprocess.PIPE, text=True, check=True,
        )  # fmt: skip
        peaks[side] = tuple(json.loads(done.stdout.splitlines()[-1]))
        say(f"memory of {side}, {precision}: before and at its peak {peaks[side]} MiB")
    suffix = "" if precision == "fp32" else f"_{precision}"
    (before, peak), (trl_before, trl_peak) = peaks["ours"], peaks["trl"]
    return {
        f"rss_vs_trl{suffix}": peak / trl_peak,
        f"step_memory_vs_trl{suffix}": (peak - before) / (trl_peak - trl_before),
    }


def main() -> None:
    """Measure what is asked for."""
    parser = argparse.ArgumentParser(description="One optimizer step beside TRL's.")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", nargs="+", choices=("siblings", "turns", "rss", "gradient"), default=None)
    parser.add_argument("--precision", nargs="+", choices=("fp32", "bf16"), default=["fp32", "bf16"])
    parser.add_argument("--memory-of", choices=("ours", "trl"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    if asked.quick:
        for name in WORK:
            WORK[name] = WORK[name][: len(WORK[name]) // 4]
    if asked.memory_of:
        side = SIDES[asked.memory_of](asked.precision[0])
        before = peak_mib()
        side.step("siblings")
        print(json.dumps([before, peak_mib()]))
        return
    only = asked.only or ("siblings", "turns", "rss", "gradient")
    works = {
        "siblings": [("siblings_vs_trl", "siblings", "siblings")],
        "turns": [
            ("turns_vs_trl_one_row", "turns", "turns"),
            ("turns_vs_trl_row_per_turn", "turns", "row_per_turn"),
            ("turns_vs_trl_row_per_turn_sorted", "turns", "row_per_turn_sorted"),
        ],
    }  # fmt: skip
    metrics: dict[str, Any] = {}
    if "gradient" in only:
        metrics["gradient_vs_trl"] = gradient_difference()
    for precision in asked.precision:
        chosen = [work for name in ("siblings", "turns") if name in only for work in works[name]]
        if chosen:
            metrics |= compare(precision, chosen)
        if "rss" in only:
            metrics |= memory(precision)
    finish(metrics, TARGETS, as_json=asked.json)


if __name__ == "__main__":
    main()
