"""What an operator found who took art_patch into production: each finding has tests that fail if it comes back.

A finding of several parts has a row for each part. Where something was decided otherwise, the row has the reason, and
the page that tells it. Tests are named as `path::name` below `tests/`.
"""

from __future__ import annotations

import ast
from functools import cache
from typing import NamedTuple

import pytest

from tests.support.docs_pages import ROOT


class Decided(NamedTuple):
    """It is as it was, on purpose: why, and the words that tell it, on a page of the documentation."""

    why: str
    page: str
    words: str


Proof = tuple[str, ...] | Decided
Parts = dict[str, Proof]

CLI, POLICIES, SERVE = "cli/test_cli.py::test_", "cli/test_policies.py::test_", "cli/test_serve.py::test_"
DOCTOR, LOGS, RUNS = "doctor/test_doctor.py::test_", "cli/test_logs.py::test_", "cli/test_trajectories.py::test_"
TEXTFILE, METRICS = "metrics/test_textfile.py::test_", "metrics/test_servers.py::test_"
EVIDENCE, DEPLOY, SETTINGS = "promotion/test_evidence.py::test_", "test_deploy.py::test_", "test_settings.py::test_"
BUDGET, STATUS, CRON = "rewards/test_budget.py::test_", "cli/test_status.py::test_", "cli/test_cron.py::test_"
HELP, VARIABLES = "cli/test_option_list.py::test_help_", "patching/test_variables.py::test_"
UPSTREAM, LINEAGE = "pipeline/test_against_upstream.py::test_", "cli/test_lineage.py::test_"
NOTES = "notifications/test_notifications.py::test_"

NO_SUCH_PROJECT = ("cli/test_wrong_project.py::test_a_project_that_is_not_there_is_not_made",)
NO_SUCH_POLICY = (POLICIES + "a_policy_that_is_not_there_is_named", RUNS + "mistakes_are_one_line")

