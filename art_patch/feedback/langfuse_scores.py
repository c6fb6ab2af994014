"""Scores as Langfuse has them now, asked for with its own client, page by page; version 3 of its API."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import httpx
from langfuse.api import LangfuseAPI
from langfuse.api.core import ApiError

from art_patch._lib.version import __version__
from art_patch.errors import TrackerError
from art_patch.trackers import without_login

_PAGE = 100  # as many as it gives at once


class LangfuseScores:
    """The scores of a project in Langfuse."""

    def __init__(self, base_url: str, *, public_key: str, secret_key: str) -> None:
        """Open nothing yet.

        Args:
            base_url: of Langfuse.
            public_key: of the project in Langfuse.
            secret_key: likewise.
        """
        root = base_url.rstrip("/")
        self.source = f"langfuse {without_login(root)} {public_key}"
        self._api = LangfuseAPI(
            base_url=root,
            username=public_key,
            password=secret_key,
            x_langfuse_public_key=public_key,
            x_langfuse_sdk_name="art_patch",
            x_langfuse_sdk_version=__version__,
        )

    def rows(self, since: float | None) -> Iterator[Any]:
        """Return them as JSON objects.

        Args:
            since: only those of that time or later; seconds since the epoch.

        Raises:
            TrackerError: Langfuse cannot be reached, or refused.
        """
        after = None if since is None else datetime.fromtimestamp(since, UTC)
        cursor: str | None = None
        while True:
            try:
                page = self._api.scores.get_many(
                    limit=_PAGE, cursor=cursor, fields="details,subject", from_timestamp=after
                )
            except ApiError as error:
                raise self._refused(f"HTTP {error.status_code}") from error
            except httpx.HTTPError as error:
                raise self._refused(str(error)) from error
            yield from (json.loads(score.json()) for score in page.data)
            cursor = page.meta.cursor
            if cursor is None:
                return

    def _refused(self, why: str) -> TrackerError:
        return TrackerError(
            f"{self.source} did not give its scores ({why}); look at the address, LANGFUSE_PUBLIC_KEY and "
            "LANGFUSE_SECRET_KEY, then pull again"
        )
