from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from disagmoe_compile.cli import doctor

CommandLine = Callable[..., tuple[int, str, str]]


def test_it_reports_every_tool(disagmoe: CommandLine) -> None:
    status, out, _ = disagmoe("doctor", "--json")
    checks = {check["name"]: check for check in json.loads(out)["checks"]}
    assert set(checks) >= {
        "torch",
        "gloo",
        "NCCL",
        "CUDA devices",
        "HiGHS",
        "triton",
        "flash-attn",
        "transformers",
    }
    assert status == 0 and checks["torch"]["status"] == checks["gloo"]["status"] == "ok"


def test_what_is_missing_comes_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, disagmoe: CommandLine
) -> None:
    real = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: None if name == "triton" else real(name))
    status, out, _ = disagmoe("doctor", "--json")
    triton = next(check for check in json.loads(out)["checks"] if check["name"] == "triton")
    assert status == 0  # nothing that is required
    assert triton["status"] == "not here" and "pip install" in triton["advice"]


def test_a_missing_requirement_fails_after_the_report(
    monkeypatch: pytest.MonkeyPatch, disagmoe: CommandLine
) -> None:
    real = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: None if name == "highspy" else real(name))
    status, out, err = disagmoe("doctor", "--json")
    assert status == 1 and json.loads(out)["ok"] is False
    assert err.startswith("disagmoe: error: this machine lacks HiGHS") and "pip install" in err


def test_an_installed_package_that_does_not_import_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_imports", lambda module: not module.startswith("highspy"))
    highs = next(finding for finding in doctor.examine() if finding.name == "HiGHS")
    assert not highs.is_ok


def test_without_torch_its_own_checks_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_imports", lambda module: module != "torch")
    names = [finding.name for finding in doctor.examine()]
    assert "torch" in names and "gloo" not in names


def test_people_see_the_advice(monkeypatch: pytest.MonkeyPatch, disagmoe: CommandLine) -> None:
    monkeypatch.setattr(doctor, "_version", lambda name: None)
    monkeypatch.setenv("COLUMNS", "200")
    _, out, _ = disagmoe("doctor")
    assert "missing" in out and "pip install triton" in out