DEFECTS: dict[int, Parts] = {
    1: {
        "projects of one database read and changed each other": (
            "cli/test_crossing.py::test_no_command_reaches_another_project_on_a_server",
            "store/test_crossing.py::test_no_operation_reaches_another_project",
            "patching/test_shared_store.py::test_it_records_and_routes_by_its_own_project",
        ),
        "a project that the database does not have was taken for the one it has": (
            "cli/test_wrong_project.py::test_a_project_that_a_shared_store_does_not_have_is_not_added",
            DOCTOR + "a_project_that_the_store_does_not_have_is_told",
        ),
    },
    2: {
        "two projects in one process went to the last one": (
            "patching/test_one_project.py::test_a_second_place_is_refused_and_the_first_goes_on",
            "patching/test_one_project.py::test_the_default_project_is_a_project",
            "patching/test_two_projects.py::test_each_project_gets_its_own",
        )
    },
    3: {
        "the server gave all calls to a base that nobody had tested": (
            SERVE + "a_base_learns_beside_upstream_until_it_takes_over",
        ),
        "no gate compared with upstream": (
            UPSTREAM + "a_learner_that_is_as_good_as_upstream_is_tested_beside_it",
            UPSTREAM + "one_that_is_worse_learns_on_and_is_not_compared_again",
        ),
        "nobody acted when the policy was worse than upstream": (
            "pipeline/test_control.py::test_a_champion_that_is_worse_leaves_the_calls_to_upstream",
            "pipeline/test_control.py::test_people_see_what_the_newest_look_found_and_how_soon_it_would_notice_a_loss",
            NOTES + "do_not_switch_is_told_when_the_verdict_turns",
        ),
    },
    4: {
        "the kill switch took a project that is not there": NO_SUCH_PROJECT,
        "it did not say how many apps follow": (
            CLI + "modes_are_shown",
            "cli/test_followers.py::test_who_does_not_follow_is_named",
        ),
    },
    5: {
        "when the newer of two servers ended, nobody had the route": (
            SERVE + "when_the_newer_server_ends_the_older_one_takes_the_route",
            SERVE + "of_two_servers_either_may_end_under_traffic",
        )
    },
    6: {
        "a judge that refuses everything was a success within a budget": (
            "cli/test_score.py::test_a_judge_that_refuses_every_call_is_an_error_within_any_budget",
        ),
        "so was a judge that answers prose": (BUDGET + "a_judge_that_never_answers_is_an_error_whatever_the_budget",),
        "its cause was not named when the budget ended": (BUDGET + "an_answer_that_comes_too_late_uses_up_budget",),
        "calls that fail use the budget up": (BUDGET + "what_the_judge_refuses_uses_up_no_budget",),
    },
    7: {
        "calls of tools were compared by their random ids": (POLICIES + "tool_calls_are_alike_if_they_mean_the_same",),
        "only the shown answers were counted as if they were all": (
            POLICIES + "answers_to_the_same_prompts_stand_side_by_side",
        ),
    },
    8: {
        "upstream's answers counted for the policy": (
            EVIDENCE + "what_upstream_helped_out_with_has_earned_nothing",
            EVIDENCE + "sessions_that_found_no_engine_or_no_room_leave_both_arms",
            EVIDENCE + "an_outage_lasts_until_a_policy_answers_again",
        ),
        "a test says failed where the status says fell back": Decided(
            "A test counts sessions with an error or a fallback, the status single calls.",
            "how-to/canary",
            "whether a call failed or had to be answered by upstream",
        ),
    },
    9: {"errors of usage were no JSON": (CLI + "usage_errors_as_json",)},
    10: {
        "a name that is not there had the exit code of a database that is down": (
            *NO_SUCH_POLICY,
            CLI + "errors_as_json",
            "test_architecture.py::test_errors_have_distinct_exit_codes_and_are_drawn_in_the_tree",
        ),
        "so had a rollback with nobody to go back to": (POLICIES + "a_shadow_becomes_champion_and_rollback_goes_back",),
        "a database that is down has it still": (CLI + "a_corrupt_database_is_named_and_left_as_it_is",),
    },
    11: {
        "an empty variable stopped the app": (SETTINGS + "an_empty_variable_is_unset",),
        "so did a bad one": (
            VARIABLES + "a_bad_variable_leaves_the_sdk_alone",
            VARIABLES + "a_bad_argument_is_still_raised",
            DOCTOR + "a_bad_variable_is_red_and_the_rest_is_looked_at",
        ),
    },
    12: {
        "the judge was missed only after everything was sampled": (
            "pipeline/test_first_question.py::test_a_judge_that_cannot_judge_ends_the_cycle_before_the_engine_is_asked",
            "pipeline/test_first_question.py::test_a_gate_judge_that_cannot_judge_is_found_before_the_gate_samples",
        )
    },
    13: {
        "the doctor claimed what a store that is down would tell": (
            DOCTOR + "nothing_is_claimed_of_what_a_broken_store_would_tell",
            DOCTOR + "what_the_store_would_tell_is_unknown_while_it_cannot_be_read",
        )
    },
    14: {"an export told its end hundreds of times": ("cli/test_output.py::test_the_end_of_a_stage_is_one_line",)},
    15: {
        "the scheduled job does not take all options of the training": (
            "cli/test_training_options.py::test_every_setting_is_an_option_with_its_default",
        ),
        "the documentation promised options that are not there": (
            "test_docs.py::test_bash_blocks_are_understood",
            "cli/test_option_list.py::test_no_option_changed",
        ),
    },
    16: {
        "what was not looked at was 0 %": ("cli/test_groups.py::test_a_share_is_that_of_the_runs_that_were_looked_at",)
    },
    17: {
        "the reason of a rejection contradicted itself": (
            "gate/test_gate.py::test_everything_else_is_rejected_with_the_reason",
            "gate/test_gate.py::test_a_clear_winner_is_promoted_and_it_says_what_is_proven",
        ),
        "an adapter had an empty model card": (
            "training/test_update.py::"
            "test_an_update_moves_the_policy_towards_the_better_answer_and_publishes_what_an_engine_accepts",
        ),
        "the status had no names in a web framework's JSON": (
            "patching/test_switching.py::test_the_status_has_names_as_json",
            "patching/test_two_projects.py::test_each_project_gets_its_own",
        ),
    },
}

