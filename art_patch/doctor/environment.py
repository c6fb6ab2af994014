"""Checks for `art-patch doctor` of this Python environment and its settings: packages, GPUs, vLLM, judge, variables.

The checks get the function `installed`, which returns the version of a package, as an argument, so that tests can
simulate other machines.
"""

import difflib
import platform
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from art_patch import serving
from art_patch.doctor.finding import Finding
from art_patch.errors import ConfigError
from art_patch.patching import BYPASSES
from art_patch.settings import PREFIX, Settings
from art_patch.store import without_password

Installed = Callable[[str], str | None]  # name of a distribution -> its version; `None` if it is not installed

_HTTP_LIBRARIES = ("httpx", "httpx2", "httpx-aiohttp")
_PATCHERS = (
    "langfuse", "langsmith", "logfire", "weave", "mlflow", "sentry-sdk", "ddtrace", "instructor", "traceloop-sdk",
    "openinference-instrumentation-openai", "opentelemetry-instrumentation-openai",
    "opentelemetry-instrumentation-openai-v2", "opentelemetry-instrumentation-httpx",
)  # fmt: skip
"""Packages that also wrap the OpenAI SDK, or the HTTP library below it."""

# Releases of litellm on PyPI that sent the machine's keys and passwords to strangers.
_MALICIOUS = frozenset({"1.82.7", "1.82.8"})
_INSTALL = 'pip install "art-patch[judge]"'


def installed_version(package: str) -> str | None:
    """Return the version of an installed package; `None` if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def python() -> Finding:
    """Report this Python interpreter. If the app runs in another one, the other findings do not apply to the app."""
    return Finding("python", "ok", f"{platform.python_version()} at {sys.executable}")


def sdk(installed: Installed, base_clients: Callable[[], Any]) -> Finding:
    """Check that the installed OpenAI SDK can be patched; `base_clients` imports `openai._base_client`."""
    found = installed("openai")
    if found is None:
        return Finding("openai", "bad", "not installed", "pip install openai")
    libraries = ", ".join(f"{name} {number}" for name in _HTTP_LIBRARIES if (number := installed(name)))
    text = f"{found}, over {libraries or 'no HTTP library that we know'}"
    from art_patch.patching import Wrapping  # imports the SDK's dependencies

    # A real attempt, taken back at once: version numbers do not tell what a future SDK looks like inside.
    wrapping = Wrapping(lambda _: None)
    try:
        wrapping.put_on(base_clients())
    except Exception as error:  # an unknown release of the SDK may fail in any way
        cure = "install a release that art-patch supports: pip install 'openai>=1.66,<4'"
        why = f"{text}: this release cannot be wrapped ({type(error).__name__}: {error})"
        return Finding("openai", "bad", why, cure)
    wrapping.take_off()
    return Finding("openai", "ok", f"{text}: can be wrapped")


def patchers(installed: Installed) -> Finding:
    """Report installed packages, such as tracers, that also wrap the OpenAI SDK or the HTTP library below it."""
    found = ", ".join(f"{name} {number}" for name in _PATCHERS if (number := installed(name)))
    text = f"{found}: they see each call too, the routed ones included" if found else "none"
    return Finding("other patchers", "ok", text)


def bypasses(installed: Installed) -> list[Finding]:
    """Report installed packages with calls past the OpenAI SDK, so that the patch can neither record nor route them.

    A package that nobody calls is no risk, and our own extras bring some. `art-patch status` counts what went past.
    """
    found = [
        Finding("bypasses", "ok", f"{one.package} {number} is here; not seen, if you call it: {one.unseen}", one.cure)
        for one in BYPASSES
        if (number := installed(one.package))
    ]
    text = "no package is installed that goes past the OpenAI SDK, except for httpx if a program sends calls by it"
    return found or [Finding("bypasses", "ok", text)]


def gpu(gpus: Sequence[str]) -> Finding:
    """Report the GPUs that this process may use. `gpus` has their names, limited by `CUDA_VISIBLE_DEVICES`."""
    if not gpus:
        return Finding("gpu", "ok", "none")
    return Finding("gpu", "ok", f"{len(gpus)} NVIDIA GPU{'s' if len(gpus) > 1 else ''}: {', '.join(gpus)}")


def vllm(find: Callable[[], serving.Found | None], gpus: Sequence[str]) -> Finding:
    """Report the vLLM that `art-patch serve` would start, or that the embedded engine serves (`find` is `None`)."""
    try:
        found = find()
    except ConfigError as error:
        return Finding("vllm", "bad", str(error))
    # A GPU without vLLM works, but many times slower than the machine could.
    if found is None and gpus:
        return Finding("vllm", "warn", "none, though a GPU is here: the embedded engine serves, slowly", serving.BUILD)
    if found is None:
        return Finding("vllm", "ok", "none; the embedded engine serves")
    torch = found.versions.get("torch", "is missing")
    text = f"{found.vllm} for {'GPUs' if found.device == 'cuda' else 'CPUs'}, torch {torch}, at {found.python}"
    if found.device == "cpu" and gpus:
        return Finding("vllm", "warn", f"{text}: the GPU here lies idle", serving.BUILD)
    if found.device == "cpu":
        text += "; the embedded engine serves unless `art-patch serve --engine vllm` says so"
    elif not gpus:
        text += "; without a GPU the embedded engine serves"
    return Finding("vllm", "ok", text)


def judge(model: str | None, installed: Installed) -> Finding:
    """Check that the judge's model is set and its library installed. No request is sent, because that costs money."""
    litellm = installed("litellm")
    # First, and without a judge too: the package itself is the danger.
    if litellm in _MALICIOUS:
        text = f"litellm {litellm} is a malicious release: it sends keys and passwords of this machine to strangers"
        cure = f"pip uninstall litellm, replace every key that this machine knows, then {_INSTALL}"
        return Finding("judge", "bad", text, cure)
    if model is None:
        return Finding("judge", "ok", "none is set; `art-patch retrain` needs one (ART_PATCH_JUDGE) or a teacher")
    if missing := [name for name in ("litellm", "tenacity") if installed(name) is None]:
        verb = "is" if len(missing) == 1 else "are"
        text = f"{model}, but {', '.join(missing)} {verb} not installed: `art-patch retrain` cannot ask it from here"
        return Finding("judge", "warn", text, _INSTALL)
    return Finding("judge", "ok", f"{model}, asked over litellm {litellm}")


