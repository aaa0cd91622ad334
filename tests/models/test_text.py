"""Byte batches: deterministic, real text, clear errors for missing or short data."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest
import torch

from disagmoe_compile.errors import InputError
from disagmoe_compile.models.text import batches, corpus


def test_batches_are_bytes_of_real_text_and_labels_are_the_tokens() -> None:
    batch = next(batches(None, 3, 64))
    assert batch["input_ids"].shape == (3, 64)
    assert batch["input_ids"].dtype == torch.int64
    assert torch.equal(batch["input_ids"], batch["labels"])
    assert "import" in bytes(corpus(None)[:20000].tolist()).decode()


def test_two_readers_draw_the_same_batches_and_another_seed_draws_others() -> None:
    first, second, other = (list(islice(batches(None, 2, 16, seed), 3)) for seed in (5, 5, 6))
    assert all(torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(first, second))
    assert not all(torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(first, other))
    assert not torch.equal(first[0]["input_ids"], first[1]["input_ids"])


def test_drawing_does_not_touch_the_global_random_state() -> None:
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    list(islice(batches(None, 2, 16), 3))
    assert torch.equal(torch.rand(1), expected)


def test_a_file_and_a_folder_are_read(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("world")
    (tmp_path / "a.py").write_text("hello ")
    (tmp_path / "c.bin").write_bytes(b"\0" * 100)
    assert bytes(corpus(tmp_path).tolist()) == b"hello world"
    assert next(batches(tmp_path / "b.txt", 1, 5))["input_ids"].tolist() == [list(b"world")]


def test_missing_data_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no such file or folder: .*absent"):
        batches(tmp_path / "absent", 1, 4)


def test_a_folder_without_text_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"holds no \.py, \.txt or \.md file"):
        batches(tmp_path, 1, 4)


def test_an_empty_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    with pytest.raises(InputError, match="is empty"):
        batches(tmp_path / "empty.txt", 1, 4)


def test_text_shorter_than_a_sequence_names_both_lengths(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("abc")
    with pytest.raises(InputError, match="3 bytes, less than one sequence of 4"):
        batches(tmp_path / "short.txt", 1, 4)
