"""Feedback as LangSmith has it now, asked for with its own client, page by page."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from langsmith import Client
from langsmith.utils import LangSmithError

from art_patch.errors import TrackerError
from art_patch.trackers import without_login


class LangSmithFeedback:
    """The feedback of a workspace in LangSmith, or of one of its projects."""

    def __init__(self, endpoint: str, *, api_key: str, project: str | None = None) -> None:
        """Open nothing yet.

        Args:
            endpoint: of LangSmith's API.
            api_key: of the workspace.
            project: in LangSmith; all unless given.
        """
        self.source = f"langsmith {without_login(endpoint.rstrip('/'))}" + (f" {project}" if project else "")
        self._project = project
        # Without batches it starts no thread: there is nothing to send.
        self._client = Client(api_url=endpoint, api_key=api_key, auto_batch_tracing=False)

    def rows(self, since: float | None) -> Iterator[Any]:
        """Return it as JSON objects.

        Args:
            since: only what was given then or later; seconds since the epoch.

        Raises:
            TrackerError: LangSmith cannot be reached, or refused.
        """
        wanted: dict[str, Any] = {}
        if since is not None:
            wanted["min_created_at"] = datetime.fromtimestamp(since, UTC).isoformat()
        try:
            if self._project is not None:
                wanted["session"] = str(self._client.read_project(project_name=self._project).id)
            yield from (one.model_dump(mode="json") for one in self._client.list_feedback(**wanted))
        except LangSmithError as error:
            raise TrackerError(
                f"{self.source} did not give its feedback ({error}); look at the address, LANGSMITH_API_KEY and "
                "LANGSMITH_PROJECT, then pull again"
            ) from error
