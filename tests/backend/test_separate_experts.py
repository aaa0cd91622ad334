"""Experts with parameters of their own on real ranks: each lives whole on one rank, and training equals eager."""

from __future__ import annotations

import re
from functools import cache

import pytest
import torch
from separate_ranks import EXPERTS, IDLE, STEPS, Report, make_batch, make_model, make_optimizer, train
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from disagmoe_compile.testing import relative_error


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return str(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def reports(pool, folder) -> list[Report]:
    return pool.run(train, folder, world_size=3, process_group=False, timeout_s=500)


@cache
def eager() -> tuple[list[float], list[float], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Losses, norms, the last step's gradients, final parameters."""
    model = make_model()
    optimizer = make_optimizer(model)
    losses, norms, gradients = [], [], {}
    for step in range(STEPS):
        loss = model(**make_batch(step)).loss
        loss.backward()
        gradients = {n: p.grad.clone() for n, p in model.named_parameters()}
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms, gradients, {n: p.detach() for n, p in model.named_parameters()}


def owner_of(name: str) -> int:
    """Experts 0, 1, 2 are on rank 1 and 3, 4 on rank 2; the rest is on rank 0."""
    expert = re.search(r"experts\.(\d+)\.", name)
    return 0 if expert is None else 1 + (int(expert[1]) >= 3)


def test_training_equals_eager_and_every_expert_lives_whole_on_one_rank(reports):
    losses, norms, gradients, parameters = eager()
    assert EXPERTS == 5
    for rank, report in enumerate(reports):
        mine = {name for name in parameters if owner_of(name) == rank}
        assert set(report.held) == set(report.gradients) == mine
        assert report.losses == pytest.approx(losses, rel=1e-5)
        assert report.norms == pytest.approx(norms, rel=1e-4)
        for name in mine:
            assert relative_error(report.gradients[name], gradients[name]) <= 1e-4, name
            assert relative_error(report.parameters[name], parameters[name]) <= 1e-4, name


def test_an_expert_without_tokens_has_a_gradient_of_zeros(reports):
    idle = {n: g for n, g in reports[2].gradients.items() if f"experts.{IDLE}." in n}
    assert len(idle) == 2 * 4
    assert not any(gradient.count_nonzero() for gradient in idle.values())


def test_a_rank_holds_memory_for_its_experts_only(reports):
    _, _, _, parameters = eager()
    for rank, report in enumerate(reports):
        share = sum(4 * p.numel() for name, p in parameters.items() if owner_of(name) == rank)
        assert report.parameter_bytes == pytest.approx(share, rel=0.05)
        assert report.optimizer_bytes == pytest.approx(2 * share, rel=0.05)


def test_the_state_dict_is_global_on_every_rank_and_its_checkpoint_is_the_whole_model(
    reports, folder, tmp_path
):
    _, _, _, parameters = eager()
    for rank, report in enumerate(reports):
        assert report.state_shapes == {name: tuple(p.shape) for name, p in parameters.items()}
        for name, parameter in parameters.items():
            assert report.local_numels[name] == (parameter.numel() if owner_of(name) == rank else 0)
    merged = str(tmp_path / "merged.pt")
    dcp_to_torch_save(folder, merged)
    model = make_model()
    model.load_state_dict(torch.load(merged)["model"])
    for name, parameter in model.named_parameters():
        assert relative_error(parameter, parameters[name]) <= 1e-4, name
