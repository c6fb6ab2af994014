"""The store's runs and policies, sent to the trackers that teams use already.

The job and the command line send; the app never does, so no call of an app waits for a tracker. `episodes` makes plain
records of the store's data and knows no tracker. Each tracker's module writes such records with that tracker's own
client. `delivery` notes each written item in the store's table `sent`, so a second export writes nothing twice.
"""

# pyright: reportUnusedImport=false
from __future__ import annotations

from typing import TYPE_CHECKING

from art_patch._lib.lazy import lazily

if TYPE_CHECKING:
    from art_patch.trackers.delivery import feed, pages_of_episodes
    from art_patch.trackers.episodes import Episode, TraceTracker, Tracker, trace_id_of, without_login
    from art_patch.trackers.langfuse_traces import Langfuse, langfuse_api
    from art_patch.trackers.mlflow_runs import Mlflow
    from art_patch.trackers.otlp import Otlp
    from art_patch.trackers.prometheus import exposition
    from art_patch.trackers.tensorboard_scalars import TensorBoard
    from art_patch.trackers.wandb_runs import Wandb
else:
    __getattr__ = lazily(
        __name__,
        {
            "delivery": "feed pages_of_episodes",
            "episodes": "Episode TraceTracker Tracker trace_id_of without_login",
            "langfuse_traces": "Langfuse langfuse_api",
            "mlflow_runs": "Mlflow",
            "otlp": "Otlp",
            "prometheus": "exposition",
            "tensorboard_scalars": "TensorBoard",
            "wandb_runs": "Wandb",
        },
    )
