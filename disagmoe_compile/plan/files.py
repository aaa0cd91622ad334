"""Plan files of both kinds: an executable `Plan`, or the `Sizing` that `disagmoe plan` writes."""

from __future__ import annotations

import json
import os
from pathlib import Path

from disagmoe_compile.errors import PlanError
from disagmoe_compile.plan.ir import Plan
from disagmoe_compile.plan.serialize import load
from disagmoe_compile.plan.sizing import KIND, Sizing, parse_sizing


def load_plan(path: str | os.PathLike[str]) -> Plan | Sizing:
    """Raises PlanError, naming the file, where it is missing or malformed."""
    document = _document(path)
    if document is None:
        return load(path)  # which says what is wrong with it
    try:
        return parse_sizing(document)
    except PlanError as error:
        raise PlanError(f"plan file {path}: {error}") from None


def _document(path: str | os.PathLike[str]) -> dict[str, object] | None:
    """The JSON object of a sizing; None for anything else."""
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return document if isinstance(document, dict) and document.get("kind") == KIND else None
