"""`SOURCE`: what it builds, and one clear line for each way to get it wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from disagmoe_compile.errors import InputError
from disagmoe_compile.models.source import load_source

FACTORY = """
import torch
from neighbour import WIDTH

def factory():
    model = torch.nn.Linear(WIDTH, 1)
    return model, (torch.rand(2, WIDTH),), {}

def tokens():
    ids = torch.zeros(2, 4, dtype=torch.long)
    return torch.nn.Embedding(300, 4), (), {"input_ids": ids, "labels": ids}

def broken():
    return 1 / 0

def pair():
    return torch.nn.Linear(1, 1), ()

not_callable = 3
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "neighbour.py").write_text("WIDTH = 3\n")
    path = tmp_path / "mine.py"
    path.write_text(FACTORY)
    return path


def test_a_family_comes_with_an_example_call() -> None:
    pytest.importorskip("transformers")
    source = load_source("hf:qwen3_moe")
    assert source.vocab_size == 256
    assert torch.isfinite(source.model(*source.args, **source.kwargs).loss)


def test_a_file_is_run_with_its_neighbours_importable(file: Path) -> None:
    source = load_source(f"{file}:factory")
    assert source.model(*source.args, **source.kwargs).shape == (2, 1)
    assert source.vocab_size is None


def test_a_file_model_is_seeded(file: Path) -> None:
    weights = [load_source(f"{file}:factory", seed=s).model.weight for s in (1, 1, 2)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_a_model_that_reads_tokens_says_how_many(file: Path) -> None:
    assert load_source(f"{file}:tokens").vocab_size == 300


@pytest.mark.parametrize(
    ("suffix", "message"),
    [
        (":missing", "has no function 'missing'"),
        (":not_callable", "has no function 'not_callable'"),
        (":pair", r"must return \(model, args, kwargs\).*tuple of 2"),
        (":broken", r"mine\.py:14: ZeroDivisionError: division by zero"),
    ],
)
def test_a_wrong_factory_is_named(file: Path, suffix: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_source(f"{file}{suffix}")


def test_a_file_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no such file: .*nothing\.py"):
        load_source(f"{tmp_path}/nothing.py:factory")


def test_an_import_error_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "bad.py"
    path.write_text("x = 1\nimport does_not_exist_anywhere\n")
    with pytest.raises(InputError, match=r"bad\.py:2: ModuleNotFoundError"):
        load_source(f"{path}:factory")


def test_a_syntax_error_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "bad.py"
    path.write_text("x = 1\ndef :\n")
    with pytest.raises(InputError, match=r"bad\.py:2: SyntaxError"):
        load_source(f"{path}:factory")


@pytest.mark.parametrize("text", ["qwen3_moe", "hf:", "file.py", ":factory"])
def test_a_source_of_no_known_form_lists_the_forms(text: str) -> None:
    with pytest.raises(InputError, match=r"hf:FAMILY .* path/to/file.py:factory"):
        load_source(text)
