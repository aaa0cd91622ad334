"""Schedules on stages of given times, for closed forms: `disagmoe simulate --schedule NAME --stage-times JSON`.

Pipelines (`1f1b, interleaved_1f1b, zb1p, dualpipe, gpipe`): times are per rank and micro-batch over ALL its chunks; one chunk of
v takes 1/v of it. F forward, B full backward (input and weight), W its weight part, FB a forward beside a backward.
AF-Pipe (`af_pipe`): A and F forward times of one stage, C of one exchange; the optional BA and BF are full backwards (default
twice the forward), WA and WF their weight parts (default none: the backward is not split). The head takes no time.

Times may be `Fraction`s, and then so are the results.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction

from disagmoe_compile.errors import InputError
from disagmoe_compile.passes.schedule import af_pipe as af
from disagmoe_compile.passes.schedule.forward_only import forward_only as forward_only_schedule
from disagmoe_compile.passes.schedule.lower import lower_lists
from disagmoe_compile.plan.action import ActionKind
from disagmoe_compile.plan.completeness import peak_residency
from disagmoe_compile.plan.ir import Schedule, Transfer
from disagmoe_compile.plan.sharing import Leg, Link, Number
from disagmoe_compile.plan.topology import Group, Role, Topology
from disagmoe_compile.plan.transfers import BoundarySizes, build_transfers
from disagmoe_compile.simulator.dualpipe import chains, dualpipe
from disagmoe_compile.simulator.pipelines import gpipe, hops, interleaved_1f1b, one_f_one_b, zb1p
from disagmoe_compile.simulator.program import Program

SCHEDULES = ("1f1b", "interleaved_1f1b", "zb1p", "dualpipe", "gpipe", "af_pipe")
_F, _B = ActionKind.FORWARD, ActionKind.BACKWARD
_I, _W = ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT


@dataclass(frozen=True, slots=True)
class PipelineShape:
    """p ranks with v chunks each, and the micro-batches of a step. Raises InputError on a size below 1."""

    ranks: int
    n_microbatches: int
    chunks: int = 1

    def __post_init__(self) -> None:
        _at_least_one(ranks=self.ranks, chunks=self.chunks, n_microbatches=self.n_microbatches)


@dataclass(frozen=True, slots=True)
class AFShape:
    """p A-groups and p F-groups, L layers (each an attention and an expert stage). Raises InputError on a size that cannot be."""

    pipeline_groups: int
    layers: int
    n_microbatches: int
    forward_only: bool = False

    def __post_init__(self) -> None:
        _at_least_one(
            pipeline_groups=self.pipeline_groups, layers=self.layers, n_microbatches=self.n_microbatches
        )
        if self.layers % self.pipeline_groups:
            raise InputError(
                f"{self.layers} layers are not divisible by {self.pipeline_groups} pipeline groups: each group holds "
                "layers / pipeline_groups of them"
            )

    @property
    def topology(self) -> Topology:
        return Topology(1, 1, self.pipeline_groups, self.pipeline_groups, self.layers)


def pipeline_program(name: str, times: Mapping[str, Number], shape: PipelineShape) -> Program:
    """A pipeline without disaggregation. Raises InputError on an unknown name, a missing or negative time, or a bad shape."""
    needed = {"zb1p": ("F", "B", "W"), "dualpipe": ("F", "B", "W", "FB")}.get(name, ("F", "B"))
    checked_times(name, times, needed, optional=("F", "B", "W", "FB"))
    p, v, n = shape.ranks, shape.chunks, shape.n_microbatches
    if v > 1 and name in ("1f1b", "zb1p", "dualpipe"):
        raise InputError(f"{name} has one chunk a rank, got {v} chunks")
    generators: dict[str, Callable[[], Schedule]] = {
        "gpipe": lambda: gpipe(p, v, n),
        "1f1b": lambda: one_f_one_b(p, n),
        "interleaved_1f1b": lambda: interleaved_1f1b(p, v, n),
        "zb1p": lambda: zb1p(p, n),
        "dualpipe": lambda: dualpipe(p, n),
    }
    if name not in generators:
        raise InputError(f"unknown schedule {name!r}; one of {', '.join(SCHEDULES)}")
    schedule = generators[name]()
    transfers = hops(chains(p) if name == "dualpipe" else [range(p * v)])
    stages = range(2 * p if name == "dualpipe" else p * v)
    part = Fraction(1, v) if v > 1 else 1
    f, b, w = (times.get(key, 0) * part for key in ("F", "B", "W"))
    pairs: dict[tuple[tuple[ActionKind, int], ...], Number] = {}
    if name == "dualpipe":
        pairs = {((_F, s), (_B, t)): times["FB"] for s in stages for t in stages}
    return Program(
        schedule=lower_lists(schedule, transfers),
        transfers=transfers,
        seconds={
            (kind, s): value for s in stages for kind, value in ((_F, f), (_B, b), (_I, b - w), (_W, w))
        },
        pairs=pairs,
    )


def af_program(times: Mapping[str, Number], shape: AFShape, interleave: int | None = None) -> Program:
    """AF-Pipe on single ranks. A forward alone has nothing to save memory for: all its micro-batches go together, unless
    `interleave` says otherwise.
    """
    checked_times("af_pipe", times, ("A", "F", "C"), optional=("BA", "BF", "WA", "WF"))
    topology = shape.topology
    n = shape.n_microbatches
    is_split = "WA" in times or "WF" in times
    if shape.forward_only:
        schedule = forward_only_schedule(topology, n, interleave=interleave or n)
    else:
        schedule = af.af_pipe(topology, n, split_weight_gradient=is_split, interleave=interleave)
    transfers = af_transfers(topology, training=not shape.forward_only)
    last = f"combine.{shape.layers - 1}"
    exchange = times["C"]
    messages: dict[str, tuple[Leg, ...]] = {}
    links: dict[Link, Number] = {}
    for group in topology.groups:
        links |= {(str(group), side): Fraction(1) for side in ("send", "recv")}
    for transfer in transfers:
        is_exchange = transfer.name.split(".")[0] in ("dispatch", "combine", "combine_bwd", "dispatch_bwd")
        is_last = last in (transfer.name, transfer.backward_of)
        if is_exchange and not is_last:
            messages[transfer.name] = (Leg(exchange, _ends(topology, transfer)),)
    return Program(
        schedule=lower_lists(schedule, transfers),
        transfers=transfers,
        seconds=_af_seconds(times, topology),
        messages=messages,
        links=links,
    )


def resident_activations(schedule: Schedule, topology: Topology) -> dict[Group, int]:
    """The most (micro-batch, layer) activations each group holds at once; the head is not a layer."""
    head = topology.n_stages - 1
    actions = {
        group: tuple(action for action in listed if action.stage != head)
        for group, listed in schedule.actions.items()
    }
    return peak_residency(Schedule(schedule.name, schedule.lowered, actions))


def af_transfers(topology: Topology, training: bool) -> tuple[Transfer, ...]:
    """AF-Pipe's transfers where only their names and ends matter."""
    sizes = BoundarySizes(1, 1, 1, 1, "bfloat16", "bfloat16", "bfloat16", 1)
    return build_transfers(topology, [sizes] * topology.n_boundaries, training=training)


