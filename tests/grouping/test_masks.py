"""What differs between two asks of one task, and what does not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from art_patch.grouping.wording import mask, normalise

PIECES = st.sampled_from(
    [*"aZ09 -./:,#@+<>_\n", "12", "2026", "<id>", "<time>", "may", "Mon ", "3pm", "order ", "no. ", "ord-",
     "https://", "Hi ", "\u0130", "\u017f"]
)  # fmt: skip


@given(st.one_of(st.text(), st.lists(PIECES, max_size=30).map("".join)))
def test_normalising_is_idempotent(text: str):
    assert normalise(normalise(text)) == normalise(text)


@pytest.mark.parametrize(
    "text",
    [
        "2026-11-02", "2026-11-02T10:30:00Z", "2026-11-02 10:30:00+01:00", "2026/11/02", "02.11.2026", "11/02/2026",
        "11/2/26", "2 November 2026", "2nd of November", "Nov 2", "Nov. 2nd, 2026", "November 2026", "14:05", "2:05 pm",
        "3pm", "Monday, 2 Nov 2026 at 14:05 CET", "Tue 3 March 2026, 10:00",
    ],
)  # fmt: skip
def test_a_moment_is_masked(text: str):
    assert normalise(f"it came on {text}, and late") == "it came on <time>, and late"


@pytest.mark.parametrize(
    "text",
    [
        "550e8400-e29b-41d4-a716-446655440000", "ORD-12345", "ord_2026_00123", "INV-2026-00123", "#88123", "# A-1234",
        "1Z999AA10123456784", "cus_9s6XKzkNRiz8i3", "a1b2c3d4", "deadbeef01", "0x7ffeefbff5c8", "123456789",
        "4111-1111-1111-1111", "PROJ-12345", "+49 170 1234567", "(555) 123-4567", "555-123-4567",
    ],
)  # fmt: skip
def test_an_id_is_masked(text: str):
    assert normalise(f"about {text}.") == "about <id>."


def test_labels_tell_an_id_from_a_number():
    assert normalise("order number 12345, ticket: 123456") == "order <id>, ticket: <id>"


@pytest.mark.parametrize(
    "text",
    [
        "order 4711", "3 of 4", "$12500", "1,234,567", "rtx-4090", "rfc-2119", "iso-27001", "cve-2024-12345",
        "python 3.12",        "version 1.2.3.4", "wh-1000xm4",
        "in 2026", "16 gb", "3.50", "error 404", "march on", "you may go", "#3", "1/2",
    ],
)  # fmt: skip
def test_what_may_be_the_task_stays(text: str):
    assert normalise(text) == text


def test_addresses():
    assert normalise("write to Anna.Lee+x@mail.example.org.") == "write to <email>."
    assert normalise("ping 10.0.0.12. And fe80:0:0:0:1:2:3:4") == "ping <ip>. and <ip>"
    assert normalise("https://a.b/orders/12345?session=0123456789abcdef&q=plums") == (
        "https://a.b/orders/<id>?session=<id>&q=plums"
    )
    assert normalise("https://a.b/docs/iphone-15") == "https://a.b/docs/iphone-15"


@pytest.mark.parametrize(
    "text",
    ["Hi {}, where is it?", "Dear {},\nwhere is it?", "Where is it?\n\nBest regards,\n{}", "Where is it? Thanks, {}",
     "Where is it?\n- {}", "My name is {} and I wait", "This is {} from Acme."],
)  # fmt: skip
def test_a_name_is_masked_where_only_a_name_can_stand(text: str):
    assert "<name>" in mask(text.format("Anna"))
    assert len({normalise(text.format(name)) for name in ("Anna", "Dr. Eva Müller", "J. R. O'Brien")}) == 1


@pytest.mark.parametrize(
    "text", ["Who is Anna Smith?", "compare Paris with Rome", "Hi, Berlin is cold", "Thanks. I like Rome a lot"]
)
def test_a_name_elsewhere_may_be_the_task(text: str):
    assert "<name>" not in mask(text)
