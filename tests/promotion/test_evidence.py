"""Which call counts for whom, and what is compared with what."""

from __future__ import annotations

import random
from collections.abc import Callable

from art_patch.promotion import CanaryConfig, decide, evidence_of
from art_patch.promotion.evidence import Arm, Block
from art_patch.types import ArmCall, ArmTraffic, Score

NEW, OLD = "agent@1", "agent@0"


def call(key: str, policy: str, at: float = 0.0, **changes) -> ArmCall:
    values = {
        "id": key, "trajectory_id": f"t-{key}", "session": f"s-{key}", "group_id": None, "at": at, "policy": policy,
        "status": "ok", "fell_back": False, "duration_ms": 10.0, "ttft_ms": None, "empty": False,
    }  # fmt: skip
    return ArmCall(**(values | changes))


def score(run: str, value: float, name: str = "reward", source: str = "user", at: float = 1.0, **more) -> Score:
    return Score(f"{run}-{name}-{at}", f"t-{run}", name, value, source, at, **more)


def evidence(calls: list[ArmCall], scores: tuple[Score, ...] = (), state="canary"):
    return evidence_of(ArmTraffic(tuple(calls), scores), challenger=NEW, champion=OLD, state=state)


def test_calls_are_compared_one_by_one_in_the_order_in_which_they_ended():
    found = evidence([
        call("a", OLD, 1, duration_ms=100.0),
        call("b", NEW, 2, duration_ms=150.0, ttft_ms=5.0),
        call("c", NEW, 3, status="error"),
        call("d", OLD, 4, duration_ms=120.0, empty=True),
        call("e", NEW, 5, fell_back=True),
        call("f", "agent@7", 6),
        call("g", OLD, 7, status="abandoned"),
    ])  # fmt: skip
    assert (found.challenger, found.champion) == (Arm(3, 3, 2, 2, 2, 3), Arm(3, 3, 0, latest=3))
    assert found.blocks == {
        "errors": [Block(2, (0.0,), (0.0,)), Block(4, (1.0,), (0.0,)), Block(7, (0.0,), (0.0,))],
        "fallbacks": [Block(2, (0.0,), (0.0,)), Block(4, (0.0,), (0.0,)), Block(7, (1.0,), (0.0,))],
        "empty": [Block(2, (0.0,), (0.0,))],
        "latency_ms": [Block(2, (150.0,), (100.0,))],
        "ttft_ms": [],
        "reward": [],
        "feedback": [],
    }


def test_rewards_are_of_sessions_and_a_session_of_both_is_left_out():
    calls = [
        call("a", OLD, trajectory_id="t-a", session="one"),
        call("b", OLD, trajectory_id="t-b", session="one"),
        call("c", NEW, trajectory_id="t-c", session="two"),
        call("d", NEW, trajectory_id="t-d", session="mixed"),
        call("e", OLD, trajectory_id="t-e", session="mixed"),
        call("f", NEW),
    ]
    scores = (
        score("a", 1.0), score("b", 0.0, at=2.0), score("c", 0.2), score("c", 0.75, at=3.0, source="code"),
        score("d", 0.0), score("e", 1.0), score("c", 0.1, at=4.0, source="someone"),
    )  # fmt: skip
    assert evidence(calls, scores).blocks["reward"] == [Block(4.0, (0.75,), (0.5,))]


def test_calls_that_the_engine_had_no_room_for_count_for_nobody_and_their_sessions_are_no_evidence():
    calls = [
        call("a", OLD), call("b", NEW), call("c", "", 2, session="s-c", fell_back=True),
        call("d", NEW, trajectory_id="t-d", session="full"),
        call("e", "", trajectory_id="t-e", session="full", fell_back=True),
    ]  # fmt: skip
    found = evidence(calls, (score("a", 1.0), score("b", 0.5), score("c", 1.0), score("d", 0.0)))
    assert (found.challenger, found.champion) == (Arm(2, 2, 0, latest=2), Arm(1, 1, 0, latest=1))
    assert found.blocks["reward"] == [Block(1.0, (0.5,), (1.0,))]
    assert found.blocks["fallbacks"] == [Block(0, (0.0,), (0.0,))]


