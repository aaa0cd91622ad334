"""state_dict of parts: global shapes, names as ever, and checkpoints that merge to exactly the whole model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from sharded_model import GatheringBackend, batch, make_model, topology, worst_parameter_error
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed._state_dict_utils import _all_gather_sharded_tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import DTensor

from disagmoe_compile.errors import DisagMoEError
from disagmoe_compile.plan.topology import Group, Role
from disagmoe_compile.runtime.full_state import full_state_dict
from disagmoe_compile.runtime.optimizer_hooks import OptimizerGuard
from disagmoe_compile.runtime.placement import ParameterPlacement
from disagmoe_compile.runtime.state_dict import install, is_chunked
from disagmoe_compile.testing import relative_error
from disagmoe_compile.testing.pool import GlooPool


class Trained:
    """Two guarded steps beside eager: (2, W-2) ranks."""

    def __init__(self, n_experts: int, steps: int = 2, tied: bool = False) -> None:
        guard = OptimizerGuard()
        self.model = make_model(n_experts=n_experts, tied=tied)
        self.reference = make_model(n_experts=n_experts, tied=tied)
        self.names = list(self.model.state_dict())
        self.backend = GatheringBackend(
            self.model,
            topology(2, dist.get_world_size() - 2),
            on_bind=lambda binding, groups: guard.watch(binding, install(self.model, binding, groups)),
        )
        self.compiled = torch.compile(self.model, backend=self.backend, fullgraph=True)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.eager_optimizer = torch.optim.AdamW(self.reference.parameters(), lr=1e-2)
        for i in range(steps):
            self.step(i)

    def step(self, index: int) -> None:
        for model, optimizer in ((self.compiled, self.optimizer), (self.reference, self.eager_optimizer)):
            optimizer.zero_grad()
            model(batch(index)).backward()
            optimizer.step()

    @property
    def error(self) -> float:
        assert self.backend.binding is not None
        return worst_parameter_error(self.backend.binding, self.reference)


def average_of_a_copy(n_experts: int) -> dict[str, Any]:
    """A moving average beside the model, as torch keeps it; and the same of the twin."""
    run = Trained(n_experts, steps=1)
    how = {"multi_avg_fn": torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)}
    averages = [torch.optim.swa_utils.AveragedModel(model, **how) for model in (run.model, run.reference)]
    run.step(1)
    for average, model in zip(averages, (run.model, run.reference), strict=True):
        average.update_parameters(model)
    kinds = {n: type(v).__name__ for n, v in averages[0].module.state_dict().items()}
    whole, expected = full_state_dict(averages[0].module), averages[1].module.state_dict()
    error = max((relative_error(value, expected[name]) for name, value in whole.items()), default=0.0)
    return {
        "kinds": kinds,
        "model": {n: type(v).__name__ for n, v in run.model.state_dict().items()},
        "error": error,
    }


@pytest.mark.parametrize("n_experts", [4, 5])
def test_averaged_copies_are_parts_and_save_as_a_whole(pool: GlooPool, n_experts: int) -> None:
    for result in pool.run(average_of_a_copy, n_experts, world_size=4):
        assert result["kinds"] == result["model"]
        assert result["error"] < 1e-6


def describe(n_experts: int) -> dict[str, Any]:
    run = Trained(n_experts, steps=1)
    state = run.model.state_dict()
    return {
        "names": list(state) == run.names,
        "compiled_names": [n.removeprefix("_orig_mod.") for n in run.compiled.state_dict()] == run.names,
        "shapes": {n: tuple(v.shape) for n, v in state.items()},
        "are_dtensors": {n: isinstance(v, DTensor) for n, v in state.items()},
        "local_elements": sum(v.to_local().numel() for v in state.values() if isinstance(v, DTensor)),
        "whole": torch.equal(state["experts"].full_tensor(), run.reference.experts)
        if isinstance(state["experts"], DTensor) and dist.get_rank() >= 2
        else None,
    }


def test_bound_parameters_become_dtensors_of_the_global_shape_under_their_names(pool: GlooPool) -> None:
    results = pool.run(describe, 4, world_size=4)
    for result in results:
        assert result["names"] and result["compiled_names"]
        assert result["shapes"]["experts"] == (4, 8, 8) and result["shapes"]["embed.weight"] == (8, 8)
        assert result["are_dtensors"]["experts"] and result["are_dtensors"]["head.weight"]
        assert not result["are_dtensors"]["unused"]
    assert [r["local_elements"] for r in results] == [136, 136, 128, 128]
    assert [r["whole"] for r in results] == [None, None, True, True]


def save(folder: str, n_experts: int, tied: bool) -> dict[str, Any] | None:
    """Saves model and optimizer; rank 0 returns eager's."""
    run = Trained(n_experts, tied=tied)
    dcp.save({"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict()}, checkpoint_id=folder)
    if dist.get_rank():
        return None
    return {"model": run.reference.state_dict(), "optimizer": run.eager_optimizer.state_dict()}


@pytest.mark.parametrize(
    ("n_experts", "world_size", "tied"),
    [(4, 4, False), (9, 6, False), (5, 5, True)],
    ids=["even", "9 on 4", "5 on 3, tied"],
)
def test_a_checkpoint_merges_to_exactly_the_whole_model(
    pool: GlooPool, tmp_path: Path, n_experts: int, world_size: int, tied: bool
) -> None:
    wanted = pool.run(save, str(tmp_path / "saved"), n_experts, tied, world_size=world_size)[0]
    dcp_to_torch_save(tmp_path / "saved", tmp_path / "merged.pt")
    merged = torch.load(tmp_path / "merged.pt", weights_only=False)
    assert set(merged["model"]) == set(wanted["model"])
    for name, value in wanted["model"].items():
        assert merged["model"][name].shape == value.shape
        torch.testing.assert_close(merged["model"][name], value, rtol=1e-6, atol=1e-7)
    for index, state in wanted["optimizer"]["state"].items():
        for name, value in state.items():
            found = merged["optimizer"]["state"][str(index)][name]  # torch's merge turns the keys into text
            torch.testing.assert_close(found, value, rtol=1e-5, atol=1e-8)


def save_then_load(folder: str, how: str, n_experts: int) -> tuple[float, float]:
    """One more step must be eager's after loading what was saved; returns the error before loading (a
    control) and after.
    """
    run = Trained(n_experts)
    saved_model = {n: v.clone() for n, v in run.reference.state_dict().items()}
    if how == "dcp":
        dcp.save({"model": run.model.state_dict()}, checkpoint_id=folder)
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.zero_()
    lost = run.error
    if how == "dcp":
        state = {"model": run.model.state_dict()}
        dcp.load(state, checkpoint_id=folder)
        run.model.load_state_dict(state["model"])
    else:
        run.model.load_state_dict(saved_model)
    run.step(2)
    return lost, run.error


@pytest.mark.parametrize(("how", "n_experts", "world_size"), [("dcp", 4, 4), ("dcp", 5, 5), ("whole", 5, 5)])
def test_loading_restores_the_parts(
    pool: GlooPool, tmp_path: Path, how: str, n_experts: int, world_size: int
) -> None:
    for lost, error in pool.run(
        save_then_load, str(tmp_path / "saved"), how, n_experts, world_size=world_size
    ):
        assert lost > 0.5
        assert error < 1e-6


def uneven_kind() -> tuple[str, tuple[int, ...], int]:
    model = Trained(9, steps=1).model
    value = model.state_dict()["experts"]
    assert isinstance(value, ShardedTensor)
    with pytest.raises(DisagMoEError, match="split unevenly over ranks"):
        _all_gather_sharded_tensor(value)
    # no rank waits for those that hold no part of something: the state dict of each ends before it gathers
    with pytest.raises(DisagMoEError, match=r"disagmoe_compile.full_state_dict\(model\)"):
        get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    return type(value).__name__, tuple(value.shape), sum(s.tensor.shape[0] for s in value.local_shards())


def test_a_split_that_dtensor_cannot_express_states_every_offset(pool: GlooPool) -> None:
    results = pool.run(uneven_kind, world_size=6)
    assert [rows for _, _, rows in results] == [0, 0, 3, 2, 2, 2]
    assert all(shape == (9, 8, 8) for _, shape, _ in results)


@pytest.mark.parametrize(
    ("rows", "chunked"),
    [([(0, 2), (2, 4)], True), ([(0, 3), (3, 6), (6, 8)], True), ([(0, 3), (3, 5), (5, 7), (7, 9)], False)],
)
def test_is_chunked_knows_torch_s_rule(rows: list[tuple[int, int]], chunked: bool) -> None:
    total = rows[-1][1]
    placement = ParameterPlacement("w", (total, 2), Group(Role.FFN, 0), dict(enumerate(rows)))
    assert is_chunked(placement) is chunked
    sizes = [c.shape[0] for c in torch.empty(total).chunk(len(rows))]
    assert (sizes == [end - start for start, end in rows]) is chunked