def checked_times(
    name: str, times: Mapping[str, Number], needed: tuple[str, ...], optional: tuple[str, ...]
) -> None:
    """Raises InputError unless every time is known, there, and not negative, and no weight part exceeds its backward."""
    known = dict.fromkeys((*needed, *optional))
    for key, value in times.items():
        if key not in known:
            raise InputError(f"unknown stage time {key!r} for {name}; known: {', '.join(known)}")
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float | Fraction)
            or not 0 <= value < float("inf")
        ):
            raise InputError(f"stage time {key} must be a number of at least 0, got {value}")
    for key in needed:
        if key not in times:
            raise InputError(f"{name} needs the stage time {key}; it takes {', '.join(known)}")
    for weight, backward in (("W", "B"), ("WA", "BA"), ("WF", "BF")):
        if weight in times and backward in times and times[weight] > times[backward]:
            raise InputError(
                f"stage time {weight} = {times[weight]} is part of {backward} = {times[backward]} and cannot be longer"
            )


def _af_seconds(times: Mapping[str, Number], topology: Topology) -> dict[tuple[ActionKind, int], Number]:
    seconds: dict[tuple[ActionKind, int], Number] = {}
    for stage in range(topology.n_stages - 1):
        key = "F" if topology.role_of_stage(stage) is Role.FFN else "A"
        forward = times[key]
        backward = times.get(f"B{key}", 2 * forward)
        weight = times.get(f"W{key}", 0)
        seconds |= {(_F, stage): forward, (_B, stage): backward}
        seconds |= {(_I, stage): backward - weight, (_W, stage): weight}
    head = topology.n_stages - 1
    return seconds | {(kind, head): 0 for kind in (_F, _B, _I, _W)}


def _ends(topology: Topology, transfer: Transfer) -> tuple[tuple[str, str], tuple[str, str]]:
    return (
        (str(topology.group_of_stage(transfer.src)), "send"),
        (str(topology.group_of_stage(transfer.dst)), "recv"),
    )


def _at_least_one(**sizes: int) -> None:
    for name, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InputError(f"{name} must be a whole number of at least 1, got {value!r}")