def test_a_judges_ranks_are_compared_within_groups_that_hold_both():
    calls = [call("a", OLD, group_id="g"), call("b", NEW, group_id="g"), call("c", NEW, group_id="g")]
    calls += [call("d", NEW, group_id="h"), call("e", NEW, group_id="h"), call("f", OLD, group_id="i")]
    ranks = [score(key, value, "ruler", "ruler", group_id=group) for key, value, group in (
        ("a", 0.5, "g"), ("b", 0.9, "g"), ("c", 0.7, "g"), ("d", 1.0, "h"), ("e", 0.0, "h"), ("f", 0.5, "other"),
    )]  # fmt: skip
    assert evidence(calls, tuple(ranks)).blocks["reward"] == [Block(1.0, (0.9, 0.7), (0.5,))]
    own = (*ranks, score("b", 0.3), score("c", 0.4, source="combined", group_id="g"))
    assert evidence(calls, own).blocks["reward"] == [Block(1.0, (0.4,), (0.5,))]  # b has a reward of its own


def test_feedback_is_what_people_said_on_a_scale_from_0_to_1():
    calls = [call("a", OLD), call("b", NEW), call("c", NEW)]
    scores = (score("a", -1.0, "thumbs"), score("b", 1.0, "thumbs", at=2.0), score("b", 0.5, "rating", at=3.0))
    assert evidence(calls, scores).blocks["feedback"] == [Block(3.0, (0.75,), (0.0,))]


def test_a_session_that_was_left_to_upstream_counts_for_the_policy_that_left_it():
    calls = [call("a", OLD), call("b", NEW, fell_back=True)]
    assert evidence(calls, (score("a", 0.0), score("b", 1.0))).blocks["reward"] == [Block(1.0, (1.0,), (0.0,))]


def test_a_shadows_copy_is_compared_with_the_very_call_that_it_copies():
    calls = [
        call("a", OLD, 1, duration_ms=50.0),
        call("b", OLD, 2, duration_ms=70.0),
        call("x", NEW, 3, shadow_of="b", duration_ms=90.0),
        call("y", NEW, 4, shadow_of="a", status="error"),
        call("z", NEW, 5, shadow_of="of upstream"),
    ]
    found = evidence(calls, (score("a", 1.0), score("x", 0.0)), state="shadow")
    assert found.blocks == {
        "errors": [Block(3, (0.0,), (0.0,)), Block(4, (1.0,), (0.0,))],
        "fallbacks": [Block(3, (0.0,), (0.0,)), Block(4, (0.0,), (0.0,))],
        "empty": [Block(3, (0.0,), (0.0,))],
        "latency_ms": [Block(3, (90.0,), (70.0,))],
    }
    assert (found.challenger, found.champion) == (Arm(3, 3, 1, 1, 1, 3), Arm(2, 2, 0, latest=2))


def test_failed_sessions_are_counted_and_those_of_the_newest_by_themselves():
    good = [call(f"g{n}", NEW, float(n)) for n in range(30)]
    bad = [call(f"b{n}", NEW, 30.0 + n, fell_back=True) for n in range(7)]
    assert evidence([*good, *bad]).challenger == Arm(37, 37, 7, 7, 7, 10)
    assert evidence([*bad, *[each._replace(at=each.at + 99) for each in good]]).challenger == Arm(37, 37, 7, 7, 0, 10)


