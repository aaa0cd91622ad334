"""A model that no rank holds: built on the meta device, its values read or made by each rank for itself."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Case, RankResult, batch, make_model, train
from test_ranks import assert_equals_eager

import disagmoe_compile as dm
from disagmoe_compile.errors import InputError
from disagmoe_compile.models.hf import tiny_config
from disagmoe_compile.runtime.loading.checkpoint_files import Reader

CASE = Case(attention=1, ffn=2, n_microbatches=2, steps=2, model={"n_layers": 1, "tie_word_embeddings": True})


def on_meta(case: Case) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(tiny_config(case.family, **case.model)).train()


def train_from_files(case: Case, folder: str) -> tuple[RankResult, Counter[str], list[str]]:
    """The result, how many bytes were read of each tensor on disk, and what a script is told that asks for values too early."""
    model, read_bytes, told = on_meta(case), Counter(), []
    read = Reader.read

    def counted(reader: Reader, name: str, rows: Any = None) -> torch.Tensor:
        value = read(reader, name, rows)
        read_bytes[name] += value.untyped_storage().nbytes()
        return value

    Reader.read = counted
    try:
        dm.load_safetensors(model, folder)
        try:
            model.state_dict()
        except RuntimeError as error:
            told.append(str(error))
        result = train(case, model)
        state = model.state_dict()  # no more
        assert set(state) == set(make_model(case).state_dict())
    finally:
        Reader.read = read
    return result, read_bytes, told


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    make_model(CASE).save_pretrained(path, max_shard_size="100KB")
    return path


@pytest.fixture(scope="module")
def loaded(pool, folder):
    return pool.run(train_from_files, CASE, str(folder), world_size=3, process_group=False, timeout_s=500)


def test_a_model_loaded_by_parts_trains_as_the_whole_one(loaded):
    assert_equals_eager(CASE, [result for result, _, _ in loaded])


def test_each_rank_reads_its_own_tensors_and_experts_once_and_no_others(loaded, folder):
    whole = {name: t.numel() * 4 for name, t in make_model(CASE).state_dict().items()}
    dense = {n for n in whole if ".experts." not in n and n != "lm_head.weight"}  # tied: on disk once
    for rank, (_, read, _) in enumerate(loaded):
        if rank == 0:
            assert read == {name: whole[name] for name in dense}
            continue
        experts = {name.split(".experts.")[1].split(".")[0] for name in read}
        assert experts == {str(4 * (rank - 1) + i) for i in range(4)}
        assert sum(read.values()) == sum(whole[n] for n in whole if ".experts." in n) // 2


def test_a_rank_holds_its_share_of_parameters_and_optimizer_state(loaded):
    whole = {name: p.numel() * 4 for name, p in make_model(CASE).named_parameters()}
    experts = sum(nbytes for name, nbytes in whole.items() if ".experts." in name)
    for rank, (result, _, _) in enumerate(loaded):
        share = sum(whole.values()) - experts if rank == 0 else experts // 2
        assert (result.parameter_bytes, result.optimizer_bytes) == (share, 2 * share)


def test_values_asked_for_before_the_first_call_are_refused(loaded):
    for _, _, told in loaded:
        assert (
            told
            and "before the first call of the compiled model: parameter model.embed_tokens.weight" in told[0]
        )


def initialised(case: Case) -> tuple[str, float, dict[str, torch.Tensor]]:
    """What the call of a model without values is told; of another one the loss, and this rank's parameters."""
    told = ""
    try:
        torch.compile(on_meta(case), backend="disagmoe", options=case.compile_options)(**batch(case, 0))
    except InputError as error:
        told = str(error)
    model = on_meta(case)
    optimizer = torch.optim.AdamW(model.parameters())  # keeps the Parameter objects that have no values yet
    compiled = torch.compile(model, backend="disagmoe", options=case.compile_options)
    torch.manual_seed(7)
    state = torch.get_rng_state()
    dm.init_weights(compiled)
    assert torch.equal(state, torch.get_rng_state())
    loss = compiled(**batch(case, 0)).loss
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in model.parameters()]
    return told, loss.item(), {n: p.detach().clone() for n, p in model.named_parameters() if p.numel()}


def test_initial_values_are_those_of_the_whole_model_under_the_same_seed(pool):
    case = replace(CASE, model={"n_layers": 1})
    model = on_meta(case).to_empty(device="cpu")
    torch.manual_seed(7)
    model.init_weights()
    loss = model(**batch(case, 0)).loss.item()
    expected = dict(model.named_parameters())
    for rank, (told, found, parameters) in enumerate(
        pool.run(initialised, case, world_size=3, process_group=False, timeout_s=500)
    ):
        assert "parameter model.embed_tokens.weight is on the meta device" in told
        assert "disagmoe_compile.load_safetensors(model, folder)" in told
        assert found == pytest.approx(loss, rel=1e-5)
        assert {".experts." in name for name in parameters} == {rank > 0}
        for name, value in parameters.items():
            rows = slice(None) if rank == 0 else slice(4 * (rank - 1), 4 * rank)
            assert torch.equal(value, expected[name][rows]), name