FRICTIONS: dict[int, Parts] = {
    1: {
        "the history could not be read at 80 columns": (STATUS + "the_history_has_whole_words_at_80_columns",),
        "the status cut the ids of processes": (
            STATUS + "running_processes_are_a_line_each_at_80_columns",
            STATUS + "a_long_reason_of_a_decision_is_two_lines_at_80_columns",
        ),
        "the gate of a policy was a column of five lines": (
            POLICIES + "a_canary_is_shown_given_up_and_never_tested_again",
        ),
        "help cut the names of options": (HELP + "has_whole_names_and_no_short_lines_at_80_columns",),
    },
    2: {
        "a server told nothing": (LOGS + "a_server_tells_what_it_loads_and_what_others_decide",),
        "a breaker told nothing": (LOGS + "a_breaker_tells_once_that_it_opens_and_that_it_closes",),
        "no time, host, level and JSON": (
            LOGS + "a_cycle_tells_when_it_begins_and_ends",
            LOGS + "a_cycle_that_fails_ends_with_its_exit_code",
            LOGS + "an_unknown_word_is_a_usage_error",
        ),
        "an app's warning had neither cause nor host": (
            "_lib/test_faults.py::test_a_server_that_refuses_is_named_with_its_port",
        ),
        "the log of the job grew for ever": (CRON + "a_log_that_has_grown_large_is_kept_once_beside_the_new_one",),
    },
    3: {
        "a server had no metrics and no probes": (METRICS + "a_scrape_of_a_server_goes_on_while_the_database_is_down",),
        "alive and ready were the same": (
            METRICS + "why_a_server_is_not_ready_without_any_name",
            METRICS + "a_server_that_lacks_the_champion_is_not_ready",
        ),
        "a database that is down emptied the file": (TEXTFILE + "the_file_is_written_whole_or_not_at_all",),
        "series were missing, and dead processes had some": (TEXTFILE + "every_metric_of_a_store",),
        "counters fell": (TEXTFILE + "no_counter_falls_by_a_deletion",),
        "no alerts and no dashboard": (
            "metrics/test_monitoring_files.py::test_every_alert_fires_when_it_should",
            "metrics/test_monitoring_files.py::test_the_dashboard",
        ),
        "nobody was told of decisions": (NOTES + "each_kind_of_decision",),
    },
    4: {
        "no word on staging and production": (DEPLOY + "kustomize_renders_the_overlays",),
        "no file of variables was read": (SETTINGS + "an_env_file_gives_what_is_not_set",),
        "apps and other commands say nothing of a misspelt variable": Decided(
            "It may be another program's, and an app's log is no place for a guess.",
            "explanation/app-process",
            "A variable whose name is misspelt is not ours to judge in your app; `art-patch doctor` names it",
        ),
        "the doctor says what a misspelt variable may mean": (DOCTOR + "variables_that_nobody_reads_are_said",),
        "no list of settings with their origins": (
            "cli/test_config.py::test_every_setting_has_its_origin_and_no_secret_is_shown",
        ),
        "a policy could not be carried from staging to production": (
            "cli/test_policy_import.py::test_a_policy_comes_with_its_evidence_and_serves_nobody",
        ),
        "the database's password stood in a variable": (
            "store/test_password_file.py::test_the_password_is_read_from_a_file",
        ),
        "no secrets from files": (
            DEPLOY + "a_secret_is_taken_whatever_its_mode",
            DEPLOY + "what_the_pods_name_is_there",
        ),
    },
    5: {
        "a policy did not say where it comes from": (LINEAGE + "a_policy_says_where_it_comes_from",),
        "neither did its manifest": (
            "pipeline/test_lineage.py::test_a_manifest_says_how_its_policy_was_made_and_names_no_run",
        ),
        "nothing could be made again": ("cli/test_reproduce.py::test_two_policies_are_equal_in_new_processes",),
    },
    6: {
        "looking at a test decided it": (
            "cli/test_watch.py::test_one_look_tells_what_goes_on_and_what_came_of_it",
            "cli/test_watch.py::test_a_server_looks_after_a_canary_by_itself",
        )
    },
    7: {
        "a rollback named nobody, had no dry run and no warning": (POLICIES + "one_goes_back_to_whom_one_names",),
        "a retired policy served untested and could not be tested": (
            POLICIES + "what_was_retired_is_tested_again_and_never_serves_untested",
        ),
    },
    8: {
        "several agents in one app had no recipe": (
            "test_docs.py::test_python_blocks_run",
            "patching/test_two_projects.py::test_each_project_gets_its_own",
        ),
        "agents of one project share a policy": Decided(
            "A project is what learns together.",
            "how-to/choose-calls",
            "All agents of one project share its policy, so give an agent that should learn alone a project.",
        ),
        "each project needs a server": Decided(
            "One engine that serves several projects would have to know the keys and limits of each.",
            "how-to/choose-calls",
            "A server serves one project: projects on the same base model hold it in memory once each.",
        ),
    },
    9: {
        "the readme was one long page": ("test_docs.py::test_the_readme_is_short",),
        "the way into production was scattered": ("test_day_one.py::test_each_step_does_what_the_page_says",),
    },
    10: {
        "a list showed no user and no session": (RUNS + "a_list_fits_the_terminal",),
        "no search for text, tool, error, model or latency": (
            RUNS + "runs_are_found_by_their_text",
            "store/test_browse.py::test_filters",
        ),
        "the worst could not be listed": (RUNS + "the_worst_come_first_and_what_they_are_sorted_by_is_shown",),
        "nothing by day and by task": (
            "cli/test_series.py::test_days_tell_who_answered_how_well_and_what_was_spent",
            "cli/test_series.py::test_scenarios_tell_what_the_newest_candidate_won",
        ),
        "no list by user or size of group": Decided(
            "Conditions and the commands for groups answer what such a list is for.",
            "how-to/find-runs",
            "so a user is compared with others by `--user`. Runs by day are in `art-patch days`, and by task in "
            "`art-patch scenarios`. Groups are not listed by size",
        ),
    },
    11: {
        "the doctor was yellow for what the judge needs": (
            DOCTOR + "bypasses_and_patchers_are_those_that_are_installed",
        )
    },
    12: {
        "the job's pod had the home of the machine that printed it": (
            CRON + "what_is_printed_can_be_piped",
            DEPLOY + "the_job_is_the_one_that_the_command_prints",
        ),
        "no manifests for server, volume and secret": (
            DEPLOY + "kubernetes_understands_the_base",
            DEPLOY + "what_the_pods_name_is_there",
        ),
        "the image's name": (CRON + "what_is_printed_can_be_piped",),
        "a machine without cron": (CRON + "a_machine_without_cron_is_told_so",),
    },
    13: {"a bad name of a project was answered by a pattern": (SETTINGS + "a_bad_name_of_a_project_is_told_in_words",)},
    14: {
        "a backup on PostgreSQL names its line": (
            "store/test_maintain.py::test_postgres_is_backed_up_by_its_own_tool",
        ),
        "nobody said that adapters need a backup": Decided(
            "They are files of any size, which the operator's own backup of files copies.",
            "how-to/day-one-to-production",
            "**Back up** the directory `adapters` of the project, too",
        ),
    },
    15: {
        "help broke docstrings twice": (HELP + "has_whole_names_and_no_short_lines_at_80_columns",),
        "help listed the commands without sections": (HELP + "shows_the_commands_in_sections",),
    },
    16: {
        "a port that is taken": (CLI + "a_port_in_use_is_named",),
        "recipes for a second server on another port": ("test_docs.py::test_bash_blocks_are_understood",),
    },
    17: {
        "decisions ask for no confirmation": Decided(
            "They can be taken back, and in an incident or a script a question does harm.",
            "how-to/canary",
            "They ask for no confirmation, because a question costs time in an incident and stops a script",
        ),
        "they can be tried without effect": (
            CLI + "a_dry_run_of_a_mode_changes_nothing",
            POLICIES + "an_unknown_policy_is_refused_before_an_engine_is_asked_for",
            POLICIES + "one_goes_back_to_whom_one_names",
        ),
    },
}

