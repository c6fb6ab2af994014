"""What the store holds, for the trackers that teams look at anyway.

Fed by the job and the command line, never by the app: an app's call waits for no tracker. `episodes` makes plain
records of what is in the store and knows no tracker; each other module writes such records with one tracker's own
client, which it imports when it is used. What was written is noted in the store's table `sent`, so a second export
writes nothing twice.
"""

# pyright: reportUnusedImport=false
from __future__ import annotations

from typing import TYPE_CHECKING

from art_patch._lib.lazy import lazily

if TYPE_CHECKING:
    from art_patch.trackers.address import without_login
    from art_patch.trackers.delivery import feed, pages_of_episodes
    from art_patch.trackers.episodes import Episode, Tracker
    from art_patch.trackers.langfuse_traces import Langfuse
    from art_patch.trackers.mlflow_runs import Mlflow
    from art_patch.trackers.otlp import Otlp
    from art_patch.trackers.prometheus import exposition
    from art_patch.trackers.tensorboard_scalars import TensorBoard
    from art_patch.trackers.trace_ids import trace_id_of
    from art_patch.trackers.wandb_runs import Wandb
else:
    __getattr__ = lazily(
        __name__,
        {
            "address": "without_login",
            "delivery": "feed pages_of_episodes",
            "episodes": "Episode Tracker",
            "langfuse_traces": "Langfuse",
            "mlflow_runs": "Mlflow",
            "otlp": "Otlp",
            "prometheus": "exposition",
            "tensorboard_scalars": "TensorBoard",
            "trace_ids": "trace_id_of",
            "wandb_runs": "Wandb",
        },
    )
