"""`art-patch consent`: whose runs are not learned from; and what the first `serve` and `retrain` of a project say."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer

from art_patch import pipeline, store
from art_patch.cli import output
from art_patch.cli.options import ActingProject
from art_patch.cli.output import counted
from art_patch.cli.typed_options import Option, command
from art_patch.errors import ConfigError
from art_patch.settings import Settings


@command
def consent(
    project: ActingProject,
    user: Annotated[str | None, Option("The user's user_id.")] = None,
    withdraw: Annotated[bool, Option("Learn from no run of this user any more, past ones included.")] = False,
    give: Annotated[bool, Option("Let this user's runs be learned from again.")] = False,
) -> None:
    """Say whether a user's runs may be learned from. Without options, list who withdrew, and what is left out.

    The runs of a user who withdrew are still recorded, for operation only: they are not judged, asked again, repeated,
    used by the gate, trained on, or exported for training. `art-patch erase` deletes them, and names the policies that
    learned from them before.
    """
    if withdraw and give:
        raise ConfigError("--withdraw and --give exclude each other; give one of them")
    if (user is not None) != (withdraw or give):
        raise ConfigError("name the user and what they said: --user U --withdraw, or --user U --give")
    if user is not None and not user:
        raise ConfigError("--user must not be empty; give the user_id that your app gives to trajectory()")
    with project.opened() as (settings, opened):
        if user is not None:
            change = opened.consent.withdraw if withdraw else opened.consent.give
            is_new = change(user, who=project.actor("consent"))
            past = opened.rights.erase(user=user, dry_run=True)
            taught = [one.name for one in past.policies if one.how in ("trained", "copy")]
            facts: dict[str, Any] = {"user": user, "learns": give, "changed": is_new, "runs": past.trajectories}
            facts |= {"policies": taught, "todo": []}
            names = [one.name for one in opened.ledger.policies()]
            # Unfinished updates hold the tokens of what they train on.
            if withdraw and not pipeline.forget_unfinished(settings.directory, names):
                facts["todo"].append("A cycle is at work; it may still use these runs. The next one does not.")
        else:
            facts = {"withdrawn": opened.consent.withdrawn(), "not_learned_from": opened.consent.left_out()}
    if project.answered(facts):
        return
    for line in _changed(facts) if user is not None else _listed(facts):
        output.say(line)


def _changed(facts: dict[str, Any]) -> list[str]:
    user, runs = facts["user"], counted(facts["runs"], "run", "runs")
    if facts["learns"]:
        back = f"{runs} may be learned from again, except for those that your app marked"
        return [f"{user}: {back}" if facts["changed"] else f"{user} had not withdrawn, so nothing changed"]
    said = f"{user}: {runs} of before, and all that follow, are recorded for operation only"
    lines = [said if facts["changed"] else f"{user} had withdrawn before, so nothing changed"]
    if facts["policies"]:
        learned = output.listed(facts["policies"], "")
        lines.append(f"{learned} learned from some of them; `art-patch erase --dry-run` says how to go back")
    return [*lines, *(f"-> {one}" for one in facts["todo"])]


def _listed(facts: dict[str, Any]) -> list[str]:
    now = time.time()
    lines = [f"{user} withdrew {output.ago(now - at)} ago" for user, at in facts["withdrawn"].items()]
    lines += [f"{count} runs not learned from: {reason}" for reason, count in facts["not_learned_from"].items()]
    return lines or ["nobody withdrew, and all runs may be learned from"]


# --- what the first start of a project says ---


def tell_once(opened: store.Store, settings: Settings, command: str, *, as_json: bool) -> None:
    """Say what is recorded, what leaves this machine and what is learned from, at the project's first such command."""
    if opened.consent.note_start(command):
        for line in _first_words(settings):
            typer.echo(output.one_line(line), err=as_json)


def _first_words(settings: Settings) -> Iterator[str]:
    judges = [(settings.judge, settings.judge_base_url), (settings.gate_judge, settings.gate_judge_base_url)]
    to = " and ".join(f"{judge} at {host_of(url)}" for judge, url in judges if judge)
    where = store.without_password(settings.store_url)
    yield f"project {settings.project}: calls of its apps are recorded with their texts in {where}"
    embedding = f"; users' first messages go to {settings.embeddings} at {host_of(settings.embeddings_base_url)}"
    more = embedding if settings.embeddings else ""
    if settings.teacher:
        teacher = f"{settings.teacher} at {host_of(settings.teacher_base_url)}"
        yield f"learning sends the token ids of recorded prompts and answers to the teacher {teacher}{more}"
    if to or not settings.teacher:
        yield (
            f"judging sends recorded prompts, answers and tool results to {to or 'the judge that you name'}{more}; "
            "`art-patch score --dry-run` shows how much"
        )
    models = ", ".join(settings.imitate_models)
    yield f"training on the provider's answers is {f'on for {models}' if models else 'off'} (ART_PATCH_IMITATE_MODELS)"
    yield (
        "users opt out by art.trajectory(learn=False), the header X-Art-Patch-Learn: no, or "
        "`art-patch consent --user U --withdraw`"
    )


def host_of(url: str | None) -> str:
    """Return the host of an address that the settings name, without a password in it."""
    if url is None:
        return "its provider's own address"
    parts = urlsplit(url)
    return (parts.hostname or url) + (f":{parts.port}" if parts.port else "")