def test_a_session_counts_once_and_by_its_newest_call():
    dead = [call(f"d{n}", NEW, 50.0 + n, session="dead", status="error") for n in range(12)]
    well = [call(f"w{n}", NEW, float(n), session=f"s-{n % 20}") for n in range(40)]
    assert evidence([*well, *dead]).challenger == Arm(52, 21, 12, 1, 1, 10)
    assert decided([*well, *dead]) == "go on"
    again = [*well, *dead, call("ok", NEW, 90.0, session="dead")]
    assert evidence(again).challenger == Arm(53, 21, 12, 0, 0, 10)
    breaks = [call(f"b{n}", NEW, 50.0 + n, session=f"s-{n}", fell_back=True) for n in range(6)]
    assert decided([*well, *breaks[:5]]) == "go on"
    assert decided([*well, *breaks]) == "roll back"  # long sessions that were well: their newest calls tell


def test_what_befalls_both_arms_alike_ends_no_test():
    """A fifth of the sessions, five a minute; the engine is down for ten minutes, for both. A look after each call."""
    calls: list[ArmCall] = []
    for number in range(5 * 100):
        at = 12.0 * number
        policy, down = NEW if number % 5 == 0 else OLD, 3_600 <= at < 4_200
        calls.append(call(f"{number}", policy, at, fell_back=down))
        look = decide(evidence(calls), state="canary", hours=1.0, config=CanaryConfig())
        assert look.action == "go on", (at, look.reason)
    # The champion's newest sessions are those of the same time: here, more than ten.
    found = evidence(calls[:370])
    assert (found.challenger.failed_latest, found.champion.failed_latest, found.champion.latest) == (6, 24, 40)


def decided(calls: list[ArmCall]) -> str:
    """What becomes of a canary beside a champion that does not fail."""
    return decide(evidence([*calls, call("x", OLD)]), state="canary", hours=1.0, config=CanaryConfig()).action


def test_clients_that_fail_in_every_call_end_no_test_and_a_policy_that_fails_in_every_call_is_soon_ended(
    record_property: Callable[[str, object], None],
):
    """Equal arms: three of a hundred sessions fail all of their eight calls. 5 % of 2,000 sessions, a look after each
    of the canary's calls, of which those after a failure alone can end the test.
    """
    rng = random.Random(3)
    share, tests, stopped = 0.05, 20, 0
    for _ in range(tests):
        ours = one_day(rng, 2_000 * share, fails=0.03)
        ends = [n for n, each in enumerate(ours, 1) if each.status == "error"]
        stopped += any(decided(ours[:n]) == "roll back" for n in ends)
    record_property("figure", ["good canaries that the hard stop ended in a day", f"{stopped / tests:.2f}", "0"])
    assert stopped == 0
    for _ in range(tests):
        ours = one_day(rng, 2_000 * share, fails=1.0)
        first = next(n for n in range(1, len(ours)) if decided(ours[:n]) == "roll back")
        assert len({each.session for each in ours[:first]}) == 3


def one_day(rng: random.Random, sessions: float, *, fails: float) -> list[ArmCall]:
    """The canary's calls of a day, in the order in which they ended."""
    calls: list[ArmCall] = []
    for number in range(round(sessions)):
        at, status = rng.uniform(0, 86_400), "error" if rng.random() < fails else "ok"
        for turn in range(8):
            at += rng.expovariate(1 / 60)
            calls.append(call(f"{number}-{turn}", NEW, at, session=f"s-{number}", status=status))
    return sorted(calls, key=lambda each: each.at)


def test_a_session_counts_in_one_group_only_and_there_once():
    """Its runs are of one policy and of one user, good or bad luck included; they are no further evidence."""
    calls = [
        call(f"{key}{g}", OLD if key == "a" else NEW, session=f"s-{key}", group_id=g) for key in "ab" for g in "gh"
    ]
    calls += [call("c", NEW, session="s-b", group_id="g"), call("d", OLD, group_id="h"), call("e", NEW, group_id="h")]
    given = {"ag": 0.5, "bg": 0.9, "c": 0.7, "ah": 0.5, "bh": 0.9, "d": 0.25, "e": 0.75}
    group_of = {each.id: each.group_id for each in calls}
    at = {"g": 5.0, "h": 4.0}  # h was judged first
    ranks = [score(k, v, "ruler", "ruler", at=at[str(group_of[k])], group_id=group_of[k]) for k, v in given.items()]
    found = evidence(calls, tuple(ranks)).blocks["reward"]
    assert found == [Block(4.0, (0.9, 0.75), (0.5, 0.25))]
    calls[2] = calls[2]._replace(session="s-f")  # another user's run of the champion's, in g
    assert len(evidence(calls, tuple(ranks)).blocks["reward"]) == 1  # b has no say in g


