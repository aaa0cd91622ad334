"""`disagmoe plan --refine measured|simulated`: Algorithm 1 from the solver's plan, on steps that were run or simulated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from disagmoe_compile.plan.sizing import Sizing
from disagmoe_compile.planner.refine import Profile, Trial, refine
from disagmoe_compile.planner.size import candidate_of, choice_document, sizing_of
from disagmoe_compile.planner.sizing_problem import SizingProblem
from disagmoe_compile.planner.step_model import StepModel

MEASURED, SIMULATED = "measured", "simulated"


@dataclass(frozen=True, slots=True)
class Refining:
    """What `--refine`, `--model`, `--trials` and `--seed` ask for."""

    kind: str
    source: str
    trials: int
    seed: int


def refined(problem: SizingProblem, found: Sizing, asked: Refining) -> tuple[Sizing, dict[str, Any]]:
    """The fastest plan of the trials by the profile, and the trajectory. Raises InputError where the profile cannot be had."""
    model = StepModel(problem)
    result = refine(
        problem,
        _profile(problem, found, model, asked),
        start=candidate_of(found),
        trials=asked.trials,
        seed=asked.seed,
    )
    best = result.best.candidate
    prediction = model.predict(best)
    sizing = sizing_of(
        problem,
        model,
        best,
        prediction,
        solver=_solver_beside(found, prediction.tokens_per_s, asked.kind),
        model_document=dict(found.inputs["model"]),
    )
    return sizing, {
        "profile": asked.kind,
        "seed": asked.seed,
        "ties": result.ties,
        "seed_step_s": result.trajectory[0].step_s,
        "best_step_s": result.best.step_s,
        "trajectory": [_trial(t) for t in result.trajectory],
    }


def _profile(problem: SizingProblem, found: Sizing, model: StepModel, asked: Refining) -> Profile:
    if asked.kind == SIMULATED:
        from disagmoe_compile.simulator.planned import simulated_steps

        return simulated_steps(problem)
    from disagmoe_compile.cli.plan_measure import measured_steps

    return measured_steps(problem, found.world_size, model, asked.source)


def _solver_beside(found: Sizing, tokens_per_s: float, kind: str) -> dict[str, Any]:
    """The report of the solver's plan, with the gap of the one that the profile preferred."""
    gap = max(0.0, found.solver["bound"] / tokens_per_s - 1)
    return {**found.solver, "status": f"{found.solver['status']}, then refined on {kind} steps", "gap": gap}


def _trial(trial: Trial) -> dict[str, Any]:
    return {
        **choice_document(trial.candidate),
        "step_s": trial.step_s if trial.step_s != float("inf") else None,
        "is_best": trial.is_best,
    }
