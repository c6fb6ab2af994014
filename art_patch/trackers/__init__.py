"""Sends runs and policies from the store to W&B, Langfuse, OTLP, MLflow and TensorBoard.

`episodes` makes records that are the same for all trackers, and notes each written item in the store's table `sent`, so
a second export writes nothing twice. Each tracker's module writes them with that tracker's own client.
"""

from art_patch._lib.lazy import TYPE_CHECKING, lazily

if TYPE_CHECKING:
    from art_patch.trackers.episodes import (
        Episode, TraceTracker, Tracker, feed, pages_of_episodes, trace_id_of, without_login,
    )
    from art_patch.trackers.langfuse_traces import Langfuse, langfuse_api
    from art_patch.trackers.otlp import Otlp
    from art_patch.trackers.policy_metrics import Mlflow, TensorBoard
    from art_patch.trackers.wandb_runs import Wandb
else:
    __getattr__ = lazily()
