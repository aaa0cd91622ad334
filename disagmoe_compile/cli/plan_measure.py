"""`disagmoe plan --refine measured`: plans tried on local ranks of the real runtime, a few steps each. Loads torch."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from disagmoe_compile.errors import DisagMoEError, InputError
from disagmoe_compile.models.catalogue import find_model
from disagmoe_compile.plan.sizing import Sizing, dump_sizing
from disagmoe_compile.planner.model_spec import ModelSpec
from disagmoe_compile.planner.refine import Trial, refine
from disagmoe_compile.planner.size import candidate_of, sizing_of
from disagmoe_compile.planner.sizing_problem import Candidate, SizingProblem
from disagmoe_compile.planner.step_model import StepModel

MOST_RANKS = 16
STEPS = 4


def spec_of_source(source: str) -> ModelSpec:
    """The sizes of `hf:FAMILY`, from the config of the tiny model that it builds."""
    from disagmoe_compile.models.source import load_source

    config = load_source(source).model.config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{source.partition(':')[2]}.json"
        path.write_text(json.dumps(text.to_dict(), default=str))
        return find_model(str(path))


def refine_measured(
    problem: SizingProblem, found: Sizing, source: str, *, trials: int, seed: int
) -> tuple[Sizing, dict[str, Any]]:
    """The fastest plan of the trials, and the trajectory. Raises InputError where this machine cannot run the plans."""
    if not source.startswith("hf:"):
        raise InputError(
            f"--refine measured runs the model on local ranks: give --model hf:FAMILY, got {source}"
        )
    if found.world_size > MOST_RANKS:
        raise InputError(
            f"--refine measured runs all {found.world_size} ranks on this machine, at most {MOST_RANKS}: "
            "give --cluster local-cpu:RANKS"
        )
    model = StepModel(problem)

    def profile(candidate: Candidate) -> float:
        sizing = sizing_of(problem, model, candidate, model.predict(candidate), solver={})
        try:
            return measured_step_s(sizing, source)
        except InputError:
            raise
        except DisagMoEError:
            return float("inf")  # it does not run here

    result = refine(problem, profile, start=candidate_of(found), trials=trials, seed=seed)
    best = result.best.candidate
    refined = sizing_of(
        problem,
        model,
        best,
        model.predict(best),
        solver=_solver_beside(found, model.predict(best).tokens_per_s),
        model_document=dict(found.inputs["model"]),
    )
    return refined, {
        "profile": "measured",
        "seed": seed,
        "ties": result.ties,
        "best_step_s": result.best.step_s,
        "trajectory": [_trial(t) for t in result.trajectory],
    }


def _solver_beside(found: Sizing, tokens_per_s: float) -> dict[str, Any]:
    """The report of the solver's plan, with the gap of the one that measurements preferred."""
    gap = max(0.0, found.solver["bound"] / tokens_per_s - 1)
    return {**found.solver, "status": f"{found.solver['status']}, then refined by measurement", "gap": gap}


def measured_step_s(sizing: Sizing, source: str) -> float:
    """Seconds of a step of the real runtime, the first steps (compilation) left out."""
    from disagmoe_compile.cli.train_run import TrainRequest, run

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        dump_sizing(sizing, path)
        request = TrainRequest(
            source,
            plan=path,
            steps=STEPS,
            seq_length=sizing.seq_length,
            stage_compiler="eager",
            output_dir=Path(folder) / "run",
        )
        document = run(request, quiet=True).document
    return sizing.global_batch_size * sizing.seq_length / float(document["tokens_per_s"])


def _trial(trial: Trial) -> dict[str, Any]:
    layout, policy = trial.candidate.layout, trial.candidate.policy
    return {
        "pipeline_groups": layout.pipeline_groups,
        "attention_group_size": layout.attention_group_size,
        "ffn_group_size": layout.ffn_group_size,
        "micro_batch_size": layout.micro_batch_size,
        "n_microbatches": layout.n_microbatches,
        "microbatches_in_flight": policy.in_flight,
        "step_s": trial.step_s if trial.step_s != float("inf") else None,
        "is_best": trial.is_best,
    }
