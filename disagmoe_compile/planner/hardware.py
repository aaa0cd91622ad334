"""What a cluster is to the planner: GPUs, links, NICs, and where their numbers come from.

The catalogue (`data/hardware.json`) holds vendors' numbers: dense bf16 FLOP/s, bytes/s in ONE direction. They are peaks; what
kernels reach of them is in `Cluster.efficiencies` (`efficiency.py`). Units here: FLOP/s, bytes, bytes/s.

A cluster file is one JSON object with the names of `Cluster.to_dict`. With "base": "H800-SXM5" it only states what differs:

    {"base": "H800-SXM5", "nodes": 16, "nics_per_node": 4,
     "efficiencies": {"network": 0.85, "gemm": {"value": 0.6, "source": "measured on 3 March"}}}
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from disagmoe_compile.errors import InputError
from disagmoe_compile.planner.efficiency import ASSUMED, Efficiencies, Efficiency, uniform

_GIGA = 1e9


@dataclass(frozen=True, slots=True)
class GPU:
    """One accelerator. `link_bytes_per_s`: to another GPU of its node, one direction. `sources` says who states the numbers."""

    name: str
    flops: float
    memory_bytes: float
    memory_bytes_per_s: float
    link_bytes_per_s: float
    sources: tuple[str, ...]
    notes: str = ""

    def __post_init__(self) -> None:
        for name in ("flops", "memory_bytes", "memory_bytes_per_s", "link_bytes_per_s"):
            if not _is_positive(getattr(self, name)):
                raise InputError(
                    f"{name} of GPU {self.name!r} must be a positive number, got {getattr(self, name)!r}"
                )
        if not self.sources:
            raise InputError(
                f"GPU {self.name!r} needs a source for its numbers; write '{ASSUMED}' if there is none"
            )

    @property
    def is_assumed(self) -> bool:
        """True where the numbers are a guess: no split or time made from them is a measurement."""
        return ASSUMED in self.sources


@dataclass(frozen=True, slots=True)
class Cluster:
    """`nodes` equal nodes. `nic_bytes_per_s` is one NIC's, one direction. `efficiencies`: what is reached of these peaks; where
    none are given, all of it.
    """

    name: str
    gpu: GPU
    gpus_per_node: int
    nics_per_node: int
    nic_bytes_per_s: float
    nodes: int = 1
    efficiencies: Efficiencies = field(default_factory=lambda: uniform(1.0))

    def __post_init__(self) -> None:
        for name in ("gpus_per_node", "nics_per_node", "nodes"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InputError(
                    f"{name} of cluster {self.name!r} must be a whole number of at least 1, got {value!r}"
                )
        if not _is_positive(self.nic_bytes_per_s):
            raise InputError(
                f"nic_bytes_per_s of cluster {self.name!r} must be a positive number, got {self.nic_bytes_per_s!r}"
            )

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def nics(self) -> int:
        return self.nodes * self.nics_per_node

    @property
    def ridge_flops_per_byte(self) -> float:
        """Reached FLOP/s of large matmuls over reached bytes/s of memory: below it reading the weights takes longer."""
        reached = self.efficiencies
        return (self.gpu.flops * reached.gemm.value) / (self.gpu.memory_bytes_per_s * reached.memory.value)

    def with_nodes(self, nodes: int) -> Cluster:
        return replace(self, nodes=nodes)

    def to_dict(self) -> dict[str, Any]:
        """The numbers under the names of this file, for plans and `disagmoe clusters --json`."""
        return {
            "name": self.name,
            "nodes": self.nodes,
            "gpus_per_node": self.gpus_per_node,
            "nics_per_node": self.nics_per_node,
            "gpu_flops": self.gpu.flops,
            "memory_bytes": self.gpu.memory_bytes,
            "memory_bytes_per_s": self.gpu.memory_bytes_per_s,
            "link_bytes_per_s": self.gpu.link_bytes_per_s,
            "nic_bytes_per_s": self.nic_bytes_per_s,
            "efficiencies": self.efficiencies.to_dict(),
            "assumed": self.gpu.is_assumed,
            "sources": list(self.gpu.sources),
            "notes": self.gpu.notes,
        }


@cache
def catalogue() -> Mapping[str, Cluster]:
    """The known node types by name, each as a cluster of one node."""
    text = (
        resources.files("disagmoe_compile.planner").joinpath("data/hardware.json").read_text(encoding="utf-8")
    )
    document = json.loads(text)
    reached = Efficiencies(**{name: Efficiency(**entry) for name, entry in document["efficiencies"].items()})
    clusters = (_node_type(entry, reached) for entry in document["gpus"])
    return {cluster.name: cluster for cluster in clusters}


def find_cluster(name_or_path: str, nodes: int | None = None) -> Cluster:
    """Of the catalogue, by name or a beginning of it that only one has (case does not matter), or from a cluster file.

    `nodes`: 1 if not given, of a file what it says. Raises InputError.
    """
    path = Path(name_or_path)
    if path.suffix == ".json" or path.is_file():
        found = load_cluster_file(path)
        return found if nodes is None else found.with_nodes(nodes)
    known = catalogue()
    wanted = name_or_path.strip().lower()
    exact = [c for key, c in known.items() if key.lower() == wanted]
    matches = exact or [c for key, c in known.items() if wanted and key.lower().startswith(wanted)]
    if len(matches) == 1:
        return matches[0].with_nodes(1 if nodes is None else nodes)
    what = f"fits {', '.join(c.name for c in matches)}" if matches else "is not in the catalogue"
    raise InputError(f"cluster {name_or_path!r} {what}; known: {', '.join(known)}; or give a cluster file")


def load_cluster_file(path: Path) -> Cluster:
    """The cluster of a file as in the module docstring. Raises InputError naming the file and the field."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise InputError(f"cannot read the cluster file {str(path)!r}: {reason}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"cluster file {str(path)!r}: not JSON, {error}") from error
    try:
        return parse_cluster(document, name=path.stem)
    except InputError as error:
        raise InputError(f"cluster file {str(path)!r}: {error}") from error


