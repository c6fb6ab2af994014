"""A run of the agent stays with the policy that it began with, unless that one was rolled back or is gone."""

from __future__ import annotations

from typing import Any

import pytest

import art_patch as art
from art_patch.types import Route
from tests.support.patched_sdk import asked
from tests.support.sdk_samples import ASK, GOES_ON
from tests.support.servers import error


def champion(bench: Any, runtime: Any, name: str) -> None:
    bench.route = Route(champion=name, base_url=bench.local.url)
    runtime.refreshed()


def test_a_trajectory_keeps_its_policy_and_the_next_one_gets_the_new(bench, client):
    runtime = bench.patch()
    with art.trajectory("one"):
        client.chat.completions.create(**ASK)
        champion(bench, runtime, "shop@4")
        client.chat.completions.create(**ASK)
        client.chat.completions.create(**GOES_ON)
    with art.trajectory("two"):
        client.chat.completions.create(**ASK)
    assert asked(bench) == ["shop@3", "shop@3", "shop@3", "shop@4"]
    assert [call.policy for call in bench.sink.calls] == asked(bench)


def test_a_conversation_keeps_its_policy_and_one_that_begins_alike_does_not(bench, client):
    runtime = bench.patch()
    client.chat.completions.create(**ASK)
    champion(bench, runtime, "shop@4")
    client.chat.completions.create(**GOES_ON)
    client.chat.completions.create(**ASK)
    client.chat.completions.create(**GOES_ON)
    assert asked(bench) == ["shop@3", "shop@3", "shop@4", "shop@4"]


@pytest.mark.parametrize("other", ["shop@2", "other@9"])
def test_nobody_stays_with_a_policy_that_was_rolled_back(bench, client, other):
    runtime = bench.patch()
    with art.trajectory("one"):
        client.chat.completions.create(**ASK)
        champion(bench, runtime, other)
        client.chat.completions.create(**ASK)
    client.chat.completions.create(**GOES_ON)
    assert asked(bench) == ["shop@3", other, other]


def test_a_policy_that_is_no_longer_served_lets_its_runs_go(bench, client):
    runtime = bench.patch()
    with art.trajectory("one"):
        client.chat.completions.create(**ASK)
        champion(bench, runtime, "shop@4")
        bench.local.will(error(404))
        assert client.chat.completions.create(**ASK).system_fingerprint == "shop@4"
        client.chat.completions.create(**ASK)
    assert asked(bench) == ["shop@3", "shop@3", "shop@4", "shop@4"]
    assert [(call.policy, call.fallback) for call in bench.sink.calls] == [
        ("shop@3", None),
        ("shop@4", None),
        ("shop@4", None),
    ]


def test_the_oldest_runs_are_forgotten_first(monkeypatch):
    from art_patch.context import Identity
    from art_patch.patching.routing import target as module

    monkeypatch.setattr(module, "_KEPT", 20)
    pins = module.Pins()
    bodies = [{"messages": [{"role": "user", "content": str(number)}]} for number in range(30)]
    for body in bodies:
        pins.policy(module.CallKeys(Identity(), body), module.Target("route", "shop@1", "http://e/v1"))
    later = [{"messages": [*body["messages"], *GOES_ON["messages"][1:]]} for body in reversed(bodies)]
    target = module.Target("route", "shop@2", "http://e/v1")
    kept = [pins.policy(module.CallKeys(Identity(), body), target)[0] for body in later]
    assert kept[:18] == ["shop@1"] * 18
    assert kept[20:] == ["shop@2"] * 10
