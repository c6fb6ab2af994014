"""An embedding model instead of equal words."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from art_patch.grouping import embed_with
from tests.support.embeddings import embed, serve_embeddings
from tests.support.groupings import asked, form, members


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


def test_a_name_in_one_spelling_of_a_text_is_a_name_in_all():
    for name in ("plum", "pear", "fig", "rose", "lily", "iris", "olive", "hazel", "mint", "sage"):  # chance passes few
        runs = asked("a", f"about the {name.title()}"), asked("b", f"about the {name}"), asked("c", "about the weather")
        assert members(form(*runs, embed=lambda texts: [(1.0, 0.0)] * len(texts))) == [["a", "b"]], name


def test_without_vectors_words_alone_decide_and_it_is_said():
    def down(texts: Sequence[str]) -> list[list[float]]:
        raise ConnectionError(f"{len(texts)} texts and no server")

    runs = asked("a", "I want a refund"), asked("b", "I want a refund!"), asked("c", "give me my money back")
    told = form(*runs, embed=down)
    assert members(told) == members(form(*runs)) == [["a", "b"]]
    assert told.embeddings == "2 texts and no server"
    assert form(*runs, embed=embed).embeddings is form(*runs).embeddings is None


def test_across_brings_wordings_together_under_other_prompts():
    runs = asked("a", "I want a refund"), asked("b", "give me my money back", system="other", tool="other")
    assert form(*runs, embed=embed).groups == ()
    assert members(form(*runs, embed=embed, across=True)) == [["a", "b"]]


def test_the_client_asks_in_batches_and_keeps_the_order():
    with serve_embeddings(lambda text: [float(text)]) as (url, seen):
        vectors = embed_with(url, "m", api_key="k")([str(n) for n in range(300)])
    assert vectors == [[float(n)] for n in range(300)]
    assert [(key, len(texts)) for key, texts in seen] == [("Bearer k", 256), ("Bearer k", 44)]


@pytest.mark.parametrize(
    ("status", "body", "reason"),
    [
        (401, '{"error": {"message": "no such key: sk-secret"}}', "HTTP 401"),
        (404, "<html>not here</html>", "HTTP 404"),
        (200, "<html>welcome</html>", "its answer holds no vectors"),
        (200, "{}", "its answer holds no vectors"),
        (200, '{"data": []}', "its answer holds no vectors"),
        (200, '{"data": [{"index": 0, "embedding": [1.0]}]}', "its answer holds no vectors"),
        (200, '{"data": [{"index": 0, "embedding": [1]}, {"index": 1, "embedding": [1, 2]}]}', "its answer holds"),
        (200, '{"data": [{"index": 0, "embedding": [1]}, {"index": 1, "embedding": [NaN]}]}', "its answer holds"),
        (200, '{"data": [{"index": 0, "embedding": ["x"]}, {"index": 1, "embedding": ["y"]}]}', "its answer holds"),
        (200, '{"data": [{"index": null, "embedding": [1]}, {"index": 1, "embedding": [1]}]}', "its answer holds"),
    ],
)
def test_what_is_no_answer_is_said_without_its_words(status: int, body: str, reason: str):
    with serve_embeddings(status=status, body=body) as (url, _):
        with pytest.raises(ConnectionError, match=f"^m at {url} gave no embeddings: {reason}") as error:
            embed_with(url, "m")(["one", "two"])
    assert "secret" not in str(error.value) and "html" not in str(error.value)


def test_nobody_there_is_said():
    with serve_embeddings() as (url, _):
        pass
    with pytest.raises(ConnectionError, match="gave no embeddings: Connection error"):
        embed_with(url, "m")(["one", "two"])
