"""The steps of a cycle, which `cycle.py` calls in order. Each reads from the store, calls a pure folder, and writes.

Only this folder uses both the store and the pure folders (grouping, rewards, training, gate, promotion).
"""

from art_patch._lib.lazy import TYPE_CHECKING, lazily

if TYPE_CHECKING:
    from art_patch.pipeline.against_upstream import standing, what_is_missing
    from art_patch.pipeline.base_check import check_base, require_known, untrained
    from art_patch.pipeline.carry_over import forget_unfinished
    from art_patch.pipeline.cycle import prune, retrain
    from art_patch.pipeline.cycle_run import (
        LAST_RETRAIN, LONG, CycleConfig, CycleReport, Run, keep_last_retrain, last_retrain, metrics_line,
        why_none_serves,
    )
    from art_patch.pipeline.lineage import TOLERANCE, Reproduction, reproduce
    from art_patch.pipeline.manual_moves import (
        Imported, Promoted, Rejected, RolledBack, find_engine, fork_policy, import_policy, promote_named, read_to_fork,
        reject_named, require_policy_to_copy, roll_back,
    )
    from art_patch.pipeline.promote_policy import (
        WatchOutcome, WatchReport, control_once, look_without_acting, watch, watch_once,
    )
    from art_patch.pipeline.running_cycle import RUNNING, project_lock, read_running
    from art_patch.pipeline.score_groups import form, group, score, to_judge
    from art_patch.pipeline.serving_upkeep import DecisionLog, ServingUpkeep
    from art_patch.pipeline.single_steps import evaluate, run_explicit_update, run_file_update
    from art_patch.pipeline.taught import TeacherJudge
    from art_patch.pipeline.train_files import FileTraining, train_on_files
else:
    __getattr__ = lazily()
