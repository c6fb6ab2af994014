"""`art-patch store ...` and `art-patch erase` as a user runs them."""

from __future__ import annotations

import json
import os
import pty
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from art_patch.store import open_store
from art_patch.types import Call, Choice, Group, Policy, Score, TrajectoryInfo

ENVIRONMENT = {key: value for key, value in os.environ.items() if not key.startswith("ART_PATCH_")}
ENVIRONMENT["COLUMNS"] = "300"
DAY_S = 86_400.0


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Users u0 to u3 with two trajectories each, ten days apart; u0 and u1 taught the champion; an export has u1."""
    store, now = open_store(f"sqlite:///{tmp_path}/default/store.db"), time.time()
    for user in range(4):
        for run in range(2):
            key, at = f"t{user}-{run}", now - DAY_S * (5 + 10 * user)
            said = {"role": "user", "content": f"I am {user}"}
            calls = [
                Call(f"{key}-{n}", key, at + n, "gpt-5", (said,) * (n + 1), (Choice(0, said, "stop"),))
                for n in range(3)
            ]
            about = TrajectoryInfo(key, at, "explicit", user_id=f"u{user}", session_id=f"s{user}")
            store.write([about, *calls, Score(f"score-{key}", key, "reward", 1.0, "user", at)])
    for run in range(2):
        members = store.read.trajectories([f"t0-{run}", f"t1-{run}"])
        store.ledger.add_groups([Group(f"g{run}", f"task:{run}", "same_task", members)])
    store.ledger.add_base("agent@0", "/base", "ff", who="test")
    for step, groups in ((1, ["g0"]), (2, [])):
        policy = Policy(f"agent@{step}", "/base", "ff", "candidate", now + step, path=f"/a/agent@{step}",
                        parent=f"agent@{step - 1}")  # fmt: skip
        store.ledger.add_candidate(policy, trained_on=groups, who="test")
    store.ledger.move("agent@1", "champion", who="test", reason="won")
    with store.transfers.note_export("/exports/march.jsonl", "sft", who="test") as note:
        note.add(["t1-0", "t2-0"])
    store.close()
    return tmp_path


def art_patch(home: Path, *arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "art_patch", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        stdin=subprocess.DEVNULL,
        env=ENVIRONMENT | {"ART_PATCH_HOME": str(home)} | environment,
    )


def done(result: subprocess.CompletedProcess[str]) -> list[str]:
    assert (result.returncode, "Traceback" in result.stderr) == (0, False), result.stderr
    return result.stdout.splitlines()


def facts(result: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    (line,) = done(result)
    return json.loads(line)


def fails(result: subprocess.CompletedProcess[str], code: int, words: str) -> None:
    (line,) = result.stderr.strip().splitlines()
    assert (result.returncode, line[:11]) == (code, "art-patch: ")
    assert words in line


def trajectories(home: Path) -> list[str]:
    with closing(sqlite3.connect(home / "default" / "store.db")) as raw:
        return [key for (key,) in raw.execute("SELECT id FROM trajectories ORDER BY id")]


def test_erasing_says_what_went_and_what_is_left_to_do(home: Path):
    (_, *looked) = done(art_patch(home, "erase", "--user", "u1", "--dry-run"))
    assert len(trajectories(home)) == 8
    result = art_patch(home, "erase", "--user", "u1", "--yes")
    assert "erase: 2/2" in result.stderr
    assert done(result) == [
        "erased user u1: 2 trajectories, 6 calls, 4 messages, 2 scores",
        "2 groups held some of it; 1 that waited for training are dead",
        "1 export holds some of it:",
        "  /exports/march.jsonl (sft, 0 s ago, by test)".replace("0 s", _age(result.stdout)),
        "2 policies learned from it:",
        "  agent@1 (trained on it; serves now)",
        "  agent@2 (descends from one that was; candidate)",
        "-> Delete these exports, and the copies that were made of them.",
        "-> A LoRA cannot forget, and agent@1 serves. Go back to agent@0 with "
        "`art-patch rollback --to agent@0 --project default`; "
        "then `art-patch retrain --project default` trains from there, without it.",
        "-> Delete the adapters that do not serve, so that nobody promotes them: `rm -r /a/agent@2`.",
        "-> Backups that were made before hold it still.",
    ]
    assert "2 groups held some of it; 1 that waited for training would be dead" in looked
    assert trajectories(home) == ["t0-0", "t0-1", "t2-0", "t2-1", "t3-0", "t3-1"]
    assert done(art_patch(home, "erase", "--user", "u1", "--yes")) == [
        "nothing is recorded of user u1; what apps recorded of it and have not written yet is dropped"
    ]
    assert done(art_patch(home, "erase", "--user", "u1", "--dry-run")) == ["nothing is recorded of user u1"]
    assert done(art_patch(home, "store", "verify"))[0].startswith("sound: ")


def test_erasing_deletes_what_a_killed_update_left_unless_one_is_at_work(home: Path):
    project = home / "default"
    job = project / "training" / "agent@9" / "job.safetensors"
    job.parent.mkdir(parents=True)
    job.write_bytes(b"tokens")
    with FileLock(project / "cycle.lock"):
        found = facts(art_patch(home, "erase", "--user", "u1", "--yes", "--json"))
        assert any(line.startswith("A cycle is at work") for line in found["todo"])
        assert job.exists()
    assert facts(art_patch(home, "erase", "--user", "u2", "--dry-run", "--json"))["dry_run"]
    assert job.exists()
    found = facts(art_patch(home, "erase", "--user", "u2", "--yes", "--json"))
    assert not any("cycle is at work" in line for line in found["todo"])
    assert not job.parent.parent.exists()


def _age(output: str) -> str:
    return output.partition("(sft, ")[2].partition(" ago")[0]


def test_the_same_as_json(home: Path):
    found = facts(art_patch(home, "erase", "--session", "s1", "--yes", "--json", "--who", "me"))
    assert (found["trajectories"], found["calls"], found["subject"], found["found"]) == (2, 6, {"session": "s1"}, True)
    assert [(one["name"], one["how"], one["serves"]) for one in found["policies"]] == [
        ("agent@1", "trained", True),
        ("agent@2", "descends", False),
    ]
    assert [one["path"] for one in found["exports"]] == ["/exports/march.jsonl"]
    assert any("art-patch rollback --to agent@0 --project default" in line for line in found["todo"])
    nothing = facts(art_patch(home, "erase", "--trajectory", "t9", "--yes", "--json"))
    assert (nothing["found"], nothing["todo"]) == (False, [])


def test_a_policy_that_the_champion_replaced_may_have_learned_from_it_too(home: Path):
    store = open_store(f"sqlite:///{home}/default/store.db")
    store.ledger.move("agent@2", "champion", who="test", reason="won")
    store.close()
    output = "\n".join(done(art_patch(home, "erase", "--user", "u0", "--yes", "--project", "default")))
    assert "Go back to agent@0 with `art-patch rollback --to agent@0 --project default`" in output
    assert "`rm -r /a/agent@1`" in output


def test_imported_copies_and_copies_that_left_the_project_are_named_too(home: Path):
    with closing(open_store(f"sqlite:///{home}/default/store.db")) as store:
        made_at = {one.name: one.created_at for one in store.ledger.policies()}
        # A copy with its evidence, a copy of its directory, its child, and a policy of that name from another project.
        for step, origin, at, parent in (
            (3, "agent@1", made_at["agent@1"], None), (4, "agent@1", made_at["agent@1"] - 5, None),
            (5, None, None, "agent@3"), (6, "agent@1", 1.0, None), (7, "agent@0", made_at["agent@0"], None),
        ):  # fmt: skip
            evidence = {"at": 1.0, "manifest_sha256": "ab", "evidence": {"policy": origin, "made_at": at}}
            policy = Policy(f"agent@{step}", "/base", "ff", "candidate", time.time() + step, f"/a/agent@{step}", parent,
                            {"imported": evidence} if origin else {})  # fmt: skip
            store.ledger.add_candidate(policy, trained_on=[], who="test")
        for name in ("agent@1", "agent@0"):
            detail = {"policy": name, "directory": f"/copies/{name}"}
            store.transfers.note_copy("export policy", who="ada", detail=detail)
        store.transfers.note_copy("push policy", who="ada", detail={"policy": "agent@3", "repository": "we/agent"})
    for options in (["--dry-run"], ["--yes"]):
        found = facts(art_patch(home, "erase", "--user", "u1", *options, "--json"))
        assert [(one["name"], one["how"]) for one in found["policies"]] == [
            ("agent@1", "trained"), ("agent@2", "descends"), ("agent@3", "copy"), ("agent@4", "copy"),
            ("agent@5", "descends"),
        ]  # fmt: skip
        assert [(one["policy"], one["to"], one["who"]) for one in found["policy_copies"]] == [
            ("agent@1", "/copies/agent@1", "ada"), ("agent@3", "we/agent", "ada"),
        ]  # fmt: skip
    output = "\n".join(done(art_patch(home, "erase", "--user", "u0", "--dry-run")))
    assert "  agent@3 (an imported copy of one that was; candidate)" in output
    assert "2 copies of these policies left the project:\n  agent@1 to /copies/agent@1 (" in output
    assert "-> Delete these copies of the policies, also where they were imported." in output
    assert {"agent@1", "agent@3", "agent@4"} <= set(
        facts(art_patch(home, "consent", "--user", "u0", "--withdraw", "--json"))["policies"]
    )


def test_what_is_tested_is_given_up_before_anything_is_gone_back_to(home: Path):
    store = open_store(f"sqlite:///{home}/default/store.db")
    store.ledger.move("agent@2", "canary", who="test", reason="try", percent=5)
    store.close()
    todo = facts(art_patch(home, "erase", "--user", "u0", "--dry-run", "--json", "--project", "default"))["todo"]
    first = todo.index("agent@2 is canary: end its test with `art-patch rollback --project default`.")
    assert (
        "agent@1 serves. Go back to agent@0 with `art-patch rollback --to agent@0 --project default`" in todo[first + 1]
    )


def test_nothing_is_deleted_unless_somebody_says_yes(home: Path):
    for command in (["erase", "--user", "u1"], ["store", "prune", "--keep", "1"]):
        fails(art_patch(home, *command), 2, "nobody can be asked here; add --yes, or --dry-run")
    for answer, left in (("n", 8), ("y", 6)):
        terminal, theirs = pty.openpty()
        process = subprocess.Popen(
            [sys.executable, "-m", "art_patch", "erase", "--user", "u2"],
            stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=ENVIRONMENT | {"ART_PATCH_HOME": str(home)},
        )  # fmt: skip
        os.write(terminal, f"{answer}\n".encode())
        out, err = process.communicate(timeout=60)
        os.close(terminal)
        os.close(theirs)
        assert (process.returncode, len(trajectories(home))) == (0, left), err
        assert "user u2: 2 trajectories, 6 calls, 2 scores. Delete it? [y/N]" in err
        assert out.startswith("nothing was deleted" if answer == "n" else "erased user u2")


def test_erasing_needs_one_subject_and_a_store(home: Path, tmp_path: Path):
    fails(art_patch(home, "erase", "--yes"), 2, "exactly one of user, session and trajectory")
    other = art_patch(home, "erase", "--user", "u", "--project", "other", "--yes")
    fails(other, 18, "there is no store of a project 'other'")


def test_pruning(home: Path):
    plan = done(art_patch(home, "store", "prune", "--older-than", "20d", "--dry-run"))
    assert plan == ["would delete 4 trajectories, 12 calls"]
    result = done(art_patch(home, "store", "prune", "--older-than", "20d", "--yes"))
    assert result == ["deleted 4 trajectories, 12 calls, 8 messages"]
    assert trajectories(home) == ["t0-0", "t0-1", "t1-0", "t1-1"]
    assert done(art_patch(home, "store", "prune", "--older-than", "20d", "--yes")) == ["nothing is that old"]
    found = facts(art_patch(home, "store", "prune", "--yes", "--json", ART_PATCH_KEEP_TRAJECTORIES="2"))
    assert (found["trajectories"], found["dead_groups"]) == (2, 1)
    assert facts(art_patch(home, "store", "prune", "--dry-run", "--json", ART_PATCH_KEEP_DAYS="1"))["trajectories"] == 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "say what to keep: --older-than 90d"),
        (["--older-than", "9 years"], "'9 years' is no duration"),
        (["--older-than", "-3d"], "is no duration"),
    ],
)
def test_pruning_needs_a_limit(home: Path, options: list[str], words: str):
    fails(art_patch(home, "store", "prune", "--yes", *options), 2, words)


def test_retraining_keeps_the_promise_even_when_it_has_nothing_to_do(home: Path):
    with closing(sqlite3.connect(home / "default" / "store.db")) as raw, raw:
        raw.execute("UPDATE policies SET state = 'retired'")
    result = art_patch(home, "retrain", "--json", ART_PATCH_KEEP_DAYS="20")
    assert facts(result)["outcome"] == "nothing to do"
    assert trajectories(home) == ["t0-0", "t0-1", "t1-0", "t1-1"]


def test_verify_says_what_is_wrong_with_its_own_exit_code(home: Path):
    assert facts(art_patch(home, "store", "verify", "--json")) == {"sound": True, "found": []}
    with closing(sqlite3.connect(home / "default" / "store.db")) as raw, raw:
        raw.execute("DELETE FROM choices WHERE call_id = 't0-0-0'")
        raw.execute("DELETE FROM calls WHERE id = 't0-0-1'")
    result = art_patch(home, "store", "verify")
    assert (result.returncode, result.stderr) == (8, "")
    assert result.stdout.splitlines()[:2] == ["not sound:", "  1 answers whose call is missing"]
    result = art_patch(home, "store", "verify", "--json")
    assert (result.returncode, json.loads(result.stdout)["sound"]) == (8, False)


def test_stats_and_vacuum_and_backup(home: Path, tmp_path: Path):
    output = "\n".join(done(art_patch(home, "store", "stats")))
    assert "8 trajectories, " in output
    assert "first call 35 d ago, last 5 d ago" in output
    assert facts(art_patch(home, "store", "stats", "--json"))["tables"]["calls"]["rows"] == 24
    with closing(sqlite3.connect(home / "default" / "store.db")) as raw, raw:
        raw.execute("DELETE FROM choices")
        raw.execute("DELETE FROM calls")
    (line,) = done(art_patch(home, "store", "vacuum"))
    assert line.startswith("deleted 16 messages that nothing referred to; ")
    assert facts(art_patch(home, "store", "vacuum", "--json"))["messages"] == 0
    target = tmp_path / "copy [bold].db"
    (line,) = done(art_patch(home, "store", "backup", target))
    assert line == f"{target}: {target.stat().st_size / 1024:.1f} KiB, checked"
    assert target.stat().st_mode & 0o777 == 0o600
    fails(art_patch(home, "store", "backup", target), 8, "overwrites nothing")
    assert facts(art_patch(home, "store", "backup", tmp_path / "b.db", "--json"))["path"] == str(tmp_path / "b.db")


def test_projects_lists_the_rest_if_a_store_cannot_be_read(home: Path):
    for name in ("broken", "foreign"):
        (home / name).mkdir()
    (home / "broken" / "store.db").write_bytes(b"no database" * 100)
    with closing(sqlite3.connect(home / "foreign" / "store.db")) as raw:
        raw.execute("CREATE TABLE others (id)")
    listed = art_patch(home, "projects")
    assert listed.returncode == 8
    assert "agent@1" in listed.stdout
    said = listed.stderr.splitlines()
    assert [("broken/store.db" in line, "foreign/store.db" in line) for line in said] == [(True, False), (False, True)]
    assert all(line.startswith("art-patch: store ") for line in said)
    answered = art_patch(home, "projects", "--json")
    found = json.loads(answered.stdout)
    assert answered.returncode == 8
    assert [one["champion"] for one in found["projects"]] == ["agent@1"]
    assert [words in text for words, text in zip(("not a database", "not a store"), found["unreadable"], strict=True)]
    alone = art_patch(home, "projects", "--store", str(home / "foreign" / "store.db"))
    assert (alone.returncode, "not a store of art_patch" in alone.stderr) == (8, True)