def test_what_was_seen_under_another_share_is_compared_by_itself():
    """The block that was open at the change is dropped, and no session counts twice or on both sides."""
    calls = [
        call("a", NEW, 1), call("b", OLD, 2), call("c", OLD, 3, status="error"),  # c's block is open
        call("d", NEW, 11), call("e", OLD, 12), call("f", NEW, 13, session="s-b"), call("g", OLD, 14),
    ]  # fmt: skip
    values = {"a": 0.5, "b": 0.25, "d": 0.75, "e": 0.125, "f": 1.0, "g": 0.0}
    scores = tuple(score(key, value, at=20.0 + n) for n, (key, value) in enumerate(values.items()))
    ranks = tuple(score(key, 0.5, "ruler", "ruler", group_id="one") for key in "ce")

    def compared(*changes: float) -> dict[str, list[Block]]:
        traffic = ArmTraffic(tuple(calls), (*scores, *ranks), changes)
        return dict(evidence_of(traffic, challenger=NEW, champion=OLD, state="canary").blocks)

    found = compared(10.0)
    assert [block.at for block in found["errors"]] == [2, 12, 14]
    assert all(block == Block(block.at, (0.0,), (0.0,)) for block in found["errors"])  # nothing of c
    assert found["reward"] == [Block(21.0, (0.5,), (0.25,)), Block(23.0, (0.75,), (0.125,))]
    whole = compared()
    assert [block.at for block in whole["errors"]] == [2, 11, 13]
    assert whole["reward"] == [Block(23.0, (0.5, 0.75), (0.125,))]  # b's session was asked of both: left out
    assert compared(10.0, 11.5)["errors"] == [Block(2, (0.0,), (0.0,)), Block(13, (0.0,), (0.0,))]


def test_equal_arms_are_seldom_told_apart_though_users_differ_and_somebody_plays_with_the_share(record_property):
    """Judged groups of users who come again and again, and rate alike each time; the share follows the last metrics."""
    rng = random.Random(7)
    wrong, trials = 0, 60
    for _ in range(trials):
        calls: list[ArmCall] = []
        ranks: list[Score] = []
        changes: list[float] = []
        luck = {user: rng.random() for user in range(30)}
        place = {user: rng.random() for user in luck}
        share, last = 0.15, 0.0
        for group in range(60):
            at = 10.0 * group
            for sibling in range(8):
                user = rng.randrange(30)
                new = place[user] < share
                name = f"{group}-{sibling}"
                calls.append(call(name, NEW if new else OLD, at, session=f"s-{user}", group_id=f"g{group}"))
                value = float(luck[user] > 0.5)
                ranks.append(score(name, value, "ruler", "ruler", at=at + 1, group_id=f"g{group}"))
                last = value if new else last
            if group % 10 == 9:
                share = 0.5 if last > 0.5 else 0.15
                changes.append(at + 2)
        traffic = ArmTraffic(tuple(calls), tuple(ranks), tuple(changes))
        found = evidence_of(traffic, challenger=NEW, champion=OLD, state="canary")
        verdict = decide(found, state="canary", hours=1.0, config=CanaryConfig(reward_tolerance=0.0, min_sessions=1))
        wrong += verdict.action != "go on"
    record_property("figure", ["equal canaries of 30 users, judged and decided on", f"{wrong / trials:.3f}", "<= 0.05"])
    assert wrong / trials <= 0.05
