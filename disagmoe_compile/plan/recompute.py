"""Which stages keep their inputs alone and run their forward again in the backward: both sides', none, or one side's."""

from __future__ import annotations

from disagmoe_compile.plan.topology import Role

RECOMPUTE = ("none", "stage", "attention", "ffn")


def recomputes(choice: str, role: Role) -> bool:
    return choice in ("stage", role.value)