BAD_INPUTS: Parts = {
    "the mode of a project that is not there": NO_SUCH_PROJECT,
    "runs of a policy that is not there": (RUNS + "mistakes_are_one_line",),
    "runs of a user who is not there": Decided(
        "A search that finds nothing has been answered.",
        "how-to/find-runs",
        "A list that finds nothing is no error: it says how many runs there are.",
    ),
    "a budget and a judge that is broken": DEFECTS[6]["a judge that refuses everything was a success within a budget"],
    "names with the exit code of the store": NO_SUCH_POLICY,
    "errors of usage with --json": DEFECTS[9]["errors of usage were no JSON"],
}

PROOFS = {
    f"{kind} {number}: {part}": proof
    for kind, findings in (("defect", DEFECTS), ("friction", FRICTIONS))
    for number, parts in findings.items()
    for part, proof in parts.items()
} | {f"bad input: {part}": proof for part, proof in BAD_INPUTS.items()}


@cache
def defined_in(file: str) -> frozenset[str]:
    """The names of the test functions of a file."""
    tree = ast.parse((ROOT / "tests" / file).read_text())
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


@pytest.mark.parametrize("findings", [DEFECTS, FRICTIONS], ids=["defects", "frictions"])
def test_every_finding_has_an_entry(findings: dict[int, Parts]):
    assert list(findings) == list(range(1, 18))
    assert all(findings.values())


@pytest.mark.parametrize("finding", PROOFS)
def test_it_cannot_come_back_unnoticed(finding: str):
    proof = PROOFS[finding]
    if isinstance(proof, Decided):
        page = " ".join((ROOT / f"docs/pages/{proof.page}.md").read_text().split())
        assert proof.why and proof.words in page
        return
    assert proof
    assert [each for each in proof if each.partition("::")[2] not in defined_in(each.partition("::")[0])] == []
