"""A small mixed-integer model, solved by HiGHS through Pyomo, with a full report: status, bound, gap, seconds.

Pyomo is imported when a model is solved: it takes about half a second, which a command that plans nothing should not pay.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from disagmoe_compile.errors import DisagMoEError, InputError

_OPTIONS = {
    "mip_feasibility_tolerance": 1e-9,  # HiGHS's own 1e-6 and 1e-7 are wider than what splits of large clusters differ by
    "primal_feasibility_tolerance": 1e-9,
    "presolve": "off",  # probes thousands of one-of-many binaries for a minute; the relaxation takes a second
    "mip_heuristic_run_feasibility_jump": False,
}


@dataclass(frozen=True, slots=True)
class SolverReport:
    """What the solver proved. `bound`: no solution is better than that (seconds); `gap`: relative, of the one returned."""

    name: str
    status: str
    bound: float
    gap: float
    seconds: float


class InfeasibleModel(InputError):
    """No values satisfy all constraints of a model."""


class OutOfTime(DisagMoEError):
    """The time limit came before any solution. `solver`: its name and version."""

    def __init__(self, solver: str, time_limit_s: float, ended: str) -> None:
        super().__init__(
            f"no plan found within {time_limit_s:g} s ({solver}, {ended}): raise --time-limit, or fix more of the sizes"
        )
        self.solver, self.ended = solver, ended


@dataclass(frozen=True, slots=True)
class Solution:
    """Values by variable; `objective` is what they reach, `bound` the solver's upper bound on it (it is maximised)."""

    values: Mapping[str, float]
    objective: float
    bound: float
    solver: str
    status: str


@dataclass(frozen=True, slots=True)
class _Variable:
    lower: float
    upper: float
    is_integer: bool


@dataclass(frozen=True, slots=True)
class _Constraint:
    name: str
    terms: Mapping[str, float]
    right: float
    is_equality: bool


@dataclass(slots=True)
class LinearModel:
    """Variables and named linear constraints, built up by the methods. Coefficients should be near 1: scale before."""

    variables: dict[str, _Variable] = field(default_factory=dict)
    constraints: list[_Constraint] = field(default_factory=list)
    objective: str = ""

    def variable(self, name: str, *, lower: float = 0, upper: float, is_integer: bool = False) -> None:
        self.variables[name] = _Variable(lower, upper, is_integer)

    def at_most(self, name: str, terms: Mapping[str, float], right: float) -> None:
        """sum(coefficient * variable) <= right"""
        self.constraints.append(_Constraint(name, terms, right, is_equality=False))

    def equal(self, name: str, terms: Mapping[str, float], right: float) -> None:
        """sum(coefficient * variable) == right"""
        self.constraints.append(_Constraint(name, terms, right, is_equality=True))

    def maximise(self, variable: str) -> None:
        self.objective = variable


def solve_model(model: LinearModel, *, time_limit_s: float) -> Solution:
    """Raises InputError where HiGHS is missing, InfeasibleModel, or OutOfTime where the time was too short for any solution."""
    if not (math.isfinite(time_limit_s) and time_limit_s > 0):
        raise InputError(f"time_limit_s must be a positive number of seconds, got {time_limit_s!r}")
    try:
        import pyomo.environ as pyo
        from pyomo.contrib.solver.common.results import SolutionStatus, TerminationCondition
        from pyomo.contrib.solver.solvers.highs import Highs
    except ImportError as error:
        raise InputError(
            f"planning needs Pyomo >= 6.10 ({error}): pip install 'pyomo>=6.10' highspy"
        ) from error
    solver = Highs()
    if not solver.available():
        raise InputError("planning needs the HiGHS solver, and highspy is not installed: pip install highspy")

    name = f"HiGHS {'.'.join(map(str, solver.version()))}"
    built = _to_pyomo(pyo, model)
    results = solver.solve(
        built,
        load_solutions=False,
        raise_exception_on_nonoptimal_result=False,
        time_limit=time_limit_s,
        rel_gap=0.0,
        threads=1,
        solver_options=_OPTIONS,
    )
    ended, found = results.termination_condition, results.solution_status
    if ended in (TerminationCondition.provenInfeasible, TerminationCondition.infeasibleOrUnbounded):
        names = ", ".join(dict.fromkeys(constraint.name for constraint in model.constraints))
        raise InfeasibleModel(
            f"no solution satisfies all constraints ({names}); allow more GPUs, NICs or sizes"
        )
    if found not in (SolutionStatus.optimal, SolutionStatus.feasible):
        raise OutOfTime(name, time_limit_s, ended.name)
    results.solution_loader.load_vars()
    values = {name: pyo.value(built.x[name]) for name in model.variables}
    is_proven = ended is TerminationCondition.convergenceCriteriaSatisfied and found is SolutionStatus.optimal
    return Solution(
        values=values,
        objective=values[model.objective],
        bound=math.inf if results.objective_bound is None else float(results.objective_bound),
        solver=name,
        status="optimal" if is_proven else ended.name,
    )


def _to_pyomo(pyo: Any, model: LinearModel) -> Any:
    built = pyo.ConcreteModel()
    built.x = pyo.Var(list(model.variables))
    for name, variable in model.variables.items():
        built.x[name].domain = pyo.Integers if variable.is_integer else pyo.Reals
        built.x[name].bounds = (variable.lower, variable.upper)

    def relation(block: Any, position: int) -> Any:
        constraint = model.constraints[position]
        left = pyo.quicksum(
            coefficient * block.x[name] for name, coefficient in constraint.terms.items() if coefficient
        )
        return left == constraint.right if constraint.is_equality else left <= constraint.right

    built.constraints = pyo.Constraint(range(len(model.constraints)), rule=relation)
    built.objective = pyo.Objective(expr=built.x[model.objective], sense=pyo.maximize)
    return built
