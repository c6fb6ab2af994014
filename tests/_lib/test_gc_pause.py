"""Garbage collection is put off while `patch()` works, and never a moment longer."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator

import pytest

import art_patch as art
from art_patch._lib.lazy import uncollected
from art_patch.patching import control


@pytest.fixture(autouse=True)
def collecting() -> Iterator[None]:
    assert gc.isenabled()
    yield
    gc.enable()


@pytest.fixture
def runtime_sees(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether it is on while `patch()` works."""
    seen: list[bool] = []
    make = control.Runtime

    def making(*args: object, **kwargs: object) -> control.Runtime:
        seen.append(gc.isenabled())
        return make(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(control, "Runtime", making)
    return seen


def test_off_in_patch_and_on_again(tmp_path, runtime_sees):
    with art.patch(home=tmp_path):
        assert gc.isenabled()
    assert runtime_sees == [False]


def test_on_again_if_patch_raises(tmp_path, monkeypatch):
    def raising(*_: object, **__: object) -> None:
        assert not gc.isenabled()
        raise KeyboardInterrupt

    monkeypatch.setattr(control, "Runtime", raising)
    with pytest.raises(KeyboardInterrupt):
        art.patch(home=tmp_path)
    assert gc.isenabled()


def test_stays_off_if_the_app_had_it_off(tmp_path):
    gc.disable()
    with art.patch(home=tmp_path):
        assert not gc.isenabled()


def test_two_at_once():
    first, second = uncollected(), uncollected()
    with first:
        second.__enter__()
        assert not gc.isenabled()
    assert gc.isenabled()
    second.__exit__(None, None, None)
    assert gc.isenabled()


def test_no_full_collection_in_the_first_patch(tmp_path):
    """The one that is due after `import openai` comes when the app goes on."""
    script = (
        "import gc, openai, sys; generations = []\n"
        "gc.callbacks.append(lambda phase, info: generations.append(info['generation']))\n"
        "import art_patch as art; art.patch(home=sys.argv[1]); print(2 in generations, gc.isenabled())"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]


@pytest.mark.skipif(sys.platform == "win32", reason="no fork")
def test_a_child_that_is_forked_meanwhile_collects():
    script = (
        "import gc, os\nfrom art_patch._lib.lazy import uncollected\n"
        "with uncollected():\n    child = os.fork()\n    if child == 0: os._exit(gc.isenabled())\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), gc.isenabled())"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1", "True"]


def test_what_was_put_off_is_not_made_up_for_at_once():
    """What is there by then is looked at when the app makes as many objects as it ever does between two looks."""
    seen = list[int]()

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            seen.append(info["generation"])

    thresholds = gc.get_threshold()
    gc.collect()
    gc.collect(0)  # the next look, whatever causes it, is at the older ones as well
    gc.set_threshold(thresholds[0], 0, 0)
    gc.callbacks.append(note)
    try:
        with uncollected():
            kept = [[number] for number in range(20_000)]
        more = [[number] for number in range(100)]
    finally:
        gc.callbacks.remove(note)
        gc.set_threshold(*thresholds)
    assert (len(kept), len(more), set(seen)) == (20_000, 100, {0})
