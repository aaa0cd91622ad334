"""A fingerprint identifies model and passes: equal in every process, different for another model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch
from test_find_regions import Routed

from disagmoe_compile.passes.pipeline import partition_model
from disagmoe_compile.testing.graphs import capture_model

SCRIPT = """
import torch
from disagmoe_compile.testing.graphs import capture_model
from test_find_regions import Routed
from disagmoe_compile.passes.pipeline import partition_model
def other(x):
    return (x * 2).sum()
capture_model(other, {"x": torch.randn(5, 3)})  # what was traced before must not matter
captured, _ = capture_model(Routed().bfloat16(), {"x": torch.ones(8, 3, 16).bfloat16()})
import sys; sys.stdout.write(partition_model(captured).fingerprint)
"""


def fingerprint(n_samples=6, length=3, **options):
    x = torch.ones(n_samples, length, 16).bfloat16()
    captured, _ = capture_model(Routed(**options).bfloat16(), {"x": x})
    return partition_model(captured).fingerprint


def test_is_equal_in_another_process_and_for_another_batch_size():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=Path(__file__).parent, capture_output=True, text=True, check=True
    )
    assert done.stdout == fingerprint()


def test_changes_with_the_model():
    assert fingerprint() != fingerprint(combine="index_add", length=4)