def libraries(installed: Installed) -> Finding:
    """Report which of the packages for training (torch, transformers, peft) are installed in this environment."""
    found = {name: installed(name) for name in ("torch", "transformers", "peft")}
    there = ", ".join(f"{name} {number}" for name, number in found.items() if number)
    missing = ", ".join(name for name, number in found.items() if not number)
    if not missing:
        return Finding("job packages", "ok", there)
    # Not an error: app and job are meant to have environments of their own.
    lacking = f"{there}; not {missing}:" if there else "not installed here;"
    return Finding("job packages", "ok", f"{lacking} retrain runs in an environment of its own")


def sources(settings: Settings, arguments: Collection[str], environment: Mapping[str, str]) -> dict[str, Any]:
    """Return each setting as `{"value": ..., "source": ...}`; the source is `argument`, `environment` or `default`."""
    # An empty variable counts as unset, as it does for `Settings`.
    variables = {name.upper() for name, value in environment.items() if value.strip()}
    found: dict[str, Any] = {}
    for name, field in Settings.model_fields.items():
        value = getattr(settings, name)
        # People paste this report into issues, so it holds no key and no password. Settings that hold one are kept out
        # of their `repr`, too, so a new one needs no second list.
        if value is not None and not field.repr and name != "store":
            value = "set, not shown"
        elif isinstance(value, str) and "://" in value:
            value = without_password(value)
        source = "environment" if f"{PREFIX}{name}".upper() in variables else "default"
        source = "argument" if name in arguments else source
        if isinstance(value, tuple):
            value = ",".join(value) or None  # as its variable takes it
        # Values that JSON has stay as they are; paths become text.
        shown = value if value is None or isinstance(value, bool | int | float) else str(value)
        found[name] = {"value": shown, "source": source}
    return found


def chosen(found: Mapping[str, Any]) -> Finding:
    """Report the settings that an argument or a variable sets. `found` is the result of `sources`."""
    given = ((name, one) for name, one in sorted(found.items()) if one["source"] != "default")
    text = ", ".join(f"{name}={one['value']} ({one['source']})" for name, one in given)
    return Finding("settings", "ok", text or "all defaults")


def mistaken(wrong: str | None) -> Finding | None:
    """Report `wrong`, the error about variables with invalid values: `patch()` logs one warning and does nothing."""
    if wrong is None:
        return None
    cure = "mend it, or unset it: until then `patch()` leaves the app alone, and what is below takes the default"
    return Finding("settings", "bad", wrong, cure)


def strangers(environment: Mapping[str, str], of_options: Collection[str] = ()) -> list[Finding]:
    """Report environment variables that begin with `ART_PATCH_` and are read by nobody: they are often misspelt.

    `of_options` are variables that options of commands read besides the settings.
    """
    known = {f"{PREFIX}{name}".upper() for name in Settings.model_fields} | set(of_options)
    found: list[Finding] = []
    for name in sorted(environment):
        if not name.upper().startswith(PREFIX) or name.upper() in known:
            continue
        near = difflib.get_close_matches(name.upper(), known, n=1)
        cure = f"did you mean {near[0]}?" if near else "take it out, or see art_patch/settings.py for what there is"
        found.append(Finding("settings", "warn", f"{name} is set and is no setting of this release", cure))
    return found
