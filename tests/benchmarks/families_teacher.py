"""On-policy distillation: whether cycles with a teacher and without a judge bring a policy nearer to the teacher.

::

    python tests/benchmarks/families_teacher.py [--json] [--seeds 5] [--cycles 4]

Progress goes to stderr; with `--json` the last line of stdout is one object of named metrics, with `missed` listing the
targets that were not met. Half a minute for each seed.

A tiny random base serves; the teacher is the base with a random LoRA merged into it, over real HTTP. In each cycle the
policy answers 72 prompts once, so no run has a sibling, and `retrain` learns from the teacher's log-probabilities. The
gate lets pass whatever can be scored, because the figure is about the updates.

- `reverse_kl_before_nats`, `reverse_kl_after_nats`: KL(policy || teacher) a token, exact over the whole vocabulary, on
  answers that the base, and the last policy, sampled for prompts that were never learned from. Means over the seeds.
- `reverse_kl_fell`: share of the seeds in which it fell. `reverse_kl_left`: the mean after, divided by the mean before;
  `reverse_kl_left_worst`: the same in the worst seed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from art_patch.pipeline import TeacherJudge  # noqa: E402 - the line above makes tests importable
from art_patch.rewards import Teacher  # noqa: E402
from art_patch.serving import EmbeddedEngine  # noqa: E402
from tests.support.benchmark_report import Target, finish, say  # noqa: E402
from tests.support.cycles import CONFIG, WORDS, Place, eager  # noqa: E402
from tests.support.engines import serve  # noqa: E402
from tests.support.families import logits_of  # noqa: E402
from tests.support.teachers import TeacherServer, make_teacher, serve_teacher  # noqa: E402
from tests.support.tiny import make_tiny_model  # noqa: E402
from tests.support.train_jobs import plain_model  # noqa: E402

TARGETS = (
    Target("reverse_kl_fell", 1.0, None, "of the seeds"),
    Target("reverse_kl_left", None, 0.75, "of the reverse KL before"),
)
ASKED = ("how many", "how much is a", "where is the", "is there", "have you", "please send")
MORE = [f"{how} {word}?" for word in WORDS for how in ASKED]
TESTED = [f"who sells {word}?" for word in WORDS]
TAUGHT = replace(
    eager(CONFIG),
    min_group_size=1,
    train=replace(CONFIG.train, learning_rate=2e-2, epochs=8, minibatches=4, lora_rank=16),
)


def reverse_kl_nats(place: Place, base: Path, policy: str, teacher: TeacherServer, *, seed: int) -> float:
    """Exact at each token that the policy samples: the sum over the vocabulary, so only the prefixes are sampled."""
    known = place.store.ledger.policy(policy)
    model = plain_model(base, Path(known.path) if known is not None and known.path else None)
    found: list[torch.Tensor] = []
    for number, question in enumerate(TESTED):
        answer: Any = place.client.chat(
            model=policy, messages=[{"role": "user", "content": question}], max_tokens=24, n=8,
            return_token_ids=True, logprobs=True, seed=1000 * seed + number,
        )  # fmt: skip
        for choice in answer["choices"]:
            prompt = answer["prompt_token_ids"]
            ids_T = torch.tensor([[*prompt, *choice["token_ids"]]])
            with torch.no_grad():
                ours_TV, theirs_TV = (logits_of(each, ids_T)[0].log_softmax(-1) for each in (model, teacher.model))
            kl_T = (ours_TV.exp() * (ours_TV - theirs_TV)).sum(-1)
            found.append(kl_T[len(prompt) - 1 : -1])
    return float(torch.cat(found).mean())


def one_seed(seed: int, cycles: int, directory: Path) -> tuple[float, float]:
    """Return the reverse KL before and after."""
    base = make_tiny_model(directory / "base", seed=seed, hidden=32, vocab_size=320)
    other = make_teacher(directory / "teacher", base, seed=seed)
    engine = EmbeddedEngine.from_pretrained(base, adapters_root=directory / "adapters")
    with serve(engine) as running, serve_teacher(other) as teacher:
        place = Place(directory, base, running.client)
        measured = [reverse_kl_nats(place, base, "agent@0", teacher, seed=seed)]
        for number in range(cycles):
            champion = place.champion or "agent@0"
            place.traffic(champion, seed=100 * seed + number, siblings=1, questions=MORE)
            report = place.cycle(TeacherJudge(Teacher("big", teacher.url), max_tokens=64), TAUGHT)
            measured.append(reverse_kl_nats(place, base, place.champion or "agent@0", teacher, seed=seed))
            say(f"seed {seed}, cycle {number + 1}: {report.outcome}, reverse KL {measured[-1]:.3f}")
        place.store.close()
    return measured[0], measured[-1]


def measure(seeds: int, cycles: int) -> dict[str, float]:
    """Return the metrics of all seeds."""
    began, found = time.monotonic(), list[tuple[float, float]]()
    for seed in range(seeds):
        with tempfile.TemporaryDirectory() as temporary:
            found.append(one_seed(seed, cycles, Path(temporary)))
            say(f"seed {seed}: reverse KL {found[-1][0]:.3f} before, {found[-1][1]:.3f} after {cycles} cycles")
    before, after = (fmean(each[place] for each in found) for place in (0, 1))
    return {
        "reverse_kl_before_nats": before,
        "reverse_kl_after_nats": after,
        "reverse_kl_fell": fmean(last < first for first, last in found),
        "reverse_kl_left": after / before,
        "reverse_kl_left_worst": max(last / first for first, last in found),
        "seeds": seeds,
        "cycles": cycles,
        "took_s": round(time.monotonic() - began, 1),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--cycles", type=int, default=4)
    given = parser.parse_args()
    torch.set_num_threads(1)
    finish(measure(given.seeds, given.cycles), TARGETS, as_json=given.json)


if __name__ == "__main__":
    main()
