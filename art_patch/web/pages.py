"""The table of all pages: each is a path, a template, and a function that computes its facts from the store.

`GET /p/PROJECT/PATH` shows the template with these facts, and `GET /api/v1/PROJECT/PATH` returns them as JSON. So a
page never knows more than the API, and what the OpenAPI document says comes from this table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from art_patch.types import JSON
from art_patch.web import actions, cycles, groups, overview, policies, review, run, runs, system
from art_patch.web.projects import Asked, Query

Facts = Callable[[Asked], JSON]


@dataclass(frozen=True, slots=True)
class Page:
    """One page."""

    name: str  # of its template, and in the API's document
    path: str  # below the project; `{id}` stands for an id, `{id:any}` for one that apps choose
    title: str
    facts: Facts
    about: str  # one sentence, for the API's document
    query: type[Query] = Query
    # Kinds of events, as `live.KINDS` names them, after which an open page shows itself again.
    live: tuple[str, ...] = ()
    is_in_menu: bool = True
    waits: bool = False  # for an engine, or for a sum that takes seconds


PAGES: tuple[Page, ...] = (
    Page(
        "overview", "", "Overview", overview.facts,
        "Who serves, how well policies and upstream do over time, what waits, and which apps are connected.",
        query=overview.OverviewQuery, live=("calls", "scores", "moves", "cycle", "apps", "sums"),
    ),
    Page(
        "runs", "runs", "Runs", runs.facts,
        "Recorded runs by text and filters, newest or worst first.", query=runs.RunsQuery,
    ),
    Page(
        "new_runs", "new-runs", "New runs", runs.new_runs,
        "How many runs are newer than the newest one that a page shows.",
        query=runs.NewRunsQuery, is_in_menu=False,
    ),
    Page(
        "run", "runs/{id:any}", "Run", run.facts,
        "One run: its steps, times, conversation, tokens, scores, siblings, corrections, and what was learned from it.",
        query=run.RunQuery, is_in_menu=False,
    ),
    Page(
        "erase_run", "erase-run/{id:any}", "Erase a run", actions.erasure_facts,
        "What an erasure of a run would delete, and where copies of it are.", is_in_menu=False,
    ),
    Page(
        "run_test", "run-test/{id:any}", "A test of the suite", actions.suite_facts,
        "The line of a suite that asks every candidate the prompt of a call of a run.",
        query=actions.SuiteQuery, is_in_menu=False,
    ),
    Page(
        "groups", "groups", "Groups", groups.facts,
        "Groups of siblings, newest first, by state, scenario and the policy that learned from them.",
        query=groups.GroupsQuery,
    ),
    Page(
        "group", "groups/{id:any}", "Group", groups.one,
        "One group: its siblings with rewards and scores, what they taught, and two of them compared word by word.",
        query=groups.GroupQuery, is_in_menu=False,
    ),
    Page(
        "cycles", "cycles", "Cycles", cycles.facts,
        "The cycle that runs, the reports of the last ones, and what the next one waits for.",
        query=cycles.CyclesQuery, live=("cycle",),
    ),
    Page(
        "cycle_start", "cycles/start", "Start a cycle", cycles.start,
        "What would happen if a cycle were started now.", is_in_menu=False,
    ),
    Page(
        "cycle", "cycles/{id}", "Cycle", cycles.one,
        "One cycle: its stages, the curves of its update, the gate, and its report.", is_in_menu=False,
    ),
    Page(
        "policies", "policies", "Policies", policies.facts,
        "All policies with state, parent, gate and share of the sessions, and the newest decisions.",
        query=policies.PoliciesQuery, live=("moves",),
    ),
    Page(
        "policy", "policies/{id}", "Policy", policies.one,
        "One policy: where it comes from, what it learned from, its gate, its test, and every decision on it.",
        live=("moves",), is_in_menu=False,
    ),
    Page(
        "answers", "policies/{id}/answers", "Answers", policies.answers,
        "Prompts of the app that this policy and another one both answered, with both answers.",
        query=policies.AnswersQuery, is_in_menu=False,
    ),
    Page(
        "decide", "decide", "A decision", policies.decide,
        "What a decision about a policy would bring, or why it is refused; nothing is changed.",
        query=policies.DecideQuery, is_in_menu=False, waits=True,
    ),
    Page(
        "review", "review", "Review", review.facts,
        "Two siblings side by side, without who answered and what the judge said, and how often people agree with it.",
        query=review.ReviewQuery,
    ),
    Page(
        "system", "system", "System", system.facts,
        "Retention, exports, erasures, notifications, settings in force, versions and the audit log.",
        query=system.SystemQuery,
    ),
    Page(
        "system_size", "system/size", "Size and growth", system.size,
        "How large the store is, and how fast it grows.", is_in_menu=False, waits=True,
    ),
    Page(
        "system_engine", "system/engine", "Engine and servers", system.engine,
        "The engine and all servers as they answer now, with the policies that they have loaded.", is_in_menu=False,
        waits=True,
    ),
    Page(
        "system_doctor", "system/doctor", "What the doctor finds", system.examined,
        "The findings of `art-patch doctor`, with their cures.", is_in_menu=False, waits=True,
    ),
)  # fmt: skip


def openapi(version: str) -> JSON:
    """Return the OpenAPI document of the pages' JSON."""
    paths: dict[str, Any] = {}
    key = [{"key": []}, {"cookie": []}]
    for page in PAGES:
        path = page.path.replace(":any}", "}")
        ids = [part[1:-1] for part in path.split("/") if part.startswith("{")]
        parameters = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in ("project", *ids)
        ]
        schema = page.query.model_json_schema()
        for name, its in schema.get("properties", {}).items():
            about = {"description": its.pop("description", "")}
            parameters.append({"name": name, "in": "query", "required": False, "schema": its} | about)
        answers = {
            "200": {"description": page.title, "content": {"application/json": {"schema": {"type": "object"}}}},
            "401": {"description": "No key and no cookie of this server."},
            "404": {"description": "There is no such project, or nothing with this id."},
            "422": {"description": "A parameter is wrong; the message says which."},
        }
        one = {"operationId": page.name, "summary": page.about, "parameters": parameters, "responses": answers}
        paths[f"/api/v1/{{project}}/{path}".rstrip("/")] = {"get": one | {"security": key}}
    schemes = {
        "key": {"type": "http", "scheme": "bearer", "description": "The text of `web.key` in the project's directory."},
        "cookie": {"type": "apiKey", "in": "cookie", "name": "art_patch_web", "description": "Of a browser."},
    }
    info = {"title": "art_patch", "version": version, "description": "What the pages of `art-patch web` show, as JSON."}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"securitySchemes": schemes}}
