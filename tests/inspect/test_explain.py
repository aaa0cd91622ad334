"""`dm.explain`: stages, transfers and experts of real and hand-written models; breaks with their lines; no
side effects.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from disagmoe_compile.errors import InputError
from disagmoe_compile.inspect.diff import DiffRecorder
from disagmoe_compile.inspect.dump import GraphDumper
from disagmoe_compile.inspect.explain import Explanation, explain, explain_with


@pytest.fixture(scope="module")
def explained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Explanation, DiffRecorder, Path]:
    pytest.importorskip("transformers")
    from disagmoe_compile.models.source import load_source

    source = load_source("hf:qwen3_moe")
    folder, diffs = tmp_path_factory.mktemp("dumps"), DiffRecorder()
    found = explain_with((diffs, GraphDumper(folder)), source.model, *source.args, **source.kwargs)
    assert all(p.grad is None for p in source.model.parameters()), "explaining computes no gradients"
    return found, diffs, folder


def test_stages_alternate_and_own_every_parameter_once(
    explained: tuple[Explanation, DiffRecorder, Path],
) -> None:
    stages = explained[0].stages
    assert [s.name for s in stages] == ["A0", "F0", "A1", "F1", "A2"]
    params = [fqn for stage in stages for fqn in stage.params]
    assert len(params) == len(set(params)) == 25
    assert {fqn for s in stages if s.role == "ffn" for fqn in s.params} == {
        f"model.layers.{layer}.mlp.experts.{kind}"
        for layer in (0, 1)
        for kind in ("gate_up_proj", "down_proj")
    }


def test_inputs_and_outputs_are_called_what_they_are(
    explained: tuple[Explanation, DiffRecorder, Path],
) -> None:
    first, head = explained[0].stages[0], explained[0].stages[-1]
    assert "input_ids" in {tensor.name for tensor in first.inputs}
    assert [tensor.name for tensor in first.outputs[:4]] == ["tokens", "token_ids", "expert_ids", "weights"]
    assert "labels" in {tensor.name for tensor in head.inputs}
    assert "loss_numerator_0" in {tensor.name for tensor in head.outputs}


def test_bytes_a_token_are_those_of_its_row_and_its_routing(
    explained: tuple[Explanation, DiffRecorder, Path],
) -> None:
    transfers = {t.name: t for t in explained[0].transfers}
    hidden, top_k = 64, 2
    assert transfers["dispatch.0"].bytes_per_token == hidden * 4 + top_k * (2 * 4 + 4)
    assert transfers["combine.0"].bytes_per_token == hidden * 4
    assert not transfers["combine.0"].several_groups_only
    assert transfers["residual.0"].several_groups_only
    assert (transfers["combine_bwd.1"].src, transfers["combine_bwd.1"].dst) == ("A2", "F1")


def test_experts_say_their_style_and_sizes(explained: tuple[Explanation, DiffRecorder, Path]) -> None:
    found = [(e.layer, e.style, e.num_experts, e.top_k, e.opaque) for e in explained[0].experts]
    assert found == [(0, "grouped_mm", 8, 2, False), (1, "grouped_mm", 8, 2, False)]


def test_the_document_is_json_with_the_promised_keys(
    explained: tuple[Explanation, DiffRecorder, Path],
) -> None:
    document = json.loads(json.dumps(explained[0].to_dict()))
    assert {"stages", "transfers", "experts", "graph_breaks"} <= set(document)
    assert {"name", "role", "layers", "nodes", "params", "inputs", "outputs"} <= set(document["stages"][0])
    assert set(document["stages"][0]["inputs"][0]) == {"name", "shape", "dtype"}
    assert {"kind", "direction", "src", "dst", "bytes_per_token", "tensors"} <= set(document["transfers"][0])
    assert set(document["experts"][0]) == {"layer", "style", "num_experts", "top_k", "opaque", "reason"}


def test_the_text_is_a_table_a_person_can_read(explained: tuple[Explanation, DiffRecorder, Path]) -> None:
    text = str(explained[0])
    for word in ("Stages", "A0", "F1", "dispatch.0", "grouped_mm"):
        assert word in text


def test_every_pass_leaves_a_dump_and_a_diff(explained: tuple[Explanation, DiffRecorder, Path]) -> None:
    explanation, diffs, folder = explained
    names = [f"{i:02d}_{name}.py" for i, (name, _) in enumerate(explanation.passes)]
    assert sorted(p.name for p in folder.iterdir()) == names
    by_name = {diff.name: diff for diff in diffs.diffs}
    assert by_name["canonicalize_experts"].added["experts"] == 2
    assert by_name["insert_transfers"].added["m2n_send"] == 4
    assert not by_name["find_regions"].added and not by_name["find_regions"].removed


def test_the_last_dump_computes_what_the_model_computes(
    explained: tuple[Explanation, DiffRecorder, Path],
) -> None:
    import runpy

    *_, last = sorted(explained[2].iterdir())
    first = sorted(explained[2].iterdir())[0]
    before, after = (runpy.run_path(str(path)) for path in (first, last))
    inputs = before["example_inputs"]()
    outputs = [module["GraphModule"]()(*inputs) for module in (before, after)]
    for one, other in zip(*outputs, strict=True):
        torch.testing.assert_close(one, other, equal_nan=True)


class Breaks(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        if y.sum() > 0:  # the break
            y = y + 1
        return y.sum()


def test_a_graph_break_is_listed_with_its_source_line() -> None:
    found = explain(Breaks(), torch.ones(2, 3))
    assert found.stages == ()
    line = next(
        i for i, text in enumerate(Path(__file__).read_text().splitlines(), 1) if "# the break" in text
    )
    assert any(one.where == f"{__file__}:{line}" for one in found.graph_breaks)
    assert "graph break at" in str(found)


def test_a_dense_model_is_one_stage_without_experts() -> None:
    found = explain(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), torch.ones(2, 3))
    assert [s.name for s in found.stages] == ["A0"]
    assert found.transfers == ()
    assert "no MoE region found" in str(found)


def test_something_that_is_not_a_module_is_refused() -> None:
    with pytest.raises(InputError, match=r"takes a torch\.nn\.Module"):
        explain(torch.nn.functional.relu, torch.ones(1))  # type: ignore[arg-type]


class LoopOverExperts(nn.Module):
    """Dynamo skips its frame without a word: the shapes in its loop depend on data."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 4)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == i)
            out = out.index_add(0, token, expert(x[token]) * weights[token, slot, None])
        return out.square().mean()


def test_a_bare_layer_whose_tokens_are_its_input_is_split() -> None:
    found = explain(LoopOverExperts(), torch.randn(6, 8))
    assert [stage.name for stage in found.stages] == ["A0", "F0", "A1"]
    assert found.experts[0].style == "expert_loop"
