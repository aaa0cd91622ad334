"""The plan: frozen data that planner, simulator, runtime and inspection share. Imports no torch.

The package can be called: `disagmoe_compile.plan(model_spec, cluster, workload, **options)` is the planner
(`planner.size.plan`), which users know by that name, and a package and a function of one name cannot both be an attribute of
their parent.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

from disagmoe_compile.plan.action import Action, ActionKind, Stream, overlap
from disagmoe_compile.plan.completeness import peak_residency
from disagmoe_compile.plan.ir import (
    Direction,
    Plan,
    Schedule,
    Splits,
    Stage,
    TensorSpec,
    TokenDim,
    Transfer,
    TransferKind,
    Workload,
)
from disagmoe_compile.plan.serialize import dump, from_dict, load, to_dict
from disagmoe_compile.plan.topology import Group, Role, Topology
from disagmoe_compile.plan.transfers import BoundarySizes, build_transfers
from disagmoe_compile.plan.validate import check, validate
from disagmoe_compile.plan.violation import Violation, grid

__all__ = [
    "Action",
    "ActionKind",
    "BoundarySizes",
    "Direction",
    "Group",
    "Plan",
    "Role",
    "Schedule",
    "Splits",
    "Stage",
    "Stream",
    "TensorSpec",
    "TokenDim",
    "Topology",
    "Transfer",
    "TransferKind",
    "Violation",
    "Workload",
    "build_transfers",
    "check",
    "dump",
    "from_dict",
    "grid",
    "load",
    "overlap",
    "peak_residency",
    "to_dict",
    "validate",
]


class _CallablePackage(ModuleType):
    def __call__(self, *args: Any, **options: Any) -> Any:
        return import_module("disagmoe_compile.planner.size").plan(*args, **options)


sys.modules[__name__].__class__ = _CallablePackage
