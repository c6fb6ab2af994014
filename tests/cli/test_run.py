"""`art-patch run`: an unchanged program in a process of its own is patched, and stays the program that it was."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from art_patch.store import open_store
from tests.support.servers import StubServer, serving

APP = """
import sys
import openai

with openai.OpenAI(api_key="sk-x", base_url=sys.argv[1], max_retries=0) as client:
    ask = {"model": sys.argv[2], "messages": [{"role": "user", "content": "hi"}]}
    print(client.chat.completions.create(**ask).choices[0].message.content)
"""

# Both of python's own names for a module are tried: a script, and `-m`.
ENVIRONMENT = {key: value for key, value in os.environ.items() if not key.startswith(("ART_PATCH_", "PYTHON"))}


@pytest.fixture(scope="module")
def upstream() -> Iterator[StubServer]:
    with serving() as server:
        yield server


@pytest.fixture
def app(tmp_path: Path) -> Path:
    path = tmp_path / "app" / "my_app.py"
    path.parent.mkdir()
    path.write_text(APP)
    return path


def command(home: Path, *program: str, options: tuple[str, ...] = ()) -> list[str]:
    return [sys.executable, "-m", "art_patch", "run", "--home", str(home), *options, "--", *program]


def run(
    home: Path, *program: str, options: tuple[str, ...] = (), stdin: str = "", **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(home, *program, options=options),
        capture_output=True,
        text=True,
        timeout=120,
        input=stdin,
        env=ENVIRONMENT | environment,
    )


def models(home: Path, project: str = "default") -> list[str]:
    """The models of the calls that were recorded."""
    store = open_store(f"sqlite:///{home}/{project}/store.db")
    found = [call.requested_model for run in store.read.recent() for call in run.calls]
    store.close()
    return sorted(found)


def test_a_script_is_recorded(tmp_path: Path, app: Path, upstream: StubServer):
    result = run(tmp_path, sys.executable, str(app), upstream.url, "m1", options=("--project", "bot"))
    assert (result.returncode, result.stdout, result.stderr) == (0, "Hello there!\n", "")
    assert models(tmp_path, "bot") == ["m1"]


def test_a_module_is_recorded(tmp_path: Path, app: Path, upstream: StubServer):
    result = run(tmp_path, sys.executable, "-m", "my_app", upstream.url, "m2", PYTHONPATH=str(app.parent))
    assert (result.returncode, result.stdout, result.stderr) == (0, "Hello there!\n", "")
    assert models(tmp_path) == ["m2"]


LITELLM = """
import litellm, sys
litellm.completion("hosted_vllm/y", api_base=sys.argv[1], api_key="k", messages=[{"role": "user", "content": "hi"}])
"""


@pytest.mark.slow
def test_litellm_may_be_imported_first(tmp_path: Path, upstream: StubServer):
    if find_spec("litellm") is None:
        pytest.skip("litellm is not installed")
    options, prices = ("--mode", "record"), "True"
    result = run(
        tmp_path, sys.executable, "-c", LITELLM, upstream.url, options=options, LITELLM_LOCAL_MODEL_COST_MAP=prices
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert models(tmp_path) == ["y"]


@pytest.mark.parametrize(
    "how", ["import dspy", "import dspy.clients", "from dspy import clients", "import openai, dspy"]
)
def test_the_integration_of_the_first_import_is_armed(tmp_path: Path, how: str):
    """A stand-in for dspy, which the integration takes for a release that it does not know."""
    (tmp_path / "dspy" / "clients").mkdir(parents=True)
    (tmp_path / "dspy/__init__.py").write_text("import openai\nVALUE = 1\n")
    (tmp_path / "dspy/clients/__init__.py").write_text("")
    script = f"{how}\nimport art_patch, sys\nprint(sys.modules['dspy'].VALUE, art_patch.status().degraded)"
    result = run(tmp_path, sys.executable, "-c", script, PYTHONPATH=str(tmp_path))
    assert result.returncode == 0
    assert result.stdout == "1 ('The integration for dspy cannot be used (AttributeError).',)\n"


AG2 = "class Agent:\n    def __init__(self): pass\n"
INSTRUCTOR = "def retry_sync(): pass\n"


@pytest.mark.parametrize(
    ("module", "text", "found"),
    [
        ("ag2", AG2, "sys.modules['ag2'].Agent.__init__"),
        ("instructor.core.patch", INSTRUCTOR, "sys.modules['instructor.core.patch'].retry_sync"),
    ],
)
def test_a_framework_may_import_the_sdk_before_it_has_what_its_integration_needs(
    tmp_path: Path, module: str, text: str, found: str
):
    path = tmp_path
    for part in module.split("."):
        path /= part
        path.mkdir()
        (path / "__init__.py").touch()
    (path / "__init__.py").write_text(f"import openai\n{text}")
    script = f"import sys, {module}\nprint(hasattr({found}, '__wrapped__'))"
    result = run(tmp_path, sys.executable, "-c", script, PYTHONPATH=str(tmp_path))
    assert (result.returncode, result.stdout, result.stderr) == (0, "True\n", "")


def test_what_was_not_recorded_is_said_at_the_end(tmp_path: Path, app: Path, upstream: StubServer):
    (tmp_path / "file").write_text("")
    result = run(
        tmp_path, sys.executable, str(app), upstream.url, "m1", ART_PATCH_STORE=f"sqlite:///{tmp_path}/file/store.db"
    )
    assert (result.returncode, result.stdout) == (0, "Hello there!\n")
    assert result.stderr.splitlines()[-1] == (
        "art_patch: 1 call not recorded, because the store cannot be written (StoreError); `art-patch doctor` says why"
    )


def test_variables_alone_are_enough(tmp_path: Path, app: Path, upstream: StubServer):
    environment = {"ART_PATCH_HOME": str(tmp_path), "ART_PATCH_PROJECT": "from-env"}
    plain = f"import art_patch as art; art.patch()\n{APP}"
    subprocess.run([sys.executable, "-c", plain, upstream.url, "m1"], env=ENVIRONMENT | environment, check=True)
    assert models(tmp_path, "from-env") == ["m1"]


def test_options_win_over_variables_and_reach_the_program(tmp_path: Path):
    show = "import os, json; print(json.dumps({k: v for k, v in os.environ.items() if k.startswith('ART_PATCH_')}))"
    options = ("--mode", "record", "--match", "gpt-*", "--sample-rate", "0.5", "--redact", "secrets")
    result = run(tmp_path, sys.executable, "-c", show, options=options, ART_PATCH_MODE="off", ART_PATCH_TIMEOUT_S="5")
    assert json.loads(result.stdout) == {
        "ART_PATCH_HOME": str(tmp_path),
        "ART_PATCH_MODE": "record",
        "ART_PATCH_MATCH": "gpt-*",
        "ART_PATCH_SAMPLE_RATE": "0.5",
        "ART_PATCH_REDACT": "secrets",
        "ART_PATCH_TIMEOUT_S": "5",
    }


def test_the_programs_own_options_are_its_own(tmp_path: Path):
    show = "import sys; print(sys.argv[1:])"
    result = run(tmp_path, sys.executable, "-c", show, "--project", "../x", "--json", "--", "-h")
    assert result.stdout == "['--project', '../x', '--json', '--', '-h']\n"


def test_children_are_patched_too(tmp_path: Path, app: Path, upstream: StubServer):
    parent = "import subprocess, sys; sys.exit(subprocess.run([sys.executable, *sys.argv[1:]]).returncode)"
    result = run(tmp_path, sys.executable, "-c", parent, str(app), upstream.url, "m3")
    assert (result.returncode, result.stdout, result.stderr) == (0, "Hello there!\n", "")
    assert models(tmp_path) == ["m3"]


def test_isolated_python_is_not_reached(tmp_path: Path, app: Path, upstream: StubServer):
    """`-I` and `-E` make Python deaf to PYTHONPATH, `-S` to sitecustomize; the program runs as it is."""
    result = run(tmp_path, sys.executable, "-I", str(app), upstream.url, "m1")
    assert (result.returncode, result.stdout, result.stderr) == (0, "Hello there!\n", "")
    assert run(tmp_path, sys.executable, "-S", "-c", "print(1)").stdout == "1\n"
    assert models(tmp_path) == []


def test_a_program_that_never_needs_us_pays_nothing(tmp_path: Path):
    script = (
        "import sys, threading, json, socket, subprocess\n"
        "ours = [m for m in sys.modules if m.partition('.')[0] in ('art_patch', 'wrapt', 'pydantic', 'sqlite3')]\n"
        "print(ours, threading.active_count())"
    )
    result = run(tmp_path, sys.executable, "-c", script)
    assert (result.stdout, result.stderr) == ("[] 1\n", "")
    assert list(tmp_path.iterdir()) == []


def test_importing_the_sdk_opens_nothing(tmp_path: Path):
    script = (
        "import openai, threading, os\n"
        "print(type(openai._base_client.SyncAPIClient.__dict__['request']).__name__, threading.active_count())\n"
        "print([f for f in os.listdir('/proc/self/fd') if 'socket' in os.path.realpath('/proc/self/fd/' + f)])"
    )
    result = run(tmp_path, sys.executable, "-c", script)
    assert (result.stdout, result.stderr) == ("FunctionWrapper 1\n[]\n", "")
    assert list(tmp_path.iterdir()) == []


def test_another_sitecustomize_still_runs(tmp_path: Path, app: Path, upstream: StubServer):
    others = tmp_path / "others"
    others.mkdir()
    (others / "sitecustomize.py").write_text("import sys; sys.theirs = True; HERE = 'theirs'\n")
    script = tmp_path / "look.py"
    script.write_text(f"import sys, sitecustomize; print(sys.theirs, sitecustomize.HERE)\n{APP}")
    result = run(tmp_path, sys.executable, str(script), upstream.url, "m1", PYTHONPATH=str(others))
    assert (result.stdout, result.stderr) == ("True theirs\nHello there!\n", "")
    assert models(tmp_path) == ["m1"]


def test_another_sitecustomize_may_fail(tmp_path: Path, upstream: StubServer):
    others = tmp_path / "others"
    others.mkdir()
    (others / "sitecustomize.py").write_text("raise ValueError('theirs')\n")
    script = tmp_path / "look.py"
    script.write_text(APP)
    result = run(tmp_path, sys.executable, str(script), upstream.url, "m1", PYTHONPATH=str(others))
    assert (result.returncode, result.stdout) == (0, "Hello there!\n")
    assert "ValueError: theirs" in result.stderr  # as Python itself says it
    assert models(tmp_path) == ["m1"]


def test_two_launchers_that_hand_on_to_each_other_come_to_an_end(tmp_path: Path, app: Path, upstream: StubServer):
    """Others take their own directory out of the path and import `sitecustomize` again, which finds ours again."""
    launcher, others = tmp_path / "launcher", tmp_path / "others"
    for directory in (launcher, others):
        directory.mkdir()
    (launcher / "sitecustomize.py").write_text(
        "import os, sys\n"
        "here = os.path.dirname(os.path.abspath(__file__))\n"
        "sys.path = [p for p in sys.path if p != here]\n"
        "mine = sys.modules.pop('sitecustomize', None)\n"
        "import sitecustomize\n"
        "sys.launched = getattr(sys, 'launched', 0) + 1\n"
    )
    (others / "sitecustomize.py").write_text("import sys; sys.theirs = getattr(sys, 'theirs', 0) + 1\n")
    script = tmp_path / "look.py"
    script.write_text(f"import sys; print(sys.launched, sys.theirs)\n{APP}")
    result = run(
        tmp_path, sys.executable, str(script), upstream.url, "m1", PYTHONPATH=f"{launcher}{os.pathsep}{others}"
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "1 1\nHello there!\n", "")
    assert models(tmp_path) == ["m1"]


def test_python_without_art_patch_is_told_in_one_line(tmp_path: Path):
    script = (
        "import sys; sys.modules['art_patch'] = None\ntry:\n    import openai\nexcept ImportError: pass\nprint('on')"
    )
    result = run(tmp_path, sys.executable, "-c", script)
    assert (result.returncode, result.stdout) == (0, "on\n")
    (line,) = result.stderr.splitlines()
    assert line.startswith("art-patch: ModuleNotFoundError")
    assert "not patched" in line


def test_a_setting_that_a_child_breaks_is_one_line(tmp_path: Path, app: Path, upstream: StubServer):
    parent = (
        "import os, subprocess, sys; os.environ['ART_PATCH_MODE'] = 'sideways'\n"
        "sys.exit(subprocess.run([sys.executable, *sys.argv[1:]]).returncode)"
    )
    result = run(tmp_path, sys.executable, "-c", parent, str(app), upstream.url, "m1")
    assert (result.returncode, result.stdout) == (0, "Hello there!\n")
    (line,) = result.stderr.splitlines()
    assert "ART_PATCH_MODE" in line


def test_exit_code_input_and_output_are_the_programs(tmp_path: Path):
    script = "import sys; sys.stderr.write('err'); print(sys.stdin.read().upper()); sys.exit(7)"
    result = run(tmp_path, sys.executable, "-c", script, stdin="said")
    assert (result.returncode, result.stdout, result.stderr) == (7, "SAID\n", "err")


def test_any_program_can_be_run(tmp_path: Path):
    result = run(tmp_path, "sh", "-c", "kill -PIPE $$; echo it was ignored")
    assert (result.returncode, result.stdout) == (-signal.SIGPIPE, "")


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_signals_are_the_programs(sent: signal.Signals, tmp_path: Path):
    script = (
        "import signal, sys\n"
        f"signal.signal({int(sent)}, lambda number, frame: sys.exit(40 + number))\n"
        "print('ready', flush=True); signal.pause()"
    )
    with subprocess.Popen(
        command(tmp_path, sys.executable, "-c", script), stdout=subprocess.PIPE, env=ENVIRONMENT
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(sent)
        assert process.wait(30) == 40 + sent


def test_an_unhandled_sigterm_ends_it_as_ever(tmp_path: Path):
    script = "import signal; print('ready', flush=True); signal.pause()"
    with subprocess.Popen(
        command(tmp_path, sys.executable, "-c", script), stdout=subprocess.PIPE, env=ENVIRONMENT
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.terminate()
        assert process.wait(30) == -signal.SIGTERM


@pytest.mark.parametrize(
    ("program", "options", "code", "word"),
    [
        ((), (), 2, "art-patch run -- python app.py"),
        (("no-such-program",), (), 127, "no-such-program"),
        (("/",), (), 127, "Permission denied"),
        (("true",), ("--mode", "sideways"), 2, "ART_PATCH_MODE"),
        (("true",), ("--match", "re:("), 2, "ART_PATCH_MATCH"),
        (("true",), ("--store", "mysql://x"), 2, "sqlite:////"),
    ],
)
def test_mistakes_are_said_before_anything_runs(
    program: tuple[str, ...], options: tuple[str, ...], code: int, word: str, tmp_path: Path
):
    result = run(tmp_path, *program, options=options)
    assert (result.returncode, result.stdout) == (code, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith("art-patch: ")
    assert word in line


def test_a_bad_variable_is_said_before_anything_runs(tmp_path: Path):
    result = run(tmp_path, "echo", "it ran", ART_PATCH_QUEUE_MIB="many")
    assert (result.returncode, result.stdout) == (2, "")
    assert "ART_PATCH_QUEUE_MIB" in result.stderr


def test_mistakes_as_json(tmp_path: Path):
    result = run(tmp_path, "no-such-program", options=("--json",))
    assert json.loads(result.stdout)["exit_code"] == 127
    assert run(tmp_path, "no-such-program", "--json").stdout == ""  # that one was the program's
