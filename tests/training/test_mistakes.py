"""The mistakes that are looked for in a GRPO trainer, and the tests that show that ours makes none of them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]

ABSENT: dict[int, tuple[str, tuple[str, ...]]] = {
    1: (
        "Nothing is tokenised again: recorded ids are trained bit for bit, or not at all.",
        (
            "training/test_rows.py::test_nothing_is_tokenised_again",
            "training/test_rows.py::test_every_sampled_token_is_in_exactly_one_row_after_exactly_what_it_was_sampled_after",
            "training/test_rows.py::test_what_is_not_exact_is_left_out_and_counted_whatever_the_record_says",
        ),
    ),
    2: (
        "Tokens of prompts, tools and templates are never a target; sampled ones, ends of turns too, always are.",
        (
            "training/test_scoring.py::test_a_prompt_or_tool_token_is_never_a_target_and_a_sampled_one_always_is",
            "training/test_gradients.py::test_a_prompt_or_tool_token_is_never_a_target_and_a_sampled_one_always_is",
            "training/test_packing.py::test_what_is_scored_is_what_was_sampled",
            "training/test_demonstrations.py::test_each_answer_of_a_run_is_learned_once_with_its_end_but_not_the_newline_after_it",
        ),
    ),
    3: (
        "A token is predicted from the one before it, and a first token that siblings share counts once for each.",
        (
            "training/test_scoring.py::test_packed_is_as_one_by_one",
            "training/test_packing.py::test_siblings_that_begin_alike_are_predicted_from_one_place_and_both_count",
            "training/test_scoring.py::test_identical_twins_both_count",
        ),
    ),
    4: (
        "What turns and siblings share is computed once, and each sampled token is trained once.",
        (
            "training/test_gradients.py::test_turns_apart_have_the_gradient_of_the_conversation",
            "training/test_rows.py::test_a_conversation_that_extends_itself_is_one_row_and_each_sampled_token_is_in_it_once",
            "training/test_packing.py::test_each_distinct_token_that_is_needed_is_computed_once_and_no_other",
            "training/test_tree.py::test_each_distinct_prefix_is_computed_once",
        ),
    ),
    5: (
        "Siblings that share a prefix do not see each other.",
        (
            "training/test_scoring.py::test_siblings_do_not_see_each_other",
            "training/test_scoring.py::test_packed_is_as_one_by_one",
            "training/test_attention.py::test_of_any_tree",
            "training/test_tree.py::test_a_token_sees_what_is_before_it_in_its_rows_and_nothing_else",
        ),
    ),
    6: (
        "Micro-batches, processes and order change no gradient; a long answer weighs what its loss says.",
        (
            "training/test_gradients.py::test_micro_batches_and_the_order_of_groups_change_no_gradient",
            "training/test_gradients.py::test_any_cut_of_any_order_gives_one_gradient",
            "training/test_gradients.py::test_what_processes_compute_adds_up",
            "training/test_loss.py::test_each_loss_by_hand",
            "training/test_loss_trl.py::test_every_loss_and_gradient_is_trls",
        ),
    ),
    7: (
        "Rewards that are equal, alone or missing give an advantage of exactly 0 and move no sibling's.",
        (
            "training/test_advantages.py::test_advantages_are_the_z_score_with_ddof_1",
            "training/test_advantages.py::test_what_has_no_spread_teaches_nothing",
            "training/test_advantages.py::test_equal_rewards_are_no_group",
            "training/test_advantages.py::test_an_unscored_sibling_has_no_advantage_and_does_not_move_the_others",
        ),
    ),
    8: (
        "A group that teaches nothing costs no token and changes no bit; of such groups alone no policy is made.",
        (
            "training/test_update.py::test_a_group_that_teaches_nothing_changes_no_bit_and_costs_no_token",
            "training/test_update.py::test_with_nothing_to_learn_nothing_is_published",
            "pipeline/test_cycle.py::test_equal_scores_teach_nothing",
        ),
    ),
    9: (
        "Answers that were cut off may be left out: exactly their tokens, and only what is trained is compared.",
        (
            "training/test_rows.py::test_exactly_the_tokens_of_answers_that_were_cut_off_are_not_trained",
            "training/test_rows.py::test_an_answer_that_was_cut_off_is_context_if_it_is_not_to_be_learned",
            "pipeline/test_train_metrics.py::test_what_was_cut_off_is_not_trained_and_only_what_is_trained_is_compared",
        ),
    ),
    10: (
        "Before the first step the trainer computes what the server recorded; runs that are too old are left out.",
        (
            "pipeline/test_cycle.py::test_a_cycle_trains_gates_and_promotes_and_the_next_goes_on_from_there",
            "support/engine_contract.py::test_logprobs_are_those_that_a_trainer_computes",
            "training/test_loading.py::test_it_computes_what_transformers_and_peft_compute",
            "training/test_loss.py::test_each_token_has_an_importance_weight_of_its_own_and_at_most_the_cap",
            "training/test_update.py::test_data_of_a_far_policy_is_refused_before_the_first_step",
            "pipeline/test_train_metrics.py::test_what_is_not_exact_or_too_old_is_counted_by_reason",
            "trajectories/test_trainability.py::test_reason",
        ),
    ),
    11: (
        "Importance weights are a token's own: rounding costs a long trajectory nothing.",
        (
            "training/test_loss_properties.py::test_rounding_between_server_and_trainer_costs_long_trajectories_nothing",
            "training/test_loss.py::test_each_token_has_an_importance_weight_of_its_own_and_at_most_the_cap",
        ),
    ),
    12: (
        "An update that goes on has its moments, a new one has none; references are the base; what is saved serves.",
        (
            "training/test_resume.py::test_an_update_that_is_killed_five_times_gives_the_same_weights",
            "training/test_resume.py::test_phases_go_on_where_they_stopped",
            "training/test_learner.py::test_a_phase_begins_without_the_moments_of_the_one_before",
            "training/test_learner.py::test_an_update_of_a_parent_begins_without_the_parents_moments",
            "training/test_loading.py::test_another_policy_computes_meanwhile_and_leaves_nothing_behind",
            "training/test_update.py::test_the_reference_is_the_policy_that_was_asked_for",
            "training/test_families.py::test_an_adapter_that_is_read_back_computes_the_same_and_serving_takes_it",
            "training/test_update.py::test_the_canary_is_what_a_plain_forward_says",
        ),
    ),
    13: (
        "History that a template rewrote forks into rows; each answer is trained as it was sampled; forks are counted.",
        (
            "training/test_rows.py::test_a_template_that_strips_thinking_forks_and_each_answer_is_trained_in_the_context_it_was_sampled_in",
            "training/test_rows.py::test_a_rewritten_history_starts_a_row_of_its_own",
            "training/test_round_trip.py::test_thinking_that_is_stripped_from_history_is_told_from_other_rewriting",
        ),
    ),
    14: (
        "Dropout is off whatever configs say; gradients are clipped once a step, after all micro-batches.",
        (
            "training/test_loading.py::test_dropout_is_off_whatever_the_parent_and_the_base_say",
            "training/test_learner.py::test_gradients_are_scaled_down_once_a_step_after_all_micro_batches",
        ),
    ),
    15: (
        "Log-probabilities that are not finite are dropped and counted; if a step is not, nothing is published.",
        (
            "training/test_loss_properties.py::test_absurd_log_probabilities_give_a_finite_loss_and_a_finite_gradient_in_fp32",
            "training/test_loss_properties.py::test_a_token_that_is_not_finite_is_as_if_it_were_not_there_and_has_no_gradient",
            "training/test_update.py::test_a_step_that_is_not_finite_drops_the_update",
        ),
    ),
}
"""By number: what is absent, and the tests that show it, as `FILE::TEST` below `tests`."""


def names_in(file: str) -> set[str]:
    return {
        node.name
        for node in ast.walk(ast.parse((TESTS / file).read_text()))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


@pytest.mark.parametrize("number", range(1, 16))
def test_a_mistake_is_shown_to_be_absent_by_tests_that_exist(number: int):
    said, tests = ABSENT[number]
    assert said.endswith(".") and tests
    for test in tests:
        file, _, name = test.partition("::")
        assert name in names_in(file), test


def test_no_other_mistake_is_named():
    assert sorted(ABSENT) == list(range(1, 16))
