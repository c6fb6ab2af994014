"""Sends runs of the agent to Langfuse as traces with generations, and policies as traces `training NAME@STEP`.

Spans are made by `otlp` and sent to Langfuse's OpenTelemetry endpoint. That endpoint accepts no scores, so scores are
sent by Langfuse's own client. If an item is sent again under the same id, Langfuse replaces the earlier one.
"""

import base64
import json
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

import httpx
from langfuse.api import CreateScoreBatchResults, CreateScoreRequest, LangfuseAPI
from langfuse.api.core import ApiError
from opentelemetry import trace

from art_patch._lib.version import __version__
from art_patch.trackers.episodes import Episode, Item, TrainingStep, hash_of, without_login
from art_patch.trackers.otlp import Otlp, context_of
from art_patch.types import Score, TrajectoryInfo

_BATCH = 100  # scores in one request


def langfuse_api(root: str, public_key: str, secret_key: str) -> LangfuseAPI:
    """Return Langfuse's own client for its REST API; `root` is the address without a slash at its end."""
    return LangfuseAPI(
        base_url=root,
        username=public_key,
        password=secret_key,
        x_langfuse_public_key=public_key,
        x_langfuse_sdk_name="art_patch",
        x_langfuse_sdk_version=__version__,
    )


class Langfuse(Otlp):
    """The tracker that writes to one project in Langfuse."""

    name = "langfuse"
    keys = "LANGFUSE_PUBLIC_KEY and LANGFUSE_SECRET_KEY"

    def __init__(self, base_url: str, *, public_key: str, secret_key: str, service: str, content: bool = False) -> None:
        """Make the clients with the keys of a project in Langfuse, at an address without a path; the rest as `Otlp`."""
        root = base_url.rstrip("/")
        login = base64.b64encode(f"{public_key}:{secret_key}".encode()).decode()
        headers = {"authorization": f"Basic {login}", "x-langfuse-ingestion-version": "4"}
        super().__init__(f"{root}/api/public/otel", service=service, content=content, headers=headers)
        self.target = f"langfuse {without_login(root)} {public_key}"
        self._api = langfuse_api(root, public_key, secret_key)

    def of_step(self, step: TrainingStep) -> Iterable[Item]:
        """Return the training of a policy as a trace with one span. It is sent again when a metric has changed."""
        policy = step.policy
        metrics = {**step.metrics, "state": policy.state, "parent": policy.parent, "base": policy.base}
        prefix = "langfuse.trace.metadata."
        attributes: dict[str, Any] = {
            "langfuse.trace.name": f"training {policy.name}",
            "langfuse.trace.tags": ["training"],
            **{prefix + name.replace("/", "."): value for name, value in metrics.items()},
            **{f"{prefix}config.{name}": value for name, value in step.params.items()},
        }
        # A span without length, at the time at which the policy was made: how long the update took is in its metrics.
        own, at = context_of(f"policy:{policy.name}", "policy"), policy.created_at
        span = self.span(f"training {policy.name}", own, None, attributes, at, at, None)
        yield Item(f"policy:{policy.name}", hash_of(json.dumps(metrics, sort_keys=True), 8).hex(), span)

    def of_all(self, info: TrajectoryInfo) -> dict[str, Any]:
        """Return the attributes of every span of a run. Langfuse reads the trace's name and ids from any span."""
        return super().of_all(info) | {
            "langfuse.trace.name": info.name,
            "session.id": info.session_id,
            "user.id": info.user_id,
            "langfuse.trace.tags": list(info.tags),
        }

    def of_score(self, score: Score, run: trace.SpanContext, episode: Episode) -> Any:
        """Return a score as a request object of Langfuse's client."""
        about = {"source": score.source, "judge": score.judge, "rubric": score.rubric, "at": score.at}
        return CreateScoreRequest(
            id=score.id,
            trace_id=format(run.trace_id, "032x"),
            name=score.name,
            value=float(score.value),
            comment=score.comment if self.content else None,
            metadata={name: value for name, value in about.items() if value is not None},
            # Langfuse replaces a score only if id and time are equal. The run's time never changes; the score's may.
            timestamp=datetime.fromtimestamp(episode.trajectory.info.started_at, UTC),
        )

    def write(self, items: Sequence[Item]) -> None:
        """Send first the spans and then the scores, which are attached to the traces that the spans make."""
        super().write(items)
        scores = [item.payload for item in items if isinstance(item.payload, CreateScoreRequest)]
        for start in range(0, len(scores), _BATCH):
            try:
                answer = self._api.scores.create(request=scores[start : start + _BATCH])
            except (ApiError, httpx.HTTPError) as error:
                why = f"HTTP {error.status_code}" if isinstance(error, ApiError) else error
                raise self.refused(f"scores ({why})") from error
            # A request that succeeds can still have rejected some of its scores.
            if isinstance(answer, CreateScoreBatchResults) and answer.rejected:
                raise self.refused(f"{answer.rejected} scores ({answer.errors[0].message})")
