"""What a run leaves and reports: errors that cannot hide, JSON that is JSON, a folder that is not
overwritten.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from disagmoe_compile.cli.run_folder import RunFolder
from disagmoe_compile.cli.train_loop import Training, TrainSettings, load_for_training
from disagmoe_compile.cli.train_run import TrainRequest, finite, max_relative_error
from disagmoe_compile.errors import InputError
from disagmoe_compile.models.source import Source
from disagmoe_compile.runtime.timeline import Event

SETTINGS = TrainSettings("hf:qwen3_moe", 3, 4, 16, 1e-2, 0, None, {})


def test_the_error_is_the_largest_relative_one() -> None:
    assert max_relative_error([1.0, 2.2], [1.0, 2.0]) == pytest.approx(0.1)


def test_slices_of_a_batch_train_as_the_whole_and_where_samples_mix_as_each_alone() -> None:
    """7 samples in slices of 3, 2 and 2."""
    slices = [range(0, 3), range(3, 5), range(5, 7)]
    for style, mixes in (("where_loop", False), ("gshard", True)):
        settings = TrainSettings(f"style:{style}", 2, 7, 16, 1e-2, 0, None, {})
        whole, sliced = (
            [step.loss for step in Training(settings, load_for_training(settings), slices=parts).run()]
            for parts in (None, slices)
        )
        assert (max_relative_error(sliced, whole) > 1e-5) == mixes, (style, whole, sliced)


def test_nan_is_an_infinite_error() -> None:
    assert max_relative_error([1.0, math.nan, 1.0], [1.0, 1.0, 1.0]) == math.inf


def test_what_json_cannot_hold_becomes_null() -> None:
    document = finite({"losses": [1.0, math.nan], "error": math.inf, "name": "x"})
    assert json.loads(json.dumps(document, allow_nan=False)) == {
        "losses": [1.0, None],
        "error": None,
        "name": "x",
    }


def test_a_folder_that_holds_files_is_not_written_to(tmp_path: Path) -> None:
    (tmp_path / "plan.json").touch()
    with pytest.raises(InputError, match="is not empty"):
        RunFolder.create(tmp_path)


def test_reports_and_events_survive_the_folder(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run")
    events = [Event("0F0", "forward", 1.0, 2.0, 3, 4)]
    folder.save_report(1, {"rank": 1})
    folder.save_events(1, events)
    assert (folder.report(1), folder.events(1)) == ({"rank": 1}, events)
    assert (folder.report(0), folder.events(0)) == (None, [])


def test_settings_survive_the_folder(tmp_path: Path) -> None:
    SETTINGS.save(tmp_path / "settings.json")
    assert TrainSettings.load(tmp_path / "settings.json") == SETTINGS


@pytest.mark.parametrize(
    ("given", "message"),
    [({"steps": 0}, "--steps"), ({"seq_length": 1}, "--seq-length"), ({"lr": float("nan")}, "--lr")],
)
def test_numbers_that_make_no_sense_are_named(given: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        TrainRequest("hf:qwen3_moe", **given)


def test_the_loop_trains_and_is_repeatable() -> None:
    pytest.importorskip("transformers")
    first, second = (
        [result.loss for result in Training(SETTINGS, load_for_training(SETTINGS)).run()] for _ in range(2)
    )
    assert first == second
    assert len(first) == 3
    assert first[-1] < first[0]


class _Scalar(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).square().sum()


def test_a_model_that_reads_no_tokens_trains_on_its_example_again_and_again() -> None:
    source = Source("mine", _Scalar(), (torch.ones(3),), {})
    losses = [result.loss for result in Training(SETTINGS, source).run()]
    assert losses == sorted(losses, reverse=True)
    assert len(losses) == 3


def test_a_model_without_a_loss_is_named() -> None:
    source = Source("mine", torch.nn.Linear(3, 2), (torch.ones(3),), {})
    with pytest.raises(InputError, match=r"source 'mine': the model must return a scalar loss"):
        list(Training(SETTINGS, source).run())
