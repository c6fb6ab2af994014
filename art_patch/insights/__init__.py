"""What commands and pages tell about a project; a value that is not known is `None`, never zero.

Pure reports on the traffic of a period: `switch_advice` (is it worth switching from upstream to the champion, and what
does it save?) and `analytics` (do runs succeed?). Read from a project's store and directory: `standing` (what it looks
like now, and its settings), `cycle_history` (what its cycles did) and `policy_story` (what became of a policy), in the
words of `policy_words`. About runs: `run_list` (which runs a person means), `run_story` (a run or a group as a person
reads it) and `erasing` (erases a person's runs, and says what is left to do).
"""

from art_patch._lib.lazy import TYPE_CHECKING, lazily

if TYPE_CHECKING:
    from art_patch.insights.analytics import Analytics, analyse
    from art_patch.insights.cycle_history import (
        JOB_LOG, cycle_ids, cycle_report, cycle_reports, job_log, job_log_tail, waits_for,
    )
    from art_patch.insights.erasing import ErasureReport, erase
    from art_patch.insights.policy_story import (
        NOT_ON_RECORD, PolicyStory, canary_config, own_rewards, percent_of, running_test, story_of,
    )
    from art_patch.insights.policy_words import (
        canary_in_words, gate_in_words, promoted_in_words, rejected_there, rolled_back_in_words, signal_value,
        time_left, time_left_in_words, worse_in_words,
    )
    from art_patch.insights.run_list import (
        ORIGINS, RunsPage, RunsWanted, newest_of, policy_is_known, run_filter, runs_page, the_run,
    )
    from art_patch.insights.run_story import (
        STATES, WAYS, Step, best_first, content_words, group_facts, logprob_mean, pairs_of, said_before,
        state_in_words, steps_of, tool_call_parts, tool_call_words, tool_calls_of, tool_name, way_in_words, words_of,
    )
    from art_patch.insights.standing import APPS_SEEN_S, engines, project_status, settings_in_force, who_serves
    from art_patch.insights.switch_advice import Prices, Report, count_money, make_report
else:
    __getattr__ = lazily()
