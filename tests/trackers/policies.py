"""A store with two policies, metrics of an update, and runs that each answered."""

from __future__ import annotations

import math
from pathlib import Path

from art_patch.store import Store, open_store
from art_patch.types import Call, Choice, Policy, Score, TrajectoryInfo

HISTORY = [{"phase": "groups", "epoch": 0, "loss": 0.5, "kl_nats": 0.0}, {"phase": "groups", "epoch": 1, "loss": 0.25}]
METRICS = {
    "train": {
        "loss": 0.375, "kl_nats": 0.125, "stopped": None, "eval_loss": math.nan, "history": HISTORY,
        "config": {"learning_rate": 1e-4, "loss": {"name": "grpo"}}, "left": {"too long, so left": 3},
    },
    "gate": {"scenarios": 9, "lower_bound": 0.0625, "checks": [{"name": "x"}]},
}  # fmt: skip


def filled(home: Path) -> Store:
    """`agent@1` was promoted; `agent@0` answered runs with rewards 0 and 0.5, `agent@1` one with 1."""
    store = open_store(f"sqlite:///{home}/shop/store.db")
    adapter = home / "shop" / "adapters" / "agent@1"
    adapter.mkdir(parents=True)
    (adapter / "MANIFEST.json").write_text('{"base_sha256": "ff"}')
    store.ledger.add_base("agent@0", "/base", "ff", who="w", now=50.0)
    trained = Policy("agent@1", "/base", "ff", "candidate", 60.0, str(adapter), "agent@0", METRICS)
    store.ledger.add_candidate(trained, trained_on=(), who="w")
    store.ledger.move("agent@1", "champion", who="w", reason="won", now=61.0)
    for key, policy, reward in (("a", "agent@0", 0.0), ("b", "agent@0", 0.5), ("c", "agent@1", 1.0)):
        run(store, key, policy, reward)
    return store


def run(store: Store, key: str, policy: str, reward: float) -> None:
    answer = Choice(0, {"role": "assistant", "content": "yes"}, "stop")
    call = Call(f"{key}-1", key, 70.0, "gpt-5", ({"role": "user", "content": "hi"},), (answer,), policy=policy)
    store.write([TrajectoryInfo(key, 70.0), call, Score(f"{key}-s", key, "reward", reward, "user", 71.0)])
