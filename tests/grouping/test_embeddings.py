"""An embedding model instead of equal words."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer

from art_patch.grouping.embeddings import embed_with
from tests.grouping.test_grouping import asked, form, members

MEANS = {"refund": (1.0, 0.0), "money": (0.99, 0.1), "weather": (0.0, 1.0)}


def embed(texts: Sequence[str]) -> list[tuple[float, ...]]:
    return [next((v for word, v in MEANS.items() if word in text), (0.7, 0.7)) for text in texts]


def test_meaning_brings_together_what_words_do_not():
    runs = asked("a", "I want a refund"), asked("b", "give me my money back"), asked("c", "how is the weather")
    assert form(*runs).groups == ()
    (group,) = form(*runs, embed=embed).groups
    assert (group.how, [t.id for t in group.trajectories]) == ("near_duplicate", ["a", "b"])
    assert members(form(*runs[::-1], embed=embed)) == [["b", "a"]]


def test_the_most_frequent_wording_gives_its_key():
    runs = asked("a", "money back"), asked("b", "refund it"), asked("c", "refund it")
    (whole,) = form(*runs[1:]).groups
    assert {group.scenario_key for group in form(*runs, embed=embed).groups} == {whole.scenario_key}


def test_no_model_judges_numbers_and_names():
    pairs = (
        ("refund 3", "money 4"),
        ("refund the Plum", "money the Pear"),
        ("refund", "no money"),
        ('"refund"', "money"),
    )
    for text, other in pairs:
        assert form(asked("a", text), asked("b", other), embed=embed).groups == ()
    assert form(asked("a", "refund"), asked("b", "money", system="other"), embed=embed).groups == ()


def test_the_client_asks_in_batches_and_keeps_the_order():
    asked_for: list[int] = []

    class Server(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            asked_for.append(len(body["input"]))
            data = [{"object": "embedding", "index": n, "embedding": [float(t)]} for n, t in enumerate(body["input"])]
            answer = json.dumps({"object": "list", "data": data[::-1], "model": body["model"]}).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Server)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        vectors = embed_with(f"http://127.0.0.1:{server.server_port}/v1", "m")([str(n) for n in range(300)])
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert vectors == [[float(n)] for n in range(300)]
    assert asked_for == [256, 44]
