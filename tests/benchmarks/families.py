"""Which of the bases that people serve can be trained and served, each with its real configuration, shrunk in size.

::

    python tests/benchmarks/families.py [--json] [--only families served] [--bases "Qwen 3" "Gemma 3"]

Progress goes to stderr; with `--json` the last line of stdout is one object of named metrics, with `missed` listing the
targets that were not met. The checkpoints are random, see `tests/support/real_bases.py`. A minute for `families`, half
a minute of the real vLLM on the CPU for each base that is `served` (`art-patch init vllm` makes its environment).

- `families`: bases that load, get a LoRA, make one update whose adapter the validator accepts, and whose gradient is
  that of transformers with one row after the other (largest relative difference of a weight's gradient in fp64:
  `gradient_difference`).
- `told_s`: of the others, the longest time until `art-patch serve` would say why.
- `served`: of the bases that trained, those for which the real vLLM answers a chat with the policy, with the
  log-probabilities of the trainer (largest difference, fp32: `served_gap_nats`). `not_served` names the others. Those
  with linear attention are served in bfloat16, the only precision in which vLLM computes it on a CPU.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from art_patch.errors import ArtPatchError  # noqa: E402 - the line above makes tests importable
from art_patch.pipeline.base_check import check_base  # noqa: E402
from art_patch.policies import read_base_model, validate_adapter  # noqa: E402
from art_patch.serving import VllmEngine, VllmOptions  # noqa: E402
from art_patch.serving.vllm.environment import find_vllm  # noqa: E402
from art_patch.settings import load_settings  # noqa: E402
from art_patch.training import Example, TrainGroup  # noqa: E402
from art_patch.training.data.packing import packs_of  # noqa: E402
from art_patch.training.loop.loading import load_policy, require_servable  # noqa: E402
from art_patch.training.loop.update import update  # noqa: E402
from art_patch.training.scoring import Scorer  # noqa: E402
from tests.support.benchmark_report import Target, finish, say  # noqa: E402
from tests.support.engines import serve  # noqa: E402
from tests.support.families import logits_of  # noqa: E402
from tests.support.real_bases import BASES, make_base  # noqa: E402
from tests.support.train_jobs import SMALL, make_job, random_groups, trainable  # noqa: E402

TARGETS = (
    Target("families", 12, None, "of 14 bases: trained exactly, and accepted by the validator"),
    Target("gradient_difference", None, 1e-5, "between an update's gradient and that of one row after the other"),
    Target("told_s", None, 5, "seconds until the others are told"),
    Target("served_gap_nats", None, 1e-3, "between vLLM's log-probabilities and the trainer's"),
)

POLICY = "agent@1"
HYBRID = ("qwen3_5", "qwen3_next")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", nargs="+", choices=("families", "served"), default=("families", "served"))
    parser.add_argument("--bases", nargs="+", choices=tuple(BASES), default=tuple(BASES))
    parser.add_argument("--home", type=Path, help="keep the checkpoints here")
    parser.add_argument("--vllm-python", type=Path, help="the interpreter of another environment that has vLLM")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        home = (asked.home or Path(temporary)).absolute()
        metrics, trained = families(home, asked.bases)
        if "served" in asked.only:
            metrics |= served(home, trained, asked.vllm_python)
    finish(metrics, TARGETS, as_json=asked.json)


# --- trained ---


def families(home: Path, bases: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Train each base; return the metrics, and the bases that were trained."""
    found: dict[str, float] = {}
    refused: dict[str, str] = {}
    told_s = 0.0
    for name in bases:
        place = home / name.replace(" ", "-").lower()
        base = make_base(name, place / "base")
        began = time.monotonic()
        try:
            check_base(str(base))
            require_servable(str(base))
        except ArtPatchError as error:
            told_s = max(told_s, time.monotonic() - began)
            refused[name] = str(error)
            say(f"{name}: refused: {error}")
            continue
        groups = random_groups(base, groups=2, siblings=4)
        try:
            job = replace(make_job(base, place / "adapters" / POLICY, groups), config=SMALL)
            done = update(job, place / "job")
            modules = validate_adapter(place / "adapters", POLICY, read_base_model(base)).modules
        except ArtPatchError as error:
            refused[name] = str(error)
            say(f"{name}: {error}")
            continue
        found[name] = difference(base, groups)
        kinds = sorted({module.rpartition(".")[2] for module in modules})
        shared = "each common beginning once" if done.why_not_shared is None else f"row by row ({done.why_not_shared})"
        say(f"{name}: {len(modules)} layers ({', '.join(kinds)}), {shared}, gradient differs by {found[name]:.1e}")
    exact = [name for name, off in found.items() if off <= 1e-5]
    metrics = {
        "families": len(exact),
        "gradient_difference": max(found.values(), default=math.nan),
        "told_s": told_s,
        "refused": refused,
    }
    return metrics, exact


