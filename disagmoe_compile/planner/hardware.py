"""What a cluster is to the planner: GPUs, links, NICs, and where their numbers come from.

The catalogue (`data/hardware.json`) holds vendors' numbers: dense bf16 FLOP/s, bytes/s in ONE direction. They are peaks; what a
kernel reaches is the cost model's matter. Units here: FLOP/s, bytes, bytes/s.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Any

from disagmoe_compile.errors import InputError

ASSUMED = "assumed"
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
        for field in ("flops", "memory_bytes", "memory_bytes_per_s", "link_bytes_per_s"):
            if not getattr(self, field) > 0:
                raise InputError(f"{field} of GPU {self.name!r} must be positive, got {getattr(self, field)}")
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
    """`nodes` equal nodes. `nic_bytes_per_s` is one NIC's, one direction."""

    name: str
    gpu: GPU
    gpus_per_node: int
    nics_per_node: int
    nic_bytes_per_s: float
    nodes: int = 1

    def __post_init__(self) -> None:
        for field in ("gpus_per_node", "nics_per_node", "nodes"):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InputError(
                    f"{field} of cluster {self.name!r} must be a whole number of at least 1, got {value!r}"
                )
        if not self.nic_bytes_per_s > 0:
            raise InputError(
                f"nic_bytes_per_s of cluster {self.name!r} must be positive, got {self.nic_bytes_per_s}"
            )

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def nics(self) -> int:
        return self.nodes * self.nics_per_node

    @property
    def has_nic_per_gpu(self) -> bool:
        """Then a group of ranks brings its own NICs, and they cannot be shared out freely."""
        return self.gpus_per_node == self.nics_per_node

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
    clusters = (_node_type(entry) for entry in json.loads(text)["gpus"])
    return {cluster.name: cluster for cluster in clusters}


def find_cluster(name: str, nodes: int = 1) -> Cluster:
    """Of the catalogue, by name or a beginning of it that only one has; case does not matter. Raises InputError."""
    known = catalogue()
    wanted = name.strip().lower()
    exact = [c for key, c in known.items() if key.lower() == wanted]
    matches = exact or [c for key, c in known.items() if wanted and key.lower().startswith(wanted)]
    if len(matches) == 1:
        return matches[0].with_nodes(nodes)
    what = f"fits {', '.join(c.name for c in matches)}" if matches else "is not in the catalogue"
    raise InputError(f"cluster {name!r} {what}; known: {', '.join(known)}")


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


def _node_type(entry: Mapping[str, Any]) -> Cluster:
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
    )
