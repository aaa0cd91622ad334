"""The file of `disagmoe plan --problem`: one JSON object with the fields of an AllocationProblem."""

from __future__ import annotations

import json
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from disagmoe_compile.errors import InputError
from disagmoe_compile.planner.allocation import AllocationProblem


def load_problem(path: Path) -> AllocationProblem:
    """Raises InputError naming the file and what is wrong with it."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise InputError(f"cannot read the problem file {str(path)!r}: {reason}") from error
    try:
        return parse_problem(json.loads(text))
    except (ValueError, RecursionError) as error:  # InputError is a ValueError, and so is a JSON error
        what = str(error) if isinstance(error, InputError) else f"not JSON, {error}"
        raise InputError(f"problem file {str(path)!r}: {what}") from error


def parse_problem(document: object) -> AllocationProblem:
    """From parsed JSON; lists become tuples. Raises InputError for a missing, unknown or wrong field."""
    known = {f.name: f.default is MISSING for f in fields(AllocationProblem)}
    if not isinstance(document, dict):
        raise InputError(f"expected an object with {', '.join(known)}, got {type(document).__name__}")
    unknown = sorted(set(document) - set(known))
    if unknown:
        raise InputError(f"unknown field {', '.join(map(repr, unknown))}; known: {', '.join(known)}")
    missing = [name for name, is_required in known.items() if is_required and name not in document]
    if missing:
        raise InputError(f"missing field {', '.join(map(repr, missing))}")
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in document.items()
    }
    return AllocationProblem(**values)
