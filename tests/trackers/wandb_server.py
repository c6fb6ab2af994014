"""A stand-in for W&B's server: as much of it as wandb 0.31 asks for to create and resume runs and to log artifacts.

It answers GraphQL by the operation's name, keeps what the file stream brings line by line at the offsets that it names,
and takes files by PUT at addresses that it gave out.
"""

from __future__ import annotations

import gzip
import json
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_STREAMS = {"wandb-history.jsonl": "history", "wandb-events.jsonl": "events"}


class WandbServer:
    """What it was sent: runs by id, artifacts in the order of their versions, files by the path they were put at."""

    def __init__(self) -> None:
        self.runs: dict[str, dict[str, Any]] = {}
        self.lines: dict[str, list[str]] = defaultdict(list)
        self.artifacts: list[dict[str, Any]] = []
        self.files: dict[str, bytes] = {}
        self.unknown: list[str] = []
        self.address = ""

    def read(self) -> dict[str, dict[str, Any]]:
        """What a look at W&B's pages would show: runs by name, without times and W&B's own keys; versions in order."""
        return {run["displayName"]: self._shown(run) for run in self.runs.values()}

    def _shown(self, run: dict[str, Any]) -> dict[str, Any]:
        config = {key: one["value"] for key, one in json.loads(run["config"]).items()}
        summary = _own(run["summary"])
        tables = {key: value["path"] for key, value in summary.items() if _is_table(value)}
        return {
            "job": run["jobType"], "group": run["groupName"], "project": run["project"], "config": _own(config),
            "history": [row for line in self.lines[f"{run['id']} history"] if (row := _own(json.loads(line), False))],
            "summary": {key: value for key, value in summary.items() if key not in tables},
            "tables": {key: json.loads(self.files[f"/put/{run['id']}/{path}"]) for key, path in tables.items()},
            "artifacts": [
                {
                    "name": one["artifactCollectionName"], "type": one["artifactTypeName"],
                    "aliases": sorted(alias["alias"] for alias in one["aliases"]),
                    "metadata": json.loads(one["metadata"]), "files": self._files_of(one["id"]),
                }
                for one in self.artifacts
                if one["runName"] == run["id"] and one["committed"] and one["artifactTypeName"] != "run_table"
            ],
        }  # fmt: skip

    def _files_of(self, artifact: str) -> dict[str, str]:
        place = f"/put/{artifact}/"
        return {path.removeprefix(place): body.decode() for path, body in self.files.items() if path.startswith(place)}

    def post(self, path: str, body: bytes) -> Any:
        if path == "/graphql":
            asked = json.loads(body)
            name = asked.get("operationName") or asked["query"].split()[1].partition("(")[0]
            answer = getattr(self, f"_{name}", None)
            if answer is None:
                self.unknown.append(asked["query"] + json.dumps(asked.get("variables")))
                return {"errors": [{"message": f"no {name} here"}]}
            return {"data": answer(asked.get("variables") or {})}
        if path.endswith("/file_stream"):
            self._stream(path.split("/")[-2], json.loads(body).get("files") or {})
        return {}

    def put(self, path: str, body: bytes) -> None:
        self.files[path] = body

    def _stream(self, run: str, files: dict[str, Any]) -> None:
        for name, one in files.items():
            if name in _STREAMS:
                lines = self.lines[f"{run} {_STREAMS[name]}"]
                assert one["offset"] <= len(lines)
                lines[one["offset"] :] = one["content"]
            elif name == "wandb-summary.json":
                self.runs[run]["summary"] = json.loads(one["content"][-1])

    def _Viewer(self, asked: dict[str, Any]) -> Any:
        nobody = {"id": "u", "entity": "us", "username": "us", "email": "", "flags": "{}", "teams": {"edges": []}}
        return {"viewer": nobody}

    def _RunResumeStatus(self, asked: dict[str, Any]) -> Any:
        run = self.runs.get(asked["name"])
        bucket = None if run is None else self._bucket(run) | self._tails(run)
        return {"model": {"id": "p", "name": asked["project"], "entity": {"id": "e", "name": "us"}, "bucket": bucket}}

    def _UpsertBucket(self, asked: dict[str, Any]) -> Any:
        run = self.runs.setdefault(asked["name"], {"id": asked["name"], "config": "{}", "summary": {}, "upserts": 0})
        run |= {key: value for key, value in asked.items() if value is not None and key not in ("id", "name")}
        run["upserts"] += 1
        return {"upsertBucket": {"bucket": self._bucket(run), "inserted": run["upserts"] == 1}}

    def _bucket(self, run: dict[str, Any]) -> dict[str, Any]:
        project = {"id": "p", "name": run["project"], "entity": {"id": "e", "name": "us"}}
        return {
            "id": f"bucket-{run['id']}", "name": run["id"], "displayName": run.get("displayName"), "description": None,
            "config": run["config"], "sweepName": None, "project": project, "tags": [], "notes": None,
            "historyLineCount": len(self.lines[f"{run['id']} history"]),
        }  # fmt: skip

    def _tails(self, run: dict[str, Any]) -> dict[str, Any]:
        history, events = (self.lines[f"{run['id']} {name}"] for name in ("history", "events"))
        return {
            "summaryMetrics": json.dumps(run["summary"]), "logLineCount": 0, "eventsLineCount": len(events),
            "historyTail": json.dumps(history[-1:]), "eventsTail": json.dumps(events[-1:]), "wandbConfig": '{"t": {}}',
        }  # fmt: skip

    def _CreateRunFiles(self, asked: dict[str, Any]) -> Any:
        files = [{"name": name, "uploadUrl": f"{self.address}/put/{asked['run']}/{name}"} for name in asked["files"]]
        return {"createRunFiles": {"runID": asked["run"], "uploadHeaders": [], "files": files}}

    def _ServerFeaturesQuery(self, asked: dict[str, Any]) -> Any:
        return {"serverInfo": {"features": []}}

    def _ArtifactType(self, asked: dict[str, Any]) -> Any:
        return {"project": {"artifact": None}}

    def _ArtifactByID(self, asked: dict[str, Any]) -> Any:
        (one,) = [one for one in self.artifacts if one["id"] == asked["id"]]
        project = {"id": "p", "internalId": "p", "name": one["projectName"], "entity": {"name": one["entityName"]}}
        collection = {"__typename": "ArtifactSequence", "name": one["artifactCollectionName"], "project": project}
        named = [
            {"__typename": "ArtifactAlias", "id": alias["alias"], "alias": alias["alias"]} for alias in one["aliases"]
        ]
        about = {
            "__typename": "Artifact", "id": one["id"], "artifactSequence": collection, "versionIndex": 0,
            "artifactType": {"name": one["artifactTypeName"]}, "description": None, "metadata": one["metadata"],
            "ttlDurationSeconds": -2, "ttlIsInherited": True, "tags": [], "historyStep": one["historyStep"],
            "state": "COMMITTED", "size": 1, "digest": one["digest"], "commitHash": "c", "fileCount": 1,
            "createdAt": "2026-11-22T00:00:00Z", "updatedAt": None,
            "aliases": [alias | {"artifactCollection": collection} for alias in named],
        }  # fmt: skip
        return {"artifact": about}

    def _CreateArtifact(self, asked: dict[str, Any]) -> Any:
        about = asked["input"]
        self.artifacts.append(about | {"id": f"artifact-{len(self.artifacts)}", "committed": False})
        one = {"id": self.artifacts[-1]["id"], "state": "PENDING", "artifactSequence": {"latestArtifact": None}}
        return {"createArtifact": {"artifact": one}}

    def _CreateArtifactManifest(self, asked: dict[str, Any]) -> Any:
        return {"createArtifactManifest": {"artifactManifest": self._manifest(asked["artifactID"], asked)}}

    def _UpdateArtifactManifest(self, asked: dict[str, Any]) -> Any:
        key = asked["artifactManifestID"].removeprefix("manifest-")
        return {"updateArtifactManifest": {"artifactManifest": self._manifest(key, asked)}}

    def _manifest(self, key: str, asked: dict[str, Any]) -> dict[str, Any]:
        file: dict[str, Any] = {"id": f"file-{key}"}
        if asked["includeUpload"]:
            file |= {"uploadUrl": f"{self.address}/put/{key}.manifest", "uploadHeaders": []}
        return {"id": f"manifest-{key}", "file": file}

    def _CreateArtifactFiles(self, asked: dict[str, Any]) -> Any:
        nodes = [
            {
                "id": "f", "name": one["name"], "displayName": one["name"], "storagePath": one["name"],
                "uploadUrl": f"{self.address}/put/{one['artifactID']}/{one['name']}", "uploadHeaders": [],
                "uploadMultipartUrls": None, "artifact": {"id": one["artifactID"]},
            }
            for one in asked["input"]["artifactFiles"]
        ]  # fmt: skip
        return {"createArtifactFiles": {"files": {"edges": [{"node": node} for node in nodes]}}}

    def _CommitArtifact(self, asked: dict[str, Any]) -> Any:
        (one,) = [one for one in self.artifacts if one["id"] == asked["artifactID"]]
        one["committed"] = True
        return {"commitArtifact": {"artifact": {"id": one["id"], "digest": one["digest"]}}}


def _own(row: dict[str, Any], tables: bool = True) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key[0] != "_" and (tables or not _is_table(value))}


def _is_table(value: Any) -> bool:
    return isinstance(value, dict) and value.get("_type") == "table-file"


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):  # W&B's process hangs up on idle connections
            super().handle_error(request, client_address)


@contextmanager
def serving_wandb() -> Iterator[WandbServer]:
    told = WandbServer()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self._body()
            self._say(told.post(self.path, body))

        def do_PUT(self) -> None:
            told.put(self.path, self._body())
            self._say({})

        def do_GET(self) -> None:
            self._say({})

        def _body(self) -> bytes:
            if self.headers.get("transfer-encoding") == "chunked":
                body = b""
                while size := int(self.rfile.readline(), 16):
                    body += self.rfile.read(size)
                    self.rfile.readline()
                self.rfile.readline()
            else:
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
            return gzip.decompress(body) if self.headers.get("content-encoding") == "gzip" else body

        def _say(self, said: Any) -> None:
            body = json.dumps(said).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = _Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    told.address = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield told
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
