"""Stand-ins for Langfuse's and LangSmith's servers, as far as their own clients ask them for feedback.

Langfuse 5.0.4 asks for pages by a cursor, LangSmith 0.15 by an offset. Both give few rows a page here.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

LANGFUSE_PAGE = 2
PROJECT = "11111111-0000-4000-8000-000000000000"


class FeedbackServer:
    """What it has and what it was asked; `status` is what it answers from now on."""

    def __init__(self) -> None:
        self.scores: list[dict[str, Any]] = []
        self.feedback: list[dict[str, Any]] = []
        self.asked: list[tuple[str, dict[str, str]]] = []
        self.headers: list[dict[str, str]] = []
        self.status = 200
        self.address = ""

    def answer(self, path: str, query: dict[str, str]) -> Any:
        self.asked.append((path, query))
        if path == "/api/public/v3/scores":
            return self._langfuse(query)
        if path == "/sessions":
            about = {"id": PROJECT, "name": query["name"], "tenant_id": PROJECT, "reference_dataset_id": None}
            return [about | {"start_time": "2026-11-01T00:00:00"}] if query["name"] == "shop" else []
        assert path == "/feedback"
        rows = [row for row in self.feedback if _since(row["created_at"], query.get("min_created_at"))]
        rows = [row for row in rows if query.get("session") in (None, row["session_id"])]
        start = int(query["offset"])
        return rows[start : start + int(query["limit"])]

    def _langfuse(self, query: dict[str, str]) -> Any:
        assert query["fields"] == "details,subject" and int(query["limit"]) <= 100
        rows = [row for row in self.scores if _since(row["timestamp"], query.get("fromTimestamp"))]
        start = int(query.get("cursor", 0))
        meta: dict[str, Any] = {"limit": LANGFUSE_PAGE}
        if start + LANGFUSE_PAGE < len(rows):
            meta["cursor"] = str(start + LANGFUSE_PAGE)
        return {"data": rows[start : start + LANGFUSE_PAGE], "meta": meta}


def _since(at: str, after: str | None) -> bool:
    return after is None or datetime.fromisoformat(at) >= datetime.fromisoformat(after)


@contextmanager
def serving_feedback() -> Iterator[FeedbackServer]:
    told = FeedbackServer()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            parts = urlsplit(self.path)
            told.headers.append({key.lower(): value for key, value in self.headers.items()})
            said = told.answer(parts.path, dict(parse_qsl(parts.query))) if told.status == 200 else {"detail": "no"}
            body = json.dumps(said).encode()
            self.send_response(told.status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    told.address = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield told
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
