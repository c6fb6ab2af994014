"""A stand-in for a model hub: as much of its HTTP API as `huggingface_hub` uses to commit to a repository or read one.

It is not the hub. It keeps everything in memory, knows one token that may write and one that may only read, takes
safetensors by LFS (`basic` transfer, checked against the sha256 that was announced) and everything else inside the
commit, as the hub does for small text files. It speaks no Xet: clients have to be told so (`HF_HUB_DISABLE_XET`).
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

WRITER, READER = "hf_writer", "hf_reader"
COMMIT = "c0ffee" + "0" * 34


class StandInHub:
    """What the hub holds.

    Attributes:
        url: its endpoint.
        repositories: files by repository.
        private: visibility by repository.
        requests: what was asked, `METHOD path`.
        fails: a path ending that is answered with 400, and nothing else.
        gated: repositories whose owners have not let anybody in.
    """

    def __init__(self) -> None:
        self.url = ""
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.private: dict[str, bool] = {}
        self.blobs: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.fails = "nothing"
        self.gated: set[str] = set()

    def answer(self, method: str, path: str, token: str | None, body: bytes) -> tuple[int, Any]:
        self.requests.append(f"{method} {path}")
        if path.endswith(self.fails):
            return 400, {"error": "the disk of the hub is full"}
        if path.startswith("/blobs/"):
            return self._put(path.rpartition("/")[2], body)
        if path == "/api/validate-yaml":
            assert json.loads(body)["content"].startswith("---\n")
            return 200, {"errors": [], "warnings": []}
        asked = path.removeprefix("/api/models/").removeprefix("/").split(".git/")[0]
        repository = "/".join(asked.split("?")[0].split("/")[:2])
        if repository in self.gated:
            return 403, {"error": "Access to this model is restricted", "code": "GatedRepo"}
        is_read = method in ("GET", "HEAD") and self.private.get(repository) is False
        if token not in (WRITER, READER) and not is_read:
            return 401, {"error": "Invalid username or password.", "code": "RepoNotFound" if token is None else ""}
        if token == READER and method == "POST":
            return 403, {"error": "You don't have the rights to do this"}
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        if repository not in self.repositories:
            return 404, {"error": "Repository not found", "code": "RepoNotFound"}
        return self._in(repository, method, path, body)

    def _create(self, asked: dict[str, Any]) -> tuple[int, Any]:
        name = f"{asked['organization']}/{asked['name']}"
        if name in self.repositories:
            return 409, {"error": "You already created this model repo"}
        self.repositories[name], self.private[name] = {}, asked["visibility"] == "private"
        return 200, {"url": f"{self.url}/{name}"}

    def _in(self, name: str, method: str, path: str, body: bytes) -> tuple[int, Any]:
        files = self.repositories[name]
        if path.endswith("/preupload/main"):
            modes = [(file["path"], file["path"].endswith(".safetensors")) for file in json.loads(body)["files"]]
            told = [
                {"path": p, "uploadMode": "lfs" if large else "regular", "shouldIgnore": False} for p, large in modes
            ]
            return 200, {"files": told}
        if path.endswith("/info/lfs/objects/batch"):
            actions = [
                one | {"actions": {"upload": {"href": f"{self.url}/blobs/{one['oid']}"}}}
                for one in json.loads(body)["objects"]
            ]
            return 200, {"transfer": "basic", "objects": actions}
        if path.endswith("/commit/main"):
            self._commit(files, [json.loads(line) for line in body.splitlines()])
            url = f"{self.url}/{name}/commit/{COMMIT}"
            return 200, {"success": True, "commitOid": COMMIT, "commitUrl": url, "hookOutput": ""}
        if "/tree/main" in path or f"/tree/{COMMIT}" in path:
            return 200, [{"type": "file", "path": p, "size": len(b), "oid": "0"} for p, b in files.items()]
        if f"/{name}/resolve/{COMMIT}/" in path:
            return 200, files[path.rpartition("/")[2]]
        if "/revision/" in path and path.rpartition("/")[2] not in ("main", COMMIT):
            return 404, {"error": "Invalid rev id", "code": "RevisionNotFound"}
        assert (method, path.partition("/revision/")[0]) == ("GET", f"/api/models/{name}"), path
        siblings = [{"rfilename": file} for file in files]
        return 200, {"id": name, "private": self.private[name], "siblings": siblings, "sha": COMMIT}

    def _commit(self, files: dict[str, bytes], lines: list[dict[str, Any]]) -> None:
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.blobs[value["oid"]]
            elif line["key"] == "deletedFile":
                del files[value["path"]]
            else:
                assert line["key"] == "header", line

    def _put(self, oid: str, body: bytes) -> tuple[int, Any]:
        if hashlib.sha256(body).hexdigest() != oid:
            return 422, {"error": "sha256 differs"}
        self.blobs[oid] = body
        return 200, {}


@contextmanager
def serve_stand_in_hub() -> Generator[StandInHub]:
    """Serve one on loopback while the block runs."""
    hub = StandInHub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _do(self) -> None:
            body = self._body()
            token = (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None
            status, answer = hub.answer(self.command, self.path, token, body)
            content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            if content is answer:
                self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
                self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("Content-Length", str(len(content)))
            if status >= 400 and isinstance(answer, dict):
                self.send_header("X-Error-Message", answer["error"])
                self.send_header("X-Error-Code", answer.get("code", ""))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        def _body(self) -> bytes:
            if self.headers.get("Transfer-Encoding") != "chunked":
                return self.rfile.read(int(self.headers.get("Content-Length") or 0))
            parts: list[bytes] = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)

        do_GET = do_HEAD = do_POST = do_PUT = _do

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        hub.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()
