"""Checks of this Python environment: the SDK, who else patches it, and which calls never reach it."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from art_patch.doctor.finding import Finding
from art_patch.patching import BYPASSES

Installed = Callable[[str], str | None]
"""From the name of a distribution to its version, `None` if it is not installed."""

_HTTP_LIBRARIES = ("httpx", "httpx2", "httpx-aiohttp")

_PATCHERS = (
    "langfuse",
    "langsmith",
    "logfire",
    "weave",
    "mlflow",
    "sentry-sdk",
    "ddtrace",
    "instructor",
    "traceloop-sdk",
    "openinference-instrumentation-openai",
    "opentelemetry-instrumentation-openai",
    "opentelemetry-instrumentation-openai-v2",
    "opentelemetry-instrumentation-httpx",
)
"""What wraps the OpenAI SDK or the HTTP library below it."""


def installed_version(package: str) -> str | None:
    """Return the version of an installed distribution."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def python() -> Finding:
    """Which Python is examined: the app's own must be this one for the rest to mean anything."""
    return Finding("python", "ok", f"{platform.python_version()} at {sys.executable}")


def sdk(installed: Installed, base_clients: Callable[[], Any]) -> list[Finding]:
    """Whether the OpenAI SDK is one that can be wrapped.

    Args:
        installed: see `Installed`.
        base_clients: imports and returns the SDK's module of base clients.
    """
    found = installed("openai")
    if found is None:
        return [Finding("openai", "bad", "not installed", "pip install openai")]
    libraries = ", ".join(f"{name} {number}" for name in _HTTP_LIBRARIES if (number := installed(name)))
    text = f"{found}, over {libraries or 'no HTTP library that we know'}"
    from art_patch.patching import Wrapping

    wrapping = Wrapping(lambda _: None)
    try:
        wrapping.put_on(base_clients())
    except Exception as error:  # whatever another release of the SDK may be like
        return [
            Finding(
                "openai",
                "bad",
                f"{text}: this release cannot be wrapped ({type(error).__name__}: {error})",
                "install a release that art-patch supports: pip install 'openai>=1.66,<4'",
            )
        ]
    wrapping.take_off()
    return [Finding("openai", "ok", f"{text}: can be wrapped")]


def patchers(installed: Installed) -> list[Finding]:
    """Who else wraps the SDK."""
    found = [f"{name} {number}" for name in _PATCHERS if (number := installed(name))]
    if not found:
        return [Finding("other patchers", "ok", "none")]
    return [Finding("other patchers", "ok", f"{', '.join(found)}: they see each call too, the routed ones included")]


def bypasses(installed: Installed) -> list[Finding]:
    """Which installed packages have calls that the patch cannot see."""
    found = [
        Finding("bypasses", "warn", f"{one.package} {number}, not seen: {one.unseen}", one.cure)
        for one in BYPASSES
        if (number := installed(one.package))
    ]
    return found or [Finding("bypasses", "ok", "no package is installed that goes past the OpenAI SDK")]
