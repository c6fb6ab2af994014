from __future__ import annotations

from art_patch.patching.routing.target import Breaker


def test_it_opens_after_five_failures_in_ten_seconds():
    breaker = Breaker()
    for now in (0.0, 1.0, 2.0, 3.0):
        breaker.failed(now)
        assert breaker.closed
    breaker.failed(10.0)
    assert not breaker.closed


def test_failures_long_ago_do_not_count():
    breaker = Breaker()
    for now in (0.0, 1.0, 2.0, 3.0, 10.5, 11.5):
        breaker.failed(now)
    assert breaker.closed


def opened() -> Breaker:
    breaker = Breaker(cooldown_s=5.0, probe_lease_s=60.0)
    for _ in range(5):
        breaker.failed(0.0)
    return breaker


def test_one_probe_after_the_cool_down():
    breaker = opened()
    assert not breaker.allow(4.9)
    assert breaker.allow(5.0)
    assert not breaker.allow(5.1)
    breaker.failed(6.0)
    assert not breaker.allow(10.9)
    assert breaker.allow(11.0)
    breaker.succeeded()
    assert breaker.closed
    assert breaker.allow(11.1)
    breaker.failed(11.2)
    assert breaker.closed


def test_a_probe_nobody_reports_is_given_up():
    breaker = opened()
    assert breaker.allow(5.0)
    assert not breaker.allow(64.9)
    assert breaker.allow(65.0)


def test_a_released_probe_may_go_again_at_once():
    breaker = opened()
    assert breaker.allow(5.0)
    breaker.released(5.5)
    assert breaker.allow(5.5)