def difference(base: Path, groups: Sequence[TrainGroup]) -> float:
    """Return the largest relative difference of a weight's gradient between packs and one row after the other."""
    examples = [sibling.example for group in groups for sibling in group.siblings]
    packed, plain = (gradient(base, examples, by_packs) for by_packs in (True, False))
    return max(float((packed[name] - plain[name]).norm() / plain[name].norm()) for name in plain)


def gradient(base: Path, examples: Sequence[Example], by_packs: bool) -> dict[str, torch.Tensor]:
    """Return the gradient of the sum of log-probabilities times advantages."""
    model = trainable(base)
    model.get_base_model().set_experts_implementation("eager")  # torch groups no products of fp64
    if by_packs:
        scorer = Scorer(model)
        scorer.prove(examples)
        for pack in packs_of(examples, 1 << 20):
            advantage_N = torch.tensor([examples[pack.examples_E[e]].advantage for e in pack.example_N])
            (scorer.score(pack).logprob_N * advantage_N).sum().backward()
    else:
        for example in examples:
            for row in example.rows:
                logit_TV = logits_of(model, torch.tensor([row.ids_T]))[0]
                at = [t for t in range(1, len(row.ids_T)) if row.sampled_T[t]]
                hot_TV = torch.stack([logit_TV[t - 1] / row.temperature_T[t] for t in at]).log_softmax(-1)
                logprob = hot_TV[range(len(at)), [row.ids_T[t] for t in at]].sum()
                (logprob * example.advantage).backward()
    return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


# --- served ---


def served(home: Path, bases: Sequence[str], python: Path | None) -> dict[str, Any]:
    """Let the real vLLM answer with each policy; return how far its log-probabilities are from the trainer's."""
    settings = load_settings()
    found = find_vllm(settings.vllm_python, settings.environments)
    python = python or (found and found.python)
    if python is None:
        say("no environment with vLLM: art-patch init vllm")
        return {"served": None}
    gaps: dict[str, float] = {}
    failed: dict[str, str] = {}
    for name in bases:
        place = home / name.replace(" ", "-").lower()
        try:
            gaps[name] = gap(place, name, python)
            say(f"{name}: served, {gaps[name]:.1e} nats from the trainer")
        except (ArtPatchError, AssertionError) as error:
            failed[name] = str(error)[-400:]
            say(f"{name}: not served: {failed[name]}")
    exact = [off for name, off in gaps.items() if BASES[name].model_type not in HYBRID]
    return {
        "served": sorted(gaps),
        "served_gap_nats": max(exact, default=math.nan),
        "served_gap_nats_bfloat16": max(set(gaps.values()) - set(exact), default=None),
        "not_served": failed,
    }


def gap(place: Path, name: str, python: Path) -> float:
    """Return the largest difference of a log-probability between vLLM and the trainer, on a sampled answer."""
    base, adapters = place / "base", place / "adapters"
    # The part that sees is not loaded: its processor is not part of these checkpoints.
    extra = () if BASES[name].vision is None else ("--language-model-only",)
    kind = BASES[name].model_type
    # vLLM computes linear attention on a CPU in bfloat16 alone. Parsers ask for tokens that these tokenizers lack.
    options = VllmOptions(
        python, base, "agent", model_type=kind, max_model_len=512, threads=1, extra=extra,
        dtype="bfloat16" if kind in HYBRID else "float32", tool_parser=None if kind == "gpt_oss" else "hermes",
    )  # fmt: skip
    engine = VllmEngine(options, read_base_model(base), adapters_root=adapters, home=place / "vllm")
    with closing(engine), serve(engine, policies=[POLICY], ready_s=240) as running:
        answer = running.client.chat(
            model=POLICY, messages=[{"role": "user", "content": "how many plums are in the shop?"}], max_tokens=24,
            temperature=1.0, seed=3, logprobs=True, return_token_ids=True,
        )  # fmt: skip
    choice = answer["choices"][0]
    theirs = [token["logprob"] for token in choice["logprobs"]["content"]]
    given, said = answer["prompt_token_ids"], choice["token_ids"]
    model = load_policy(str(base), adapters / POLICY, SMALL)
    with torch.no_grad():
        logprob_TV = logits_of(model, torch.tensor([[*given, *said]]))[0].log_softmax(-1)
    ours = [float(logprob_TV[len(given) + place - 1, token]) for place, token in enumerate(said)]
    return max(abs(one - other) for one, other in zip(ours, theirs, strict=True))


if __name__ == "__main__":
    main()
