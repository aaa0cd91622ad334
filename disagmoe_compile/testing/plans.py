"""Small valid plans of any shape, for tests of what consumes plans. No torch, no model."""

from __future__ import annotations

from disagmoe_compile.passes.schedule.af_pipe import af_pipe
from disagmoe_compile.passes.schedule.forward_only import forward_only
from disagmoe_compile.passes.schedule.gpipe import gpipe
from disagmoe_compile.passes.schedule.in_order import in_order
from disagmoe_compile.passes.schedule.lower import lower
from disagmoe_compile.plan.completeness import peak_residency
from disagmoe_compile.plan.ir import Plan, Stage, TensorSpec, Workload
from disagmoe_compile.plan.topology import Role, Topology
from disagmoe_compile.plan.transfers import BoundarySizes, build_transfers

TOKENS, FEATURES, NUM_EXPERTS, TOP_K = 6, 8, 8, 2
GENERATORS = {"af_pipe": af_pipe, "af_pipe_in_order": in_order, "gpipe": gpipe}


def example_plan(
    topology: Topology | None = None,
    n_microbatches: int = 4,
    *,
    schedule: str = "af_pipe",
    split_weight_gradient: bool = True,
    receive_ahead: int = 2,
    training: bool = True,
) -> Plan:
    """A plan that validates clean. Default topology: 2 + 2 ranks, one group of each kind, two boundaries.

    Every attention stage owns one parameter; with a tied head the last uses that of stage 0.
    """
    topology = topology or Topology(2, 2, 1, 1, 2)
    stages = tuple(_stage(topology, index) for index in range(topology.n_stages))
    hidden = TensorSpec("hidden", (TOKENS, FEATURES), "float32")
    position = TensorSpec("position", (TOKENS,), "int64")
    sizes = BoundarySizes(
        tokens=TOKENS,
        top_k=TOP_K,
        in_features=FEATURES,
        out_features=FEATURES,
        token_dtype="float32",
        weight_dtype="float32",
        out_dtype="float32",
        num_experts=NUM_EXPERTS,
        carried=(hidden, position),
        carried_requires_grad=(True, False),
    )
    owned = [stage.index for stage in stages if stage.role is Role.ATTENTION and stage.owned_fqns]
    gradients = {stage: {"float32": FEATURES * FEATURES} for stage in owned}
    transfers = build_transfers(topology, [sizes] * topology.n_boundaries, gradients, training=training)
    step = GENERATORS[schedule](topology, n_microbatches, split_weight_gradient=split_weight_gradient)
    lowered = (
        lower(step, topology, transfers, receive_ahead=receive_ahead, owned_stages=owned)
        if training
        else None
    )
    forward = forward_only(topology, n_microbatches)
    return Plan(
        stages=stages,
        transfers=transfers,
        topology=topology,
        workload=Workload(topology.attention_group_size * n_microbatches, n_microbatches, 1, TOKENS),
        training=lowered,
        forward_only=lower(forward, topology, transfers, receive_ahead=receive_ahead, owned_stages=()),
        resident_limit=max(peak_residency(step).values()),
        graph_fingerprint="example",
        options={"schedule": schedule},
        versions={"disagmoe-compile": "0"},
    )


def _stage(topology: Topology, index: int) -> Stage:
    boundary = index // 2
    hidden = TensorSpec("hidden", (TOKENS, FEATURES), "float32")
    if index % 2:
        fqn = f"layers.{boundary}.experts"
        experts = NUM_EXPERTS
        return Stage(index, Role.FFN, (boundary,), (hidden,), (hidden,), (fqn,), (fqn,), num_experts=experts)
    owned = f"layers.{boundary}.attention"
    is_tied = topology.tied_head and index == topology.n_stages - 1
    used = ("layers.0.attention",) if is_tied else (owned,)
    layers = (boundary,) if boundary < topology.n_boundaries else ()
    return Stage(index, Role.ATTENTION, layers, (hidden,), (hidden,), used, () if is_tied else used)
