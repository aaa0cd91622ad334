"""A plan as a file: JSON that people can read, diff and edit. Actions are their texts, one a line.

Reading is strict: an unknown or missing key, a wrong version or a value that makes no sense is a PlanError naming where it is.
Reading does not validate; see `validate.check`.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from disagmoe_compile.errors import PlanError
from disagmoe_compile.plan.action import Action
from disagmoe_compile.plan.collector import collector_paused
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
from disagmoe_compile.plan.topology import Group, Role, Topology

SCHEMA_VERSION = 1

T = TypeVar("T")
Reader = Callable[[Any, str], T]


def dump(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write the plan; equal plans give equal files. Raises PlanError where `options` or `hardware` hold what JSON cannot."""
    try:
        text = json.dumps(to_dict(plan), sort_keys=True, indent=1, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise PlanError(f"the plan cannot be written as JSON: {error}") from None
    Path(path).write_text(text + "\n", encoding="utf-8")


def load(path: str | os.PathLike[str]) -> Plan:
    """Read a plan file. Raises PlanError, naming the file and the key, if it is missing or malformed."""
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise PlanError(f"cannot read plan file {path}: {error.strerror}") from None
    except ValueError as error:
        raise PlanError(f"plan file {path} is not JSON: {error}") from None
    try:
        return from_dict(document)
    except PlanError as error:
        raise PlanError(f"plan file {path}: {error}") from None


@collector_paused()
def to_dict(plan: Plan) -> dict[str, Any]:
    """The plan as JSON values: dicts, lists, strings, numbers, booleans and None."""
    return {"schema_version": SCHEMA_VERSION, **_write(plan)}


def _write(value: Any) -> Any:
    if isinstance(value, Action | Group):
        return str(value)
    if isinstance(value, Enum):
        return value.value
    if dataclasses.is_dataclass(value):
        return {field.name: _write(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _write(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_write(item) for item in value]
    return value


@collector_paused()
def from_dict(document: Any) -> Plan:
    """Inverse of `to_dict`. Raises PlanError naming the key that is unknown, missing or malformed."""
    if not isinstance(document, dict) or "schema_version" not in document:
        raise PlanError("not a plan: it has no schema_version")
    version = document["schema_version"]
    if version != SCHEMA_VERSION:
        raise PlanError(
            f"plan has schema_version {version!r}, this version reads {SCHEMA_VERSION}: write it again"
        )
    return _plan({key: value for key, value in document.items() if key != "schema_version"}, "plan")


def _read(
    build: Callable[..., T],
    value: Any,
    where: str,
    readers: Mapping[str, Reader[Any]],
    optional: frozenset[str] = frozenset(),
) -> T:
    """Build a dataclass from a JSON object that has exactly the keys of `readers`; `optional` ones have a default."""
    if not isinstance(value, dict):
        raise PlanError(f"{where} must be an object, got {_shown(value)}")
    for key in value:
        if key not in readers:
            raise PlanError(f"unknown key {where}.{key}; known: {', '.join(sorted(readers))}")
    for key in readers:
        if key not in value and key not in optional:
            raise PlanError(f"missing key {where}.{key}")
    fields = {key: reader(value[key], f"{where}.{key}") for key, reader in readers.items() if key in value}
    return _built(lambda: build(**fields), where)


def _built(build: Callable[[], T], where: str) -> T:
    """Errors of the classes' own validation, with the place in the file."""
    try:
        return build()
    except PlanError:
        raise
    except (ValueError, TypeError) as error:
        raise PlanError(f"{where}: {error}") from None


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _int(value: Any, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise PlanError(f"{where} must be a whole number, got {_shown(value)}")
    return value


def _bool(value: Any, where: str) -> bool:
    if not isinstance(value, bool):
        raise PlanError(f"{where} must be true or false, got {_shown(value)}")
    return value


def _str(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise PlanError(f"{where} must be a string, got {_shown(value)}")
    return value


def _mapping(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise PlanError(f"{where} must be an object, got {_shown(value)}")
    return value


def _versions(value: Any, where: str) -> dict[str, str]:
    return {key: _str(item, f"{where}.{key}") for key, item in _mapping(value, where).items()}


def _optional(reader: Reader[T]) -> Reader[T | None]:
    return lambda value, where: None if value is None else reader(value, where)


def _tuple(reader: Reader[T]) -> Reader[tuple[T, ...]]:
    def read(value: Any, where: str) -> tuple[T, ...]:
        if not isinstance(value, list):
            raise PlanError(f"{where} must be a list, got {_shown(value)}")
        return tuple(reader(item, f"{where}[{k}]") for k, item in enumerate(value))

    return read


def _parsed(parse: Callable[[str], T]) -> Reader[T]:
    return lambda value, where: _built(lambda: parse(_str(value, where)), where)


_action: Reader[Action] = _parsed(Action.parse)


def _dim(value: Any, where: str) -> int | TokenDim:
    if isinstance(value, dict):
        return _read(TokenDim, value, where, {"name": _str, "upper_bound": _int})
    return _int(value, where)


def _tensor(value: Any, where: str) -> TensorSpec:
    return _read(TensorSpec, value, where, {"name": _str, "shape": _tuple(_dim), "dtype": _str})


def _stage(value: Any, where: str) -> Stage:
    readers: dict[str, Reader[Any]] = {
        "index": _int,
        "role": _parsed(Role),
        "layers": _tuple(_int),
        "inputs": _tuple(_tensor),
        "outputs": _tuple(_tensor),
        "param_fqns": _tuple(_str),
        "owned_fqns": _tuple(_str),
        "num_experts": _optional(_int),
        "forward_flops": _int,
        "activation_bytes": _int,
        "second_forward_bytes": _int,
        "expert_of": lambda item, at: {key: _int(e, f"{at}.{key}") for key, e in _mapping(item, at).items()},
    }
    # Plans of before experts could have separate parameters, and of before second forwards were counted, do not have these.
    return _read(Stage, value, where, readers, optional=frozenset({"expert_of", "second_forward_bytes"}))


def _transfer(value: Any, where: str) -> Transfer:
    readers: dict[str, Reader[Any]] = {
        "name": _str,
        "kind": _parsed(TransferKind),
        "direction": _parsed(Direction),
        "src": _int,
        "dst": _int,
        "payload": _tuple(_tensor),
        "splits": _parsed(Splits),
        "backward_of": _optional(_str),
    }
    return _read(Transfer, value, where, readers)


def _topology(value: Any, where: str) -> Topology:
    sizes = ("attention_group_size", "ffn_group_size", "attention_groups", "ffn_groups", "n_boundaries")
    return _read(Topology, value, where, {**dict.fromkeys(sizes, _int), "tied_head": _bool})


def _workload(value: Any, where: str) -> Workload:
    sizes = ("global_batch_size", "n_microbatches", "microbatch_size", "tokens_per_sample")
    return _read(Workload, value, where, dict.fromkeys(sizes, _int))


def _lists(value: Any, where: str) -> dict[Group, tuple[Action, ...]]:
    lists = _mapping(value, where)
    return {
        _parsed(Group.parse)(name, where): _tuple(_action)(actions, f"{where}.{name}")
        for name, actions in lists.items()
    }


def _schedule(value: Any, where: str) -> Schedule:
    return _read(Schedule, value, where, {"name": _str, "lowered": _bool, "actions": _lists})


def _plan(value: Any, where: str) -> Plan:
    readers: dict[str, Reader[Any]] = {
        "stages": _tuple(_stage),
        "transfers": _tuple(_transfer),
        "topology": _topology,
        "workload": _workload,
        "training": _optional(_schedule),
        "forward_only": _schedule,
        "resident_limit": _int,
        "graph_fingerprint": _str,
        "options": _mapping,
        "hardware": _mapping,
        "versions": _versions,
    }
    return _read(Plan, value, where, readers)
