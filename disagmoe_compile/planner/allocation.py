"""How many GPUs and NICs go to attention and how many to the experts: the bare allocation problem.

A stage of component c (A attention, F experts) on M_c GPUs and N_c NICs takes, by the roofline,

    T_c = max(C_c / (M_c P), V / (N_c B))        C_c FLOPs and V bytes of a stage, P FLOP/s a GPU, B bytes/s a NIC

Phase 1 minimises T = max(T_A, T_F). With R = 1/T every constraint is linear, and HiGHS solves

    maximise R                                                              named in the model as
    R C_c <= P M_c          for c in A, F        compute roof               compute[c]
    R V   <= B N_c          for c in A, F        communication roof         exchange[c]
    M_A + M_F = gpus,  M_c >= 1                  all GPUs shared out        gpus
    N_A + N_F = nics,  N_c >= 1                  all NICs shared out        nics
    M_A in an allowed set                        optional                   choice, pick
    N_A = M_A                                    optional                   nics_follow_gpus

Its tolerances (1e-6) are wider than the differences between splits of a large cluster, so the answer is checked in exact
rational arithmetic: a split that is strictly faster is looked for, and taken, until there is none.

Phase 2 takes, among the splits within 1e-9 of T* (input numbers are rounded; ties are not), the largest sum over c of
min(1, I_c / ridge_c), with I_c = C_c / V and ridge_c = M_c P / (N_c B). The paper's own phase 2 sums I_c alone, which no split
changes. The ratio N_c / M_c is not linear, but the ties form a box in (M_A, N_A), and for a given M_A the sum is concave and
piecewise linear in N_A: its maximum lies at a breakpoint or an end, so the box is searched exactly. Splits that are still
equal: NICs as even as possible, then fewest attention GPUs.

Simplifications, on purpose: whole GPUs are interchangeable, compute and communication overlap fully, one exchange a stage and
direction, no memory limit, no node boundaries.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any

from disagmoe_compile.errors import InputError
from disagmoe_compile.planner.highs import LinearModel, SolverReport, solve_model

TIE_TOLERANCE = Fraction(1, 10**9)
MOST_DEVICES = 100_000


@dataclass(frozen=True, slots=True)
class AllocationProblem:
    """FLOPs and bytes are of one stage and one direction; `gpu_flops` FLOP/s a GPU, `nic_bytes_per_s` bytes/s a NIC.

    `allowed_attention_gpus`, `allowed_ffn_gpus` restrict the sizes of the groups. `nics_follow_gpus`: each GPU has a NIC of its
    own, so a group's NICs are its GPUs'. Raises InputError naming the field and its value.
    """

    attention_flops: float
    ffn_flops: float
    exchange_bytes: float
    gpus: int
    nics: int
    gpu_flops: float
    nic_bytes_per_s: float
    allowed_attention_gpus: tuple[int, ...] | None = None
    allowed_ffn_gpus: tuple[int, ...] | None = None
    nics_follow_gpus: bool = False

    def __post_init__(self) -> None:
        for name in ("attention_flops", "ffn_flops", "gpu_flops", "nic_bytes_per_s"):
            if not _is_amount(getattr(self, name)):
                raise InputError(
                    f"{name} must be a positive number (1e-100 to 1e100), got {getattr(self, name)!r}"
                )
        if not _is_amount(self.exchange_bytes) and (
            isinstance(self.exchange_bytes, bool) or self.exchange_bytes != 0
        ):
            raise InputError(f"exchange_bytes must be 0 or a positive number, got {self.exchange_bytes!r}")
        for name in ("gpus", "nics"):
            count = getattr(self, name)
            if not _is_whole_number(count) or not 2 <= count <= MOST_DEVICES:
                raise InputError(
                    f"{name} must be a whole number from 2 (one for attention, one for the experts) to {MOST_DEVICES}, "
                    f"got {count!r}"
                )
        for name in ("allowed_attention_gpus", "allowed_ffn_gpus"):
            allowed = getattr(self, name)
            if allowed is not None and not _is_set_of_sizes(allowed):
                raise InputError(f"{name} must be a list of whole numbers of at least 1, got {allowed!r}")
        if self.nics_follow_gpus and self.gpus != self.nics:
            raise InputError(f"nics_follow_gpus needs a NIC a GPU, got {self.gpus} GPUs and {self.nics} NICs")

    @property
    def is_free(self) -> bool:
        """True where no set of allowed sizes is given."""
        return self.allowed_attention_gpus is None and self.allowed_ffn_gpus is None

    def attention_choices(self) -> Sequence[int]:
        """Numbers of attention GPUs that satisfy the allowed sets, ascending. Raises InputError where there is none."""
        choices: Sequence[int] = range(1, self.gpus)
        if self.allowed_attention_gpus is not None:
            choices = sorted({n for n in self.allowed_attention_gpus if n < self.gpus})
        if self.allowed_ffn_gpus is not None:
            allowed_ffn = frozenset(self.allowed_ffn_gpus)
            choices = [n for n in choices if self.gpus - n in allowed_ffn]
        if not choices:
            raise InputError(
                f"no split of {self.gpus} GPUs: attention may take {_listed(self.allowed_attention_gpus)}, the experts "
                f"{_listed(self.allowed_ffn_gpus)}, and no two of these sum to {self.gpus}; change the number of GPUs or "
                "allow more sizes"
            )
        return choices


@dataclass(frozen=True, slots=True)
class Allocation:
    """The best split. Times are seconds of one stage; `t_star_s` is the larger one.

    `balance_score` in [0, 2]: sum over both components of min(1, intensity / ridge); 2 means that neither waits for its NICs.
    """

    attention_gpus: int
    ffn_gpus: int
    attention_nics: int
    ffn_nics: int
    t_attention_s: float
    t_ffn_s: float
    t_star_s: float
    balance_score: float
    solver: SolverReport

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def solve(problem: AllocationProblem, *, time_limit_s: float = 60) -> Allocation:
    """The optimal split of `problem`. Raises InputError where none exists or HiGHS is not installed."""
    started = time.monotonic()
    roofs = _Roofs(problem)
    # A unit of R that puts its optimum near 1: the time if GPUs and NICs could be cut into any fractions.
    unit_s = roofs.continuous_bound()
    solution = solve_model(_linear_model(problem, roofs, unit_s), time_limit_s=time_limit_s)
    attention_gpus = min(
        problem.attention_choices(), key=lambda m: abs(m - solution.values["attention_gpus"])
    )
    seed = (attention_gpus, min(max(round(solution.values["attention_nics"]), 1), problem.nics - 1))
    t_star = _improve_exactly(problem, roofs, seed)
    split = _most_balanced(problem, roofs, t_star * (1 + TIE_TOLERANCE))
    t_attention, t_ffn = roofs.times(split)
    t_split = max(t_attention, t_ffn)
    bound_s = min(float(unit_s) / solution.bound, float(t_star))
    return Allocation(
        attention_gpus=split[0],
        ffn_gpus=problem.gpus - split[0],
        attention_nics=split[1],
        ffn_nics=problem.nics - split[1],
        t_attention_s=float(t_attention),
        t_ffn_s=float(t_ffn),
        t_star_s=float(t_split),
        balance_score=float(roofs.balance(split)),
        solver=SolverReport(
            name=solution.solver,
            status=solution.status,
            bound=bound_s,
            gap=max(0.0, 1 - bound_s / float(t_split)),
            seconds=time.monotonic() - started,
        ),
    )


Split = tuple[int, int]  # GPUs and NICs of attention; the experts have the rest


class _Roofs:
    """The problem in exact arithmetic: seconds that one GPU, or one NIC, alone would take for each part."""

    def __init__(self, problem: AllocationProblem) -> None:
        self.gpus, self.nics = problem.gpus, problem.nics
        peak = Fraction(problem.gpu_flops)
        self.attention_s = Fraction(problem.attention_flops) / peak
        self.ffn_s = Fraction(problem.ffn_flops) / peak
        self.exchange_s = Fraction(problem.exchange_bytes) / Fraction(problem.nic_bytes_per_s)

    def continuous_bound(self) -> Fraction:
        """T* >= max((C_A + C_F) / (gpus P), 2 V / (nics B)), for any split."""
        return max((self.attention_s + self.ffn_s) / self.gpus, 2 * self.exchange_s / self.nics)

    def times(self, split: Split) -> tuple[Fraction, Fraction]:
        """T_A and T_F in seconds."""
        gpus, nics = split
        return (
            max(self.attention_s / gpus, self.exchange_s / nics),
            max(self.ffn_s / (self.gpus - gpus), self.exchange_s / (self.nics - nics)),
        )

    def intensity_ratios(self, gpus: int) -> tuple[Fraction, Fraction] | None:
        """I_c / ridge_c for one NIC of each component, with `gpus` for attention; None where nothing is exchanged."""
        if not self.exchange_s:
            return None
        return self.attention_s / self.exchange_s / gpus, self.ffn_s / self.exchange_s / (self.gpus - gpus)

    def balance(self, split: Split) -> Fraction:
        ratios = self.intensity_ratios(split[0])
        if ratios is None:
            return Fraction(2)
        return min(Fraction(1), ratios[0] * split[1]) + min(Fraction(1), ratios[1] * (self.nics - split[1]))


def _linear_model(problem: AllocationProblem, roofs: _Roofs, unit_s: Fraction) -> LinearModel:
    """The model of the module docstring, with R in units of 1 / `unit_s`."""
    model = LinearModel()
    model.variable("rate", upper=2.0)
    model.variable("attention_gpus", lower=1, upper=problem.gpus - 1, is_integer=True)
    model.variable("ffn_gpus", lower=1, upper=problem.gpus - 1, is_integer=True)
    model.variable("attention_nics", lower=1, upper=problem.nics - 1, is_integer=True)
    model.variable("ffn_nics", lower=1, upper=problem.nics - 1, is_integer=True)
    model.equal("gpus", {"attention_gpus": 1, "ffn_gpus": 1}, problem.gpus)
    model.equal("nics", {"attention_nics": 1, "ffn_nics": 1}, problem.nics)
    exchange = float(roofs.exchange_s / unit_s)
    for component, seconds in (("attention", roofs.attention_s), ("ffn", roofs.ffn_s)):
        compute = float(seconds / unit_s)
        model.at_most(f"compute[{component}]", {"rate": compute, f"{component}_gpus": -1}, 0)
        model.at_most(f"exchange[{component}]", {"rate": exchange, f"{component}_nics": -1}, 0)
    if not problem.is_free:
        choices = problem.attention_choices()
        for size in choices:
            model.variable(f"pick[{size}]", upper=1, is_integer=True)
        model.equal("choice", {f"pick[{size}]": 1 for size in choices}, 1)
        model.equal("pick", {"attention_gpus": -1, **{f"pick[{size}]": size for size in choices}}, 0)
    if problem.nics_follow_gpus:
        model.equal("nics_follow_gpus", {"attention_gpus": 1, "attention_nics": -1}, 0)
    model.maximise("rate")
    return model


def _improve_exactly(problem: AllocationProblem, roofs: _Roofs, split: Split) -> Fraction:
    """T* in exact arithmetic: from the solver's split to one that none beats. Ends, as the times fall and are finitely many."""
    t_star = max(roofs.times(_with_tied_nics(problem, split)))
    while True:
        faster = _first_within(problem, roofs, t_star, strictly=True)
        if faster is None:
            return t_star
        t_star = max(roofs.times(faster))


