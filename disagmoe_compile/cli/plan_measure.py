"""`disagmoe plan --refine measured`: plans tried on local ranks of the real runtime, a few steps each. Loads torch."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from disagmoe_compile.errors import DisagMoEError, InputError
from disagmoe_compile.models.catalogue import find_model
from disagmoe_compile.plan.sizing import Sizing, dump_sizing
from disagmoe_compile.planner.model_spec import ModelSpec
from disagmoe_compile.planner.refine import Profile
from disagmoe_compile.planner.size import sizing_of
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


def measured_steps(problem: SizingProblem, world_size: int, model: StepModel, source: str) -> Profile:
    """Seconds of a step of the real runtime on local ranks. Raises InputError where this machine cannot run the plans."""
    if not source.startswith("hf:"):
        raise InputError(
            f"--refine measured runs the model on local ranks: give --model hf:FAMILY, got {source}"
        )
    if world_size > MOST_RANKS:
        raise InputError(
            f"--refine measured runs all {world_size} ranks on this machine, at most {MOST_RANKS}: "
            "give --cluster local-cpu:RANKS"
        )

    def profile(candidate: Candidate) -> float:
        sizing = sizing_of(problem, model, candidate, model.predict(candidate), solver={})
        try:
            return measured_step_s(sizing, source)
        except InputError:
            raise
        except DisagMoEError:
            return float("inf")  # it does not run here

    return profile


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
