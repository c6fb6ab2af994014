"""Checks of what `art-patch retrain` needs here: the judge, and what it computes with. Nothing of it is imported."""

from __future__ import annotations

from art_patch.doctor.finding import Finding
from art_patch.doctor.packages import Installed

_MALICIOUS = frozenset({"1.82.7", "1.82.8"})
_INSTALL = 'pip install "art-patch[judge]"'


def judge(model: str | None, installed: Installed) -> Finding:
    """Whether there is a judge that can be asked; it is not asked here, for that costs money.

    Args:
        model: its name, as litellm has it.
        installed: see `Installed`.
    """
    litellm = installed("litellm")
    if litellm in _MALICIOUS:  # whether a judge is set or not
        text = f"litellm {litellm} is a malicious release: it sends keys and passwords of this machine to strangers"
        cure = f"pip uninstall litellm, replace every key that this machine knows, then {_INSTALL}"
        return Finding("judge", "bad", text, cure)
    if model is None:
        return Finding("judge", "ok", "none is set; `art-patch retrain` needs one: ART_PATCH_JUDGE")
    missing = [name for name in ("litellm", "tenacity") if installed(name) is None]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        text = f"{model}, but {', '.join(missing)} {verb} not installed: `art-patch retrain` cannot ask it from here"
        return Finding("judge", "warn", text, _INSTALL)
    return Finding("judge", "ok", f"{model}, asked over litellm {litellm}")


def libraries(installed: Installed) -> Finding:
    """What a training step would run on."""
    found = {name: installed(name) for name in ("torch", "transformers", "peft")}
    there = ", ".join(f"{name} {version}" for name, version in found.items() if version)
    missing = ", ".join(name for name, version in found.items() if not version)
    if not missing:
        return Finding("job packages", "ok", there)
    lacking = f"{there}; not {missing}:" if there else "not installed here;"
    return Finding("job packages", "ok", f"{lacking} retrain runs in an environment of its own")
