"""The one set of constants for every figure. Nothing here, and nothing anywhere else, is changed for a single figure.

Cluster: H800 nodes of the catalogue with its efficiencies; messages and launches as in `simulator/assumptions.py`. We do not
know the paper's batch, parallel sizes or kernels: TOKENS_PER_GPU and EP_SIZE are ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from disagmoe_compile.models.catalogue import find_model
from disagmoe_compile.planner.hardware import find_cluster
from disagmoe_compile.planner.step_costs import Dedup, model_costs
from disagmoe_compile.simulator.search import Setting, best

CLUSTER = "H800-SXM5"
NODES = 8
TOKENS_PER_GPU = 65536
"""Of a step: 8 sequences of 8K, 2 of 32K."""
EP_SIZE = 64
"""The rivals' experts are spread over all 8 nodes, as the paper's share of all-to-all implies; a smaller EP is a figure of
ours.
"""
SIMULATED = 2
"""Choices of a system that are simulated, the best by estimate."""
MODELS = {"deepseek": "DeepSeek-MoE-16B", "gpt-oss": "GPT-OSS-20B", "qwen3": "Qwen3-30B-A3B"}
LENGTHS = (4096, 8192, 16384, 32768)


def setting(
    name: str,
    seq_length: int,
    *,
    nodes: int = NODES,
    dedup: Dedup = Dedup.NONE,
    ep_size: int | None = EP_SIZE,
    top_k: int | None = None,
) -> Setting:
    """The paper's systems send a row for every expert: no de-duplication unless a figure is about it."""
    cluster, spec = find_cluster(CLUSTER, nodes), find_model(MODELS[name])
    if top_k is not None:
        spec = replace(spec, top_k=top_k)
    model = model_costs(spec, seq_length=seq_length)
    if ep_size is not None:
        ep_size = min(ep_size, cluster.gpus, 1 << (model.num_experts.bit_length() - 1))
    sequences = max(1, TOKENS_PER_GPU // seq_length) * cluster.gpus
    return Setting(model, cluster, sequences, dedup, ep_size=ep_size, simulated=SIMULATED)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What figures take from a system's best choice: no timelines, of which there are hundreds. `exposed_s`: of a token.
    `fits`: in memory; where False, no choice of the system does, and it is compared with nothing that fits.
    """

    tokens_per_s_per_gpu: float
    exposed_s: float
    fits: bool
    options: Mapping[str, Any]


@cache
def simulated(
    system: str,
    name: str,
    seq_length: int,
    nodes: int = NODES,
    dedup: Dedup = Dedup.NONE,
    ep_size: int | None = EP_SIZE,
    top_k: int | None = None,
) -> Outcome:
    """A system's best choice; figures share these."""
    found = best(setting(name, seq_length, nodes=nodes, dedup=dedup, ep_size=ep_size, top_k=top_k), system)
    exposed_s = found.exposed_s / (found.tokens / found.gpus)
    return Outcome(found.tokens_per_s_per_gpu, exposed_s, found.fits, found.options)
