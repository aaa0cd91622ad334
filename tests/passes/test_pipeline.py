"""The graph after every pass, and the programs run by hand, equal eager: loss and every gradient."""

from __future__ import annotations

import pytest
import torch

from disagmoe_compile.passes.base import PassReport
from disagmoe_compile.passes.pipeline import partition_model
from disagmoe_compile.passes.program import InputKind
from disagmoe_compile.passes.programs import without_outputs
from disagmoe_compile.testing.graphs import loss_and_gradients, relative_error, worst_error
from disagmoe_compile.testing.programs import run_programs

MODELS = [("qwen3_moe", 3), ("gpt_oss", 2)]


@pytest.mark.parametrize(("family", "n_layers"), MODELS)
def test_graph_after_every_pass_equals_eager(captured_family, family, n_layers):
    captured = captured_family(family, n_layers)
    errors = {}

    def observe(index: int, name: str, graph_module: torch.fx.GraphModule, report: PassReport) -> None:
        loss, gradients = loss_and_gradients(graph_module, captured.args, captured.loss_position)
        errors[name] = max(relative_error(loss, captured.loss), worst_error(gradients, captured.gradients))

    partition_model(captured.graph, observers=[observe])
    assert len(errors) == 11
    assert max(errors.values()) < 1e-5, errors


@pytest.mark.parametrize("n_microbatches", [1, 2])
@pytest.mark.parametrize(("family", "n_layers"), MODELS)
def test_programs_run_by_hand_equal_eager(captured_family, family, n_layers, n_microbatches):
    captured = captured_family(family, n_layers)
    programs = captured.partition.programs

    def run(*args):
        return run_programs(captured.graph, programs, args, n_microbatches)

    loss, gradients = loss_and_gradients(run, captured.args, 0)
    assert relative_error(loss, captured.loss) < 1e-5
    assert worst_error(gradients, captured.gradients) < 1e-5


@pytest.mark.parametrize("n_microbatches", [1, 2])
def test_model_outputs_of_microbatches_are_slices_of_eager_outputs(captured_family, n_microbatches):
    captured = captured_family("qwen3_moe", 3)
    programs = captured.partition.programs
    eager = captured.graph.graph_module(*captured.args)
    _, outputs = run_programs(captured.graph, programs, captured.args, n_microbatches)
    with_samples = [o for o in programs.outputs if o.batch_dim == 0]
    assert len(with_samples) == len(eager) - 1
    for output in with_samples:
        whole = torch.cat([found[output.index] for found in outputs])
        assert relative_error(whole, eager[output.index]) < 1e-5


def test_wrong_expert_function_is_noticed(captured_family):
    """Negative control of the comparisons above: a routing weight without a gradient changes the router's."""
    captured = captured_family("qwen3_moe", 3)
    programs = partition_model(captured.graph).programs
    function = programs.experts[0].function
    weight = [node for node in function.graph.nodes if node.op == "placeholder"][1]
    with function.graph.inserting_after(weight):
        weight.replace_all_uses_with(detached := function.graph.call_method("detach", (weight,)))
        detached.args = (weight,)
    function.recompile()
    _, gradients = loss_and_gradients(
        lambda *args: run_programs(captured.graph, programs, args, 1), captured.args, 0
    )
    assert worst_error(gradients, captured.gradients) > 1e-2


def test_equal_layers_have_equal_code(captured_family):
    programs = captured_family("qwen3_moe", 3).partition.programs
    assert programs.attention[1].module.code == programs.attention[2].module.code
    assert len({program.module.code for program in programs.attention}) == 3
    assert len({experts.function.code for experts in programs.experts}) == 1


def test_stages_hold_only_their_own_parameters(captured_family):
    programs = captured_family("qwen3_moe", 3).partition.programs
    attention = [{i.name for i in p.inputs if i.kind is InputKind.PARAMETER} for p in programs.attention]
    experts = [{i.name for i in p.params} for p in programs.experts]
    for boundary, names in enumerate(experts):
        prefix = f"model.layers.{boundary}.mlp.experts."
        assert names == {prefix + "gate_up_proj", prefix + "down_proj"}
    assert not any(".experts." in name for names in attention for name in names)
    assert attention[0] & attention[1] == set()
    assert [p.layers for p in programs.attention] == [(0,), (1,), (2,), ()]


def test_experts_program_describes_its_interface(captured_family):
    experts = captured_family("qwen3_moe", 3).partition.programs.experts[0]
    assert (experts.num_experts, experts.top_k, experts.style) == (8, 2, "grouped_mm")
    assert (experts.in_features, experts.out_features) == (64, 64)
    assert all(param.shape[0] == 8 and param.requires_grad for param in experts.params)
    rows = experts.function(torch.randn(0, 64), torch.randn(0), torch.randn(64, 64), torch.randn(64, 32))
    assert rows.shape == (0, 64)


def test_expert_biases_become_parameters_of_the_expert_function(captured_family):
    experts = captured_family("gpt_oss").partition.programs.experts[0]
    names = [param.name.rpartition(".")[2] for param in experts.params]
    assert sorted(names) == ["down_proj", "down_proj_bias", "gate_up_proj", "gate_up_proj_bias"]


def test_training_program_keeps_the_loss_and_drops_the_outputs(captured_family):
    captured = captured_family("qwen3_moe", 3)
    programs = captured.partition.programs
    head = without_outputs(programs.attention[-1])
    assert head.model_outputs == {} and head.loss_numerators == (0,) and len(head.outputs) == 1
    first = without_outputs(programs.attention[0])
    assert len(first.outputs) == 5 and first.carried == (4,)
    assert len(first.module.graph.nodes) < len(programs.attention[0].module.graph.nodes)


def test_loss_is_cross_entropy_sum_over_valid_labels(captured_family):
    captured = captured_family("qwen3_moe", 3)
    loss = captured.partition.programs.loss
    assert loss is not None and loss.coefficients == (1.0,)
    (denominator,) = loss.denominators(*(captured.args[i.position] for i in loss.inputs))
    labels = next(a for i, a in zip(captured.graph.inputs, captured.args) if "labels" in i.name and i.dtype)
    assert denominator == (labels[:, 1:] != -100).sum()


def test_partition_leaves_the_captured_graph_as_it_was(captured_family):
    captured = captured_family("gpt_oss")
    before = captured.graph.graph_module.code
    again = partition_model(captured.graph)
    assert captured.graph.graph_module.code == before
    assert again.fingerprint == captured.partition.fingerprint


def test_language_model_couples_no_samples(captured_family):
    assert captured_family("qwen3_moe", 3).partition.batch_coupled == ()


@pytest.mark.parametrize("family", ["deepseek_v3"])
def test_other_families_equal_eager(captured_family, family):
    check_family(captured_family(family))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mixtral", "olmoe", "glm4_moe", "minimax", "ernie4_5_moe", "qwen2_moe"])
def test_more_families_equal_eager(captured_family, family):
    check_family(captured_family(family))


def check_family(captured) -> None:
    programs = captured.partition.programs
    assert programs.n_boundaries == 2
    loss, gradients = loss_and_gradients(
        lambda *args: run_programs(captured.graph, programs, args, 2), captured.args, 0
    )
    assert relative_error(loss, captured.loss) < 1e-5
    assert worst_error(gradients, captured.gradients) < 1e-5
