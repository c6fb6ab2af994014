"""Faults of the files between a call and the store: none to be had, deleted, cut off, or kept open by a child."""

from __future__ import annotations

import json
import signal
from contextlib import ExitStack, closing
from functools import cache

import pytest

from art_patch.errors import StoreError
from art_patch.recording import spool_directory, take_over
from art_patch.settings import Settings
from art_patch.store import open_store
from tests.support.apps import PRELUDE, Programs, Store
from tests.support.postgres import new_server

NO_FREE_FILE = """
import resource
if sys.argv[1] == "before the first call":
    art.unpatch()
call("not recorded" if sys.argv[1] == "before the first call" else "first")
art.patch()
held, most = [], resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, most[1]))
try:
    while True:
        held.append(os.open(os.devnull, os.O_RDONLY))
except OSError:
    pass
for number in range(3):
    call(str(number))
time.sleep(1)
counted = sum(art.status().errors.values())
for each in held:
    os.close(each)
print(art.flush(30), art.status().dropped, counted < 100)
"""


@pytest.mark.parametrize("when", ["before the first call", "later"])
def test_without_a_free_file_number_calls_wait_and_no_thread_spins(programs: Programs, store: Store, when):
    """Not even a module can be imported then."""
    ran = programs.run(NO_FREE_FILE, when)
    assert (ran.code, ran.out) == (0, "True 0 True\n"), ran.err
    assert "bug" not in ran.err
    assert store.texts() == ["0", "1", "2"] + ["first"] * (when == "later")


WAITS = """
import glob, shutil
spool = sys.argv[1]

def holds_a_call(path):  # the program's report of itself is in there too
    with open(path, "rb") as file:
        return b'"asked":' in file.read()

def in_spool(number):
    end = time.monotonic() + 30
    while sum(map(holds_a_call, glob.glob(spool + "/*"))) < number and time.monotonic() < end:
        time.sleep(0.002)

"""


def test_a_short_program_whose_files_were_deleted_writes_its_calls_to_the_store(programs: Programs, store: Store):
    code = WAITS + 'call("one")\nin_spool(1)\nshutil.rmtree(spool)\n'
    ran = programs.run(code, str(spool_directory(Settings(store=store.url))))
    assert (ran.code, ran.err) == (0, "")
    assert store.texts() == ["one"]


@pytest.mark.parametrize("how", ["cut off", "deleted"])
def test_what_comes_after_a_file_was_cut_off_or_deleted_is_in_another_one(programs: Programs, store: Store, how):
    """A tool that cuts off old logs does so; frames behind a hole could not be read."""
    code = WAITS + (
        'call("one")\nin_spool(1)\n'
        "for each in glob.glob(spool + '/*'):\n"
        f"    {'os.truncate(each, 0)' if how == 'cut off' else 'os.unlink(each)'}\n"
        'call("two")\nin_spool(1)\nos.kill(os.getpid(), 9)\n'
    )
    ran = programs.run(code, str(spool_directory(Settings(store=store.url))))
    assert ran.code == -signal.SIGKILL
    assert "two" in store.texts()


IMPORTS = """
from art_patch._lib.forking import late_import
call("first")
in_spool(1)
size = os.path.getsize(glob.glob(spool + "/*")[0])
with late_import():  # as the recorder's thread, while it imports what opens a store
    call("second")
    while os.path.getsize(glob.glob(spool + "/*")[0]) <= size:
        time.sleep(0.002)
    os.kill(os.getpid(), 9)
"""


def test_calls_get_into_the_spool_while_the_recorder_imports(programs: Programs, store: Store):
    code = WAITS + "art.patch(flush_interval_s=60)\n" + IMPORTS
    ran = programs.run(code, str(spool_directory(Settings(store=store.url))), timeout=30)
    assert ran.code == -signal.SIGKILL, ran.err
    assert store.texts() == ["first", "second"]


# A busy machine has perhaps not tried to write the call when the program ends, and then there is nothing to say of it.
TRIED = """
end = time.monotonic() + 30
while "store.write" not in art.status().errors and time.monotonic() < end:
    time.sleep(0.01)
"""


