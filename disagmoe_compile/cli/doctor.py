"""`disagmoe doctor`: what this machine has and lacks, each with what to do about it.

A check is a function that returns a `Finding`; it never raises. Only the required ones make the command fail.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import metadata

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from disagmoe_compile.cli.output import DebugOption, JsonOption, Output, command
from disagmoe_compile.errors import DisagMoEError


@dataclass(frozen=True, slots=True)
class Finding:
    """`found` is a version or a description; `advice` is what to do where it is missing, or what it would add."""

    name: str
    is_ok: bool
    is_required: bool
    found: str
    advice: str = ""

    @property
    def status(self) -> str:
        return "ok" if self.is_ok else "missing" if self.is_required else "not here"


def _python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    return Finding("python", sys.version_info >= (3, 11), True, version, "use Python 3.11 or newer")


def _torch() -> Finding:
    advice = "pip install 'torch>=2.13,<2.14'"
    version = _version("torch")
    if version is None or not _imports("torch"):
        return Finding("torch", False, True, version or "not installed", advice)
    return Finding("torch", version.startswith("2.13."), True, version, advice)


def _gloo() -> Finding:
    import torch.distributed as dist

    is_here = dist.is_available() and dist.is_gloo_available()
    return Finding(
        "gloo", is_here, True, "built into torch" if is_here else "not in this torch",
        "CPU ranks talk through gloo: install a torch build with torch.distributed",
    )  # fmt: skip


def _nccl() -> Finding:
    import torch.distributed as dist

    is_here = dist.is_available() and dist.is_nccl_available()
    return Finding(
        "NCCL", is_here, False, "built into torch" if is_here else "not in this torch",
        "needed for CUDA ranks only: install a CUDA build of torch",
    )  # fmt: skip


def _cuda() -> Finding:
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    names = ", ".join(sorted({torch.cuda.get_device_name(i) for i in range(count)}))
    return Finding(
        "CUDA devices", count > 0, False, f"{count} ({names})" if count else "none",
        "without one, ranks run on the CPU over gloo",
    )  # fmt: skip


def _highs() -> Finding:
    advice = "the planner needs both: pip install 'pyomo>=6.10' 'highspy>=1.11'"
    pyomo, highspy = _version("pyomo"), _version("highspy")
    if not (pyomo and highspy and _imports("pyomo.contrib.solver.solvers.highs") and _imports("highspy")):
        return Finding(
            "HiGHS", False, True, f"pyomo {pyomo or 'missing'}, highspy {highspy or 'missing'}", advice
        )
    return Finding("HiGHS", True, True, f"highspy {highspy}, pyomo {pyomo}", advice)


def _compiler() -> Finding:
    from torch._inductor import exc
    from torch._inductor.cpp_builder import get_cpp_compiler

    advice = (
        "stage_compiler='inductor' needs one on CPU: install g++ or clang, or pass stage_compiler='aot_eager'"
    )
    try:
        return Finding("C++ compiler", True, False, get_cpp_compiler(), advice)
    except exc.InvalidCxxCompiler:
        return Finding("C++ compiler", False, False, "none found", advice)


def _transformers() -> Finding:
    version = _version("transformers")
    is_ok = version is not None and version.startswith("5.")
    return Finding(
        "transformers", is_ok, False, version or "not installed",
        "needed for SOURCE hf:FAMILY: pip install 'transformers>=5,<6' safetensors",
    )  # fmt: skip


def _triton() -> Finding:
    version = _version("triton")
    return Finding(
        "triton", version is not None, False, version or "not installed",
        "Inductor's code on CUDA: pip install triton",
    )  # fmt: skip


def _flash_attention() -> Finding:
    version = _version("flash-attn")
    return Finding(
        "flash-attn", version is not None, False, version or "not installed",
        "a faster attention core on CUDA: pip install flash-attn",
    )  # fmt: skip


WITHOUT_TORCH: tuple[Callable[[], Finding], ...] = (
    _python,
    _torch,
    _highs,
    _transformers,
    _triton,
    _flash_attention,
)
WITH_TORCH: tuple[Callable[[], Finding], ...] = (_gloo, _nccl, _cuda, _compiler)


def examine() -> list[Finding]:
    """All findings. What only torch can tell is asked where torch imports."""
    findings = [check() for check in WITHOUT_TORCH]
    if _imports("torch"):
        findings += [check() for check in WITH_TORCH]
    return sorted(findings, key=lambda finding: not finding.is_required)


@command
def doctor(as_json: JsonOption = False, debug: DebugOption = False) -> Output:
    """What this machine has and lacks, each with what to do. Fails where something required is missing."""
    findings = examine()
    missing = [f for f in findings if f.is_required and not f.is_ok]
    checks = [{**asdict(f), "status": f.status, "advice": "" if f.is_ok else f.advice} for f in findings]
    failure = None
    if missing:
        what = "; ".join(f"{f.name} ({f.found}): {f.advice}" for f in missing)
        failure = DisagMoEError(f"this machine lacks {what}")
    return Output({"ok": not missing, "checks": checks}, lambda console: _render(console, findings), failure)


def _render(console: Console, findings: list[Finding]) -> None:
    table = Table()
    for column in ("", "status", "found", "what to do"):
        table.add_column(column, overflow="fold")
    for finding in findings:
        colour = "green" if finding.is_ok else "red" if finding.is_required else "yellow"
        advice = "" if finding.is_ok else finding.advice
        table.add_row(finding.name, f"[{colour}]{finding.status}[/]", escape(finding.found), escape(advice))
    console.print(table)


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _imports(module: str) -> bool:
    """Whether it can be imported: an installed package may still miss a shared library."""
    try:
        if importlib.util.find_spec(module) is None:
            return False
        importlib.import_module(module)
    except (ImportError, OSError):
        return False
    return True