def _box(roofs: _Roofs, t: Fraction, strictly: bool) -> tuple[range, range]:
    """Attention GPUs and attention NICs with which no part takes longer than `t` (or each takes less)."""

    def least(seconds: Fraction) -> int:
        return max(1, math.floor(seconds / t) + 1 if strictly else math.ceil(seconds / t))

    exchange = least(roofs.exchange_s)
    return (
        range(least(roofs.attention_s), roofs.gpus - least(roofs.ffn_s) + 1),
        range(exchange, roofs.nics - exchange + 1),
    )


def _first_within(problem: AllocationProblem, roofs: _Roofs, t: Fraction, strictly: bool) -> Split | None:
    gpus, nics = _box(roofs, t, strictly)
    if not nics:
        return None
    for size in problem.attention_choices():
        if size in gpus:
            split = _with_tied_nics(problem, (size, nics.start))
            if split[1] in nics:
                return split
    return None


def _with_tied_nics(problem: AllocationProblem, split: Split) -> Split:
    return (split[0], split[0]) if problem.nics_follow_gpus else split


def _most_balanced(problem: AllocationProblem, roofs: _Roofs, t: Fraction) -> Split:
    """Phase 2: of all splits within `t`, the one of the largest balance; ties as in the module docstring."""
    gpus, nics = _box(roofs, t, strictly=False)

    def preference(split: Split) -> tuple[Fraction, int, int, int]:
        return (-roofs.balance(split), abs(roofs.nics - 2 * split[1]), *split)

    candidates = (
        _with_tied_nics(problem, (size, count))
        for size in problem.attention_choices()
        if size in gpus
        for count in ((size,) if problem.nics_follow_gpus else _nic_candidates(roofs, size, nics))
    )
    return min((split for split in candidates if split[1] in nics), key=preference)


def _nic_candidates(roofs: _Roofs, gpus: int, nics: range) -> set[int]:
    """Where the concave balance of `gpus` can have its maximum nearest to an even share of NICs."""
    points = [nics.start, nics.stop - 1, roofs.nics // 2, (roofs.nics + 1) // 2]
    ratios = roofs.intensity_ratios(gpus)
    if ratios is not None:
        for breakpoint_ in (1 / ratios[0], roofs.nics - 1 / ratios[1]):
            points += [math.floor(breakpoint_), math.ceil(breakpoint_)]
    return {min(max(point, nics.start), nics.stop - 1) for point in points}


def _is_whole_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_set_of_sizes(value: object) -> bool:
    return isinstance(value, tuple) and bool(value) and all(_is_whole_number(n) and n >= 1 for n in value)


def _is_amount(value: object) -> bool:
    """Within bounds that keep every quotient of two amounts a finite, normal float."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 1e-100 <= value <= 1e100


def _listed(sizes: Sequence[int] | None) -> str:
    return "any number" if sizes is None else ", ".join(map(str, sizes))
