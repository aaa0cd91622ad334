"""Safetensors on disk against the model: the same values whole and by rows, and one clear line for what does not fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from disagmoe_compile.errors import InputError, UnsupportedModelError
from disagmoe_compile.models.hf import build
from disagmoe_compile.runtime.loading.checkpoint_files import Reader, open_checkpoint
from disagmoe_compile.runtime.loading.hf_names import recipes_of
from disagmoe_compile.runtime.loading.load import load_safetensors
from disagmoe_compile.runtime.loading.recipes import CheckpointValues, Converted

FAMILIES = ["qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "llama4_text", "ernie4_5_moe"]


def on_meta(family: str) -> nn.Module:
    model, config = build(family)
    with torch.device("meta"):
        return type(model)(config)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_and_buffer_is_what_was_saved(family: str, tmp_path: Path) -> None:
    """Experts one by one, other names, tied embeddings, biases, rotary frequencies that no file holds."""
    saved = build(family)[0]
    saved.save_pretrained(tmp_path, max_shard_size="200KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    model = on_meta(family)
    load_safetensors(model, tmp_path)
    assert not any(t.is_meta for t in (*model.parameters(), *model.buffers()))
    for kind in ("named_parameters", "named_buffers"):
        found = dict(getattr(model, kind)(remove_duplicate=False))
        expected = dict(getattr(saved, kind)(remove_duplicate=False))
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_rows_are_the_rows_of_the_whole_and_other_experts_are_not_read(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = build(family)[0]
    saved.save_pretrained(tmp_path)
    files = open_checkpoint(tmp_path)
    recipes, unused = recipes_of(saved, files)
    assert not unused
    experts = {n: p for n, p in saved.named_parameters() if ".experts." in n}
    assert any(isinstance(recipes[n], Converted) for n in experts) is (family != "gpt_oss")
    read_bytes = 0
    read = Reader.read

    def counted(reader: Reader, name: str, rows: tuple[int, int] | None = None) -> torch.Tensor:
        nonlocal read_bytes
        value = read(reader, name, rows)
        read_bytes += value.untyped_storage().nbytes()
        return value

    monkeypatch.setattr(Reader, "read", counted)
    values = CheckpointValues(files, {name: (recipes[name],) for name in experts})
    found = values.read(dict.fromkeys(experts, (3, 5)))
    assert all(torch.equal(found[name], whole[3:5]) for name, whole in experts.items())
    assert read_bytes == sum(value.numel() * value.element_size() for value in found.values())


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 3)
        self.norm = nn.BatchNorm1d(3)


def plain_state() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {name: value.clone() for name, value in Plain().state_dict().items()}


def drop(state: dict[str, torch.Tensor]) -> None:
    del state["first.bias"]


def add(state: dict[str, torch.Tensor]) -> None:
    state["second.weight"] = torch.zeros(2)


def reshape(state: dict[str, torch.Tensor]) -> None:
    state["first.weight"] = state["first.weight"].t().contiguous()


def quantise(state: dict[str, torch.Tensor]) -> None:
    state["first.weight"] = state["first.weight"].to(torch.int8)


def lose_a_buffer(state: dict[str, torch.Tensor]) -> None:
    del state["norm.running_var"]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (drop, "has no tensor for first.bias"),
        (add, "holds what the model has no place for: second.weight"),
        (reshape, r"first.weight has shape \(3, 4\) in the model and \(4, 3\)"),
        (quantise, "first.weight is torch.float32 in the model and torch.int8"),
        (lose_a_buffer, "has no tensor for norm.running_var"),
    ],
)
def test_what_does_not_fit_is_named_in_one_line_before_anything_changes(
    damage: Callable[[dict[str, torch.Tensor]], None], message: str, tmp_path: Path
) -> None:
    state = plain_state()
    damage(state)
    save_file(state, tmp_path / "model.safetensors")
    with torch.device("meta"):
        model = Plain()
    with pytest.raises(InputError, match=message) as refused:
        load_safetensors(model, tmp_path)
    assert "\n" not in str(refused.value)
    assert all(parameter.is_meta for parameter in model.parameters())


def test_a_plain_module_takes_one_file_and_floats_are_cast_to_its_type(tmp_path: Path) -> None:
    save_file(plain_state(), tmp_path / "any.safetensors")
    with torch.device("meta"):
        model = Plain().to(torch.bfloat16)
    load_safetensors(model, tmp_path / "any.safetensors")
    assert torch.equal(model.first.weight, plain_state()["first.weight"].bfloat16())
    assert torch.equal(model.norm.running_var, plain_state()["norm.running_var"].bfloat16())


def test_an_expert_that_is_missing_on_disk_is_counted(tmp_path: Path) -> None:
    build("qwen3_moe")[0].save_pretrained(tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    state = load_file(file)
    del state["model.layers.1.mlp.experts.5.up_proj.weight"]
    save_file(state, file)
    with pytest.raises(InputError, match=r"layers.1.mlp.experts.gate_up_proj .*"):
        load_safetensors(on_meta("qwen3_moe"), tmp_path)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight


def test_a_tied_parameter_may_be_on_disk_twice_if_it_is_the_same(tmp_path: Path) -> None:
    weight = torch.randn(5, 3)
    file = tmp_path / "model.safetensors"
    save_file({"embed.weight": weight, "head.weight": weight.clone()}, file)
    with torch.device("meta"):
        model = Tied()
    load_safetensors(model, tmp_path)
    assert model.head.weight is model.embed.weight and torch.equal(model.embed.weight, weight)
    save_file({"embed.weight": weight, "head.weight": weight + 1}, file)
    with pytest.raises(InputError, match=r"embed.weight and head.weight are one tied parameter"):
        load_safetensors(model, tmp_path)


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no checkpoint at /no/such/folder"):
        open_checkpoint(Path("/no/such/folder"))
    with pytest.raises(InputError, match="no safetensors file in"):
        open_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"nonsense" * 20)
    with pytest.raises(InputError, match=r"cannot read .*model.safetensors"):
        open_checkpoint(tmp_path)
    save_file({"a": torch.zeros(2)}, tmp_path / "model.safetensors")
    index = {"weight_map": {"a": "model.safetensors", "b": "model.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InputError, match=r"lists tensor b, but model.safetensors does not hold it"):
        open_checkpoint(tmp_path)


class Lost(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.register_buffer("table", torch.arange(3.0), persistent=False)

    def reset_parameters(self) -> None:
        pass


def test_a_buffer_that_nothing_computes_is_named(tmp_path: Path) -> None:
    save_file(nn.Linear(2, 2).state_dict(), tmp_path / "model.safetensors")
    file = tmp_path / "model.safetensors"
    save_file({f"first.{name}": t for name, t in nn.Linear(2, 2).state_dict().items()}, file)
    with torch.device("meta"):
        model = Lost()
    with pytest.raises(UnsupportedModelError, match="buffer table of the model gets no value"):
        load_safetensors(model, tmp_path)

    def init(module: nn.Module) -> None:
        if isinstance(module, Lost):
            module.table.copy_(torch.arange(3.0))

    with torch.device("meta"):
        model = Lost()
    load_safetensors(model, tmp_path, init=init)
    assert model.table.tolist() == [0, 1, 2] and not model.first.weight.is_meta