_GPU_FIELDS = {
    "gpu_flops": "flops",
    "memory_bytes": "memory_bytes",
    "memory_bytes_per_s": "memory_bytes_per_s",
    "link_bytes_per_s": "link_bytes_per_s",
}
_NODE_FIELDS = ("gpus_per_node", "nics_per_node", "nic_bytes_per_s")
_OPTIONAL_FIELDS = ("base", "name", "nodes", "efficiencies", "sources", "notes", "assumed")


def parse_cluster(document: object, *, name: str) -> Cluster:
    """From parsed JSON; numbers that it does not state are its base's. Without efficiencies or a base all of the peaks is meant.

    Raises InputError for a missing, unknown or impossible field.
    """
    required = (*_NODE_FIELDS, *_GPU_FIELDS)
    if not isinstance(document, dict):
        raise InputError(f"expected an object with {', '.join(required)}, got {type(document).__name__}")
    unknown = sorted(set(document) - {*required, *_OPTIONAL_FIELDS})
    if unknown:
        raise InputError(
            f"unknown field {', '.join(map(repr, unknown))}; known: {', '.join((*required, *_OPTIONAL_FIELDS))}"
        )
    stated = {**_numbers_of_base(document), **document}
    missing = [field for field in required if field not in stated]
    if missing:
        raise InputError(
            f"missing field {', '.join(map(repr, missing))}; state it, or a base from the catalogue"
        )
    base = find_cluster(document["base"]) if "base" in document else None
    reached = uniform(1.0) if base is None else base.efficiencies
    sources = stated.get("sources", [])
    if not document.get("sources") and any(field in document for field in required):
        sources = [*sources, ASSUMED]
    if not isinstance(sources, list) or not all(isinstance(source, str) for source in sources):
        raise InputError(f"sources must be a list of texts, got {sources!r}")
    name = str(stated.get("name", name))
    return Cluster(
        name=name,
        gpu=GPU(
            name=name,
            **{field: stated[key] for key, field in _GPU_FIELDS.items()},
            sources=tuple(sources),
            notes=str(stated.get("notes", "")),
        ),
        **{field: stated[field] for field in _NODE_FIELDS},
        nodes=stated.get("nodes", 1),
        efficiencies=reached.overridden(document.get("efficiencies", {})),
    )


def _numbers_of_base(document: Mapping[str, Any]) -> dict[str, Any]:
    if "base" not in document:
        return {}
    if not isinstance(document["base"], str) or document["base"].endswith(".json"):
        raise InputError(f"base must be a name of the catalogue, got {document['base']!r}")
    return {key: value for key, value in find_cluster(document["base"]).to_dict().items() if key != "name"}


def local_cpu(n_ranks: int) -> Cluster:
    """`n_ranks` processes of this machine, one core each, talking over the loopback device: ASSUMED numbers, not measured.

    40 GFLOP/s fp32 a core, 2 GB/s one way through gloo for each process, 4 GB of memory a rank. Of these, only FLOP/s over
    bytes/s, 20 FLOPs a byte, decides a split of ranks.
    """
    core = GPU(
        name="cpu core",
        flops=40e9,
        memory_bytes=4e9,
        memory_bytes_per_s=10e9,
        link_bytes_per_s=2e9,
        sources=(ASSUMED,),
        notes="one core a rank; numbers are assumed, not measured",
    )
    return Cluster("local-cpu", core, gpus_per_node=n_ranks, nics_per_node=n_ranks, nic_bytes_per_s=2e9)


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _node_type(entry: Mapping[str, Any], reached: Efficiencies) -> Cluster:
    gpu = GPU(
        name=entry["name"],
        flops=entry["bf16_dense_tflops"] * 1e12,
        memory_bytes=entry["hbm_gb"] * _GIGA,
        memory_bytes_per_s=entry["hbm_gb_per_s"] * _GIGA,
        link_bytes_per_s=entry["nvlink_unidir_gb_per_s"] * _GIGA,
        sources=tuple(entry["sources"]),
        notes=entry.get("notes", ""),
    )
    return Cluster(
        name=gpu.name,
        gpu=gpu,
        gpus_per_node=entry["gpus_per_node"],
        nics_per_node=entry["nics_per_node"],
        nic_bytes_per_s=entry["nic_gbit_per_s"] * _GIGA / 8,
        efficiencies=reached.overridden(entry.get("efficiencies", {})),
    )