@pytest.mark.slow
def test_calls_of_a_server_that_is_down_are_taken_over_when_it_is_back(programs: Programs, tmp_path):
    """By any program of the project, with the right role only: an error of the server drops nothing."""
    server = new_server()
    try:
        url = server.url(server.new_database())
        settings = Settings(home=tmp_path, store=url)
        env = {"ART_PATCH_STORE": url, "ART_PATCH_HOME": str(tmp_path)}
        server.stop()
        for text, end in (("killed", "in_spool(1)\nos.kill(os.getpid(), 9)"), ("ended", TRIED)):
            ran = programs.run(f"{WAITS}call({text!r})\n{end}", str(spool_directory(settings)), env=env)
            is_told = "1 call kept beside" in ran.err
            assert (ran.code, is_told) == ((0, True) if end == TRIED else (-signal.SIGKILL, False)), ran.err
        server.start()
        server.execute("CREATE ROLE stranger LOGIN")
        with ExitStack() as stack:
            opened = stack.enter_context(closing(open_store(url, project="default")))
            stranger = cache(lambda: open_store(url.replace("postgres@", "stranger@"), project="default"))
            with pytest.raises(StoreError):
                take_over(settings, stranger)
            assert take_over(settings, lambda: opened) == 2
            calls = [call for found in opened.read.recent(limit=10) for call in found.calls]
            assert sorted(str(call.messages[0]["content"]) for call in calls) == ["ended", "killed"]
            assert (opened.verify(), list(spool_directory(settings).iterdir())) == ([], [])
    finally:
        server.end()


CHILDREN = """
import fcntl, glob, threading
from contextlib import closing
from functools import cache
from art_patch.recording import take_over
from art_patch.settings import Settings
from art_patch.store import open_store

def holds():
    there = (os.path.realpath(f"/proc/self/fd/{each}") for each in os.listdir("/proc/self/fd"))
    return sum(each.startswith(os.environ["SPOOL"]) for each in there)

call("one")
assert art.flush(30)
settings = Settings(store=os.environ["ART_PATCH_STORE"])
found = []

class Sink:
    def write(self, records):
        found.append(holds())
        for fork in (os.fork, lambda: os.forkpty()[0]):
            child = fork()
            if child == 0:
                os._exit(holds())
            found.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

take_over(settings, Sink)
print(json.dumps(found))
"""


def test_a_child_does_not_hold_the_files_that_its_parent_takes_over(programs: Programs, store: Store):
    """Else nobody could take them over for as long as the child lives, even if the parent is dead."""
    spool = spool_directory(Settings(store=store.url))
    call = 'call("left")\nimport glob\nend = time.monotonic() + 30\n'
    call += f"while not any(os.path.getsize(each) > 600 for each in glob.glob({str(spool)!r} + '/*')):\n"
    call += "    assert time.monotonic() < end\n    time.sleep(0.002)\nos.kill(os.getpid(), 9)\n"
    assert programs.run(call).code == -signal.SIGKILL
    # Its recorder would take the file over itself.
    prelude = "import art_patch.recording.takeover\nart_patch.recording.takeover.Takeover.look = lambda *_: None\n"
    ran = programs.run("import json\n" + CHILDREN, prelude=PRELUDE + prelude, env={"SPOOL": str(spool)})
    assert ran.code == 0, ran.err
    parent, *children = json.loads(ran.out)
    assert (parent >= 1, children) == (True, [0, 0])


CHANGES = """
import sqlite3, threading
call("first")
assert art.flush(30)
locked = sqlite3.connect(sys.argv[1], isolation_level=None)
locked.execute("BEGIN IMMEDIATE")
for number in range(3):
    art.patch(spool_mib=100 + number)
    call(str(number))
art.unpatch()
locked.execute("ROLLBACK")
locked.close()

def ours():
    return [each.name for each in threading.enumerate() if each.name.startswith("art_patch")]

end = time.monotonic() + 90  # a busy machine keeps the store locked for longer, and then a recorder waits 30 s
while ours() and time.monotonic() < end:
    time.sleep(0.05)
print(ours())
"""


def test_recorders_that_were_replaced_while_the_store_was_locked_end(programs: Programs, store: Store):
    ran = programs.run(CHANGES, str(store.path), timeout=150)
    assert (ran.code, ran.out) == (0, "[]\n"), ran.err
    assert store.texts() == ["0", "1", "2", "first"]
