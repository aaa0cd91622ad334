"""What went wrong for users of other systems, by their public reports, and the tests that hold it right here.

Each line: the report, what went wrong there, and where the whole kind of fault is tested. A test that is dropped without
a successor fails here.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

HERE = Path(__file__).parent


class Scenario(NamedTuple):
    reports: str
    fault: str
    tests: tuple[str, ...]


SCENARIOS = [
    Scenario(
        "NVIDIA/Megatron-LM#4851",
        "a rank without tokens skips its graph and the others hang in backward",
        (
            "backend/training_scripts.py::all_tokens_to_the_same_experts",
            "runtime/test_routing.py::test_a_rank_without_tokens_gets_empty_routes_and_returns_nothing",
            "backend/test_separate_experts.py::test_an_expert_without_tokens_has_a_gradient_of_zeros",
        ),
    ),
    Scenario(
        "pytorch/pytorch#126600",
        "a last, smaller micro-batch reuses the shape of the others",
        ("backend/test_uneven_batches.py::test_loss_and_gradients_equal_eager",),
    ),
    Scenario(
        "pytorch/torchtitan#775",
        "fewer micro-batches than stages, or than samples, hang",
        (
            "backend/test_ranks.py::test_losses_gradients_and_parameters_equal_eager",
            "backend/test_uneven_batches.py::test_a_rank_without_samples_has_zeros_where_the_others_have_gradients",
        ),
    ),
    Scenario(
        "pytorch/torchtitan#2972",
        "gradients scaled by micro-batches where these have unequal numbers of valid labels",
        (
            "backend/test_virtual_ranks.py::test_loss_and_gradients_equal_eager",
            "passes/test_loss_terms.py::test_mean_of_microbatch_means_would_be_wrong",
        ),
    ),
    Scenario(
        "huggingface/transformers#35438",
        "accumulation over several backward calls doubles the loss",
        (
            "backend/training_scripts.py::accumulation",
            "backend/test_semantics.py::test_evaluation_new_shapes_accumulation_and_clipping_equal_eager",
        ),
    ),
    Scenario(
        "pytorch/torchtitan#596",
        "clipping sees the norm of one stage",
        (
            "runtime/test_optimizer.py::test_clipping_by_the_global_norm_equals_eager",
            "runtime/test_optimizer.py::test_clipping_by_a_rank_s_own_norm_is_refused_also_where_it_would_clip_nothing",
        ),
    ),
    Scenario(
        "pytorch/pytorch#51931, uw-syfi/piper#13",
        "tied weights drift apart between stages",
        (
            "backend/training_scripts.py::tied_embeddings",
            "runtime/test_binding.py::test_a_tied_parameter_is_bound_once",
            "plan/test_validate.py::test_a_tied_parameter_is_reduced_after_the_gradient_of_the_head",
        ),
    ),
    Scenario(
        "databricks/megablocks#85, pytorch/torchtitan#3000",
        "a load-balancing loss depends on micro-batches, silently",
        ("backend/test_slice_oracle.py::test_what_mixes_samples_is_named_and_equals_eager_on_each_slice",),
    ),
    Scenario(
        "huggingface/transformers#31464, huggingface/transformers#28255",
        "an auxiliary loss with padded samples",
        (
            "backend/test_slice_oracle.py::"
            "test_with_padding_a_routers_loss_is_that_of_each_slice_and_cross_entropy_that_of_the_batch",
        ),
    ),
    Scenario(
        "huggingface/transformers#45120",
        "a router's arithmetic is 'corrected' instead of reproduced",
        (
            "testing/test_family_check.py::test_a_kind_of_family_equals_eager",
            "testing/test_family_check.py::test_a_family_is_as_its_docs_say",
        ),
    ),
    Scenario(
        "pytorch/torchtitan#1593, pytorch/torchtitan#1304",
        "token counters count twice under recompute, or move once a micro-batch",
        (
            "backend/test_buffer_sums.py::test_a_checkpointed_layer_counts_its_tokens_once",
            "backend/test_buffer_sums.py::test_buffers_loss_and_gradients_equal_eager",
        ),
    ),
    Scenario(
        "NVIDIA-NeMo/Automodel#3140, NVIDIA-NeMo/RL#1203, pytorch/torchtitan#1117",
        "a second forward routes ties elsewhere",
        (
            "backend/test_recompute.py::test_a_second_forward_draws_the_same_masks_and_routes_ties_the_same_way",
        ),
    ),
    Scenario(
        "pytorch/torchtitan#1323, pytorch/pytorch#14253",
        "dropout draws another mask in the second forward",
        (
            "backend/test_recompute.py::test_other_masks_in_the_second_forward_are_noticed",
            "backend/test_dropout.py::test_reruns_of_one_call_are_bitwise_equal",
        ),
    ),
    Scenario(
        "huggingface/transformers#30945",
        "autocast and compilation disagree about dtypes; a gradient scaler skips on one rank alone",
        (
            "backend/training_scripts.py::gradient_scaler_with_an_overflow",
            "backend/test_precision.py::test_the_first_step_is_that_of_eager_in_the_same_precision",
            "runtime/test_optimizer.py::test_an_overflow_on_one_rank_makes_every_grad_scaler_skip",
        ),
    ),
    Scenario(
        "PrimeIntellect-ai/prime-rl#996",
        "`.tolist()` in a loop over experts breaks the graph",
        (
            "backend/test_watched_call.py::test_as_one_graph_the_error_names_the_line_and_the_change",
            "backend/test_watched_call.py::test_several_ranks_refuse_a_break_without_being_asked_for_one_graph",
        ),
    ),
    Scenario(
        "huggingface/transformers#30793",
        "selecting tokens by `torch.where` needs sizes that only data tells, or recompiles without end",
        (
            "testing/test_family_check.py::test_a_kind_of_family_equals_eager",
            "backend/training_scripts.py::twenty_shapes",
            "runtime/test_retrace.py::test_a_missing_guard_is_an_error_not_a_recompilation_at_every_call",
        ),
    ),
    Scenario(
        "vllm-project/vllm#38958, pytorch/pytorch#179839",
        "a size, or a constant, crosses the cut between two parts of a graph",
        ("backend/test_captured_modes.py::test_sizes_read_before_the_experts_are_right_after_them",),
    ),
    Scenario(
        "pytorch/pytorch#152938",
        "gloo drops the handles of batched sends and deadlocks",
        ("backend/test_ranks.py::test_losses_gradients_and_parameters_equal_eager",),
    ),
    Scenario(
        "pytorch/pytorch#172668",
        "both ranks block in a large send",
        ("runtime/test_transport.py::test_large_messages_both_ways_at_once_arrive",),
    ),
    Scenario(
        "deepspeedai/DeepSpeed#5696",
        "a second batch of another length uses the shape of the first",
        (
            "runtime/test_retrace.py::test_eval_no_grad_and_new_shapes_are_traced_at_global_shapes_and_stay_exact",
            "backend/test_semantics.py::test_evaluation_new_shapes_accumulation_and_clipping_equal_eager",
        ),
    ),
    Scenario(
        "deepspeedai/DeepSpeed#5729",
        "outputs are compared with the labels of other samples",
        (
            "backend/test_uneven_batches.py::test_loss_and_gradients_equal_eager",
            "backend/test_uneven_batches.py::test_samples_in_the_place_of_others_fail_parity",
        ),
    ),
    Scenario(
        "pytorch/torchtitan#1723, pytorch/torchtitan#4098",
        "masks are cut wrongly, packed documents see each other",
        (
            "backend/test_captured_modes.py::test_every_way_of_calling_equals_eager",
            "backend/test_captured_modes.py::test_a_mask_with_the_batch_size_for_a_length_is_told_by_its_use",
            "backend/test_packed_batches.py::"
            "test_boundaries_counted_over_the_whole_batch_are_refused_by_name_and_line",
        ),
    ),
    Scenario(
        "pytorch/pytorch#98487",
        "the graph stays in training mode",
        (
            "backend/test_dropout.py::test_evaluation_between_steps_switches_dropout_off_and_training_on_again",
        ),
    ),
    Scenario(
        "pytorch/pytorch#114189",
        "a backend is not asked for the backward",
        (
            "passes/test_step_graph.py::test_forward_and_mirrored_transfers_are_both_there",
            "backend/test_ranks.py::test_ranks_execute_the_actions_of_the_plan",
        ),
    ),
    Scenario(
        "pytorch/pytorch#101107, karpathy/nanoGPT#325",
        "saved names begin with `_orig_mod.`",
        (
            "backend/training_scripts.py::whole_model_on_rank_0",
            "backend/test_semantics.py::test_the_state_dict_has_the_models_names_and_shapes_on_every_rank",
        ),
    ),
    Scenario(
        "vllm-project/vllm#52435",
        "experts do not divide by ranks, or are fewer",
        (
            "runtime/test_binding.py::test_experts_that_do_not_divide_evenly_are_split_by_the_plan_s_rule",
            "backend/test_virtual_ranks.py::test_more_ffn_ranks_than_experts_are_one_clear_error",
            "cli/test_train_checks.py::test_more_ffn_ranks_than_experts_are_refused",
        ),
    ),
    Scenario(
        "databricks/megablocks#113, ScienceOne-AI/DeepSeek-671B-SFT-Guide#7",
        "layers without experts, shared experts",
        ("testing/test_family_check.py::test_a_kind_of_family_equals_eager",),
    ),
    Scenario(
        "NVIDIA/Megatron-LM#1603, huggingface/transformers#43362",
        "sums in another order at every run",
        ("backend/test_ranks.py::test_two_runs_are_bitwise_equal_with_dropout_that_does_something",),
    ),
    Scenario(
        "pytorch/pytorch#126510, pytorch/pytorch#104136",
        "a port in use hangs, or is a page of traceback",
        (
            "runtime/test_process_group.py::test_a_port_in_use_is_one_clear_error",
            "cli/test_train_command.py::test_a_port_in_use_is_one_line_and_nothing_starts",
        ),
    ),
    Scenario(
        "NVIDIA/nccl#395, sgl-project/sglang#21486",
        "a dead rank hangs the others",
        (
            "backend/test_semantics.py::test_a_rank_killed_in_the_middle_of_a_step_is_named_by_the_others",
            "runtime/test_faults.py::test_every_other_rank_ends_and_names_the_culprit_at_any_action",
        ),
    ),
    Scenario(
        "Pyomo/pyomo#2774, Pyomo/pyomo#3286",
        "a missing solver is an obscure error",
        (
            "planner/test_allocation.py::test_a_missing_solver_says_what_to_install",
            "cli/test_cli_plan_model.py::test_no_solver_says_what_to_install",
        ),
    ),
    Scenario(
        "ERGO-Code/HiGHS#1721, ERGO-Code/HiGHS#3034, jump-dev/HiGHS.jl#104",
        "badly scaled coefficients give an optimum that is none",
        (
            "planner/test_allocation.py::test_what_the_solver_misses_by_its_tolerance_is_corrected",
            "planner/test_allocation.py::test_equals_enumeration_ties_included",
            "planner/test_size.py::test_a_solver_that_keeps_claiming_what_does_not_hold_is_an_error",
        ),
    ),
    Scenario(
        "NVIDIA/nccl-tests#130",
        "the bandwidth of an all-to-all is misread by the share that stays",
        ("simulator/test_systems.py::test_an_all_to_all_keeps_the_share_of_the_own_rank",),
    ),
]


@cache
def functions_of(path: str) -> frozenset[str]:
    tree = ast.parse((HERE / path).read_text())
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda one: one.reports.split(",")[0])
def test_every_reported_fault_has_its_tests(scenario):
    for test in scenario.tests:
        path, name = test.split("::")
        assert name in functions_of(path), test
