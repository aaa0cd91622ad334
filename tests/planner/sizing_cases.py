"""Small sizing problems, made by hand or drawn at random: costs of a few stages, a cluster of a few GPUs."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from disagmoe_compile.planner.hardware import GPU, Cluster
from disagmoe_compile.planner.sizing_problem import SizingOptions, SizingProblem, TrainingWorkload
from disagmoe_compile.planner.step_costs import ComponentCosts, CostSet, ModelCosts


def component(flops: float, *, parameters: int = 0, activation_bytes: float = 0.0) -> ComponentCosts:
    """Backward twice the forward; with recompute a fifth of the bytes stays, and nine tenths are made again."""
    return ComponentCosts(
        parameters=parameters,
        forward_flops=flops,
        backward_flops=2 * flops,
        activation_bytes=activation_bytes,
        activation_bytes_recompute=activation_bytes / 5,
        second_forward_bytes=activation_bytes * 0.9,
    )


def costs_of(
    *,
    boundaries: int = 2,
    attention: float = 4e9,
    experts: float = 6e9,
    shared: float = 0.0,
    token_bytes: int = 128,
    seq_length: int = 64,
    num_experts: int = 8,
    top_k: int = 2,
    parameters: int = 1000,
    activation_bytes: float = 1e3,
) -> ModelCosts:
    def part(flops: float) -> ComponentCosts:
        used = flops > 0
        return component(flops, parameters=parameters * used, activation_bytes=activation_bytes * used)

    return ModelCosts(
        name="case",
        seq_length=seq_length,
        cost_set=CostSet.CORRECTED,
        element_bytes=2,
        attention=(part(attention),) * boundaries,
        experts=(part(experts),) * boundaries,
        shared=(part(shared),) * boundaries,
        head=part(attention / 3),
        token_bytes=token_bytes,
        residual_bytes_per_token=token_bytes,
        num_experts=num_experts,
        top_k=top_k,
        tied_embeddings=False,
    )


def cluster_of(
    gpus: int = 4, nodes: int = 2, *, nics: int | None = None, memory_bytes: float = 1e9
) -> Cluster:
    """`gpus` and `nics` of a node: 1 TFLOP/s, 1 TB/s of memory, 1 GB/s a NIC, 10 GB/s a link."""
    gpu = GPU("test", 1e12, memory_bytes, 1e12, 1e10, ("assumed",))
    return Cluster("test", gpu, gpus, nics or gpus, 1e9, nodes)


def problem_of(
    costs: ModelCosts | None = None,
    cluster: Cluster | None = None,
    *,
    sequences_per_gpu: int | None = 4,
    global_batch_size: int | None = None,
    micro_batch_size: int | None = None,
    **options: Any,
) -> SizingProblem:
    costs = costs or costs_of()
    if global_batch_size is not None:
        sequences_per_gpu = None
    workload = TrainingWorkload(costs.seq_length, global_batch_size, sequences_per_gpu, micro_batch_size)
    return SizingProblem(costs, cluster or cluster_of(), workload, SizingOptions(**options))


@st.composite
def sizing_problems(draw: st.DrawFn) -> SizingProblem:
    """All axes of the problem, with memory that is now ample, now short, now far too little."""
    costs = costs_of(
        boundaries=draw(st.integers(1, 5)),
        attention=draw(st.sampled_from([1e8, 1e9, 7e9])),
        experts=draw(st.sampled_from([1e8, 2e9, 9e9])),
        shared=draw(st.sampled_from([0.0, 1e9])),
        token_bytes=draw(st.sampled_from([2, 512, 8192])),
        num_experts=draw(st.sampled_from([2, 5, 8])),
        top_k=draw(st.integers(1, 2)),
        parameters=draw(st.sampled_from([0, 1000, 50_000])),
        activation_bytes=draw(st.sampled_from([0.0, 1e3, 2e5])),
    )
    cluster = cluster_of(
        draw(st.integers(1, 4)),
        draw(st.integers(2, 3)),
        nics=draw(st.integers(1, 3)),
        memory_bytes=draw(st.sampled_from([1e5, 1e6, 3e6, 1e9])),
    )
    exact = draw(st.booleans())
    return problem_of(
        costs,
        cluster,
        sequences_per_gpu=None if exact else draw(st.integers(1, 12)),
        global_batch_size=draw(st.sampled_from([6, 16, 40])) if exact else None,
        micro_batch_size=draw(st.none() | st.integers(1, 2)),
        dedup=draw(st.sampled_from(["none", "rank", "node"])),
        free_nics=draw(st.booleans()),
        whole_nodes=draw(st.booleans()),
        shard_optimizer=draw(st.sampled_from([False, None])),
        recompute=draw(st.sampled_from([None, None, "none", "attention", "ffn", "stage"])),
    )
