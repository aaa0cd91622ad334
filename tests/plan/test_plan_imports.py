"""Plans, schedules and example plans are made on machines without torch."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "module",
    [
        "disagmoe_compile.plan",
        "disagmoe_compile.passes.schedule.af_pipe",
        "disagmoe_compile.passes.schedule.lower",
        "disagmoe_compile.testing.plans",
    ],
)
def test_imports_no_torch(module):
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
