"""The collector rests while a plan is judged, and is afterwards as it was, whatever happened."""

from __future__ import annotations

import gc

import pytest

from disagmoe_compile.plan.collector import collector_paused


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_left_as_it_was(enabled: bool) -> None:
    try:
        (gc.enable if enabled else gc.disable)()
        with pytest.raises(ValueError), collector_paused():
            assert not gc.isenabled()
            raise ValueError
        assert gc.isenabled() == enabled
    finally:
        gc.enable()
