"""What `disagmoe inspect --out DIR` writes beside the dumps: the report, the schedule on a common clock, the stages in DOT."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from disagmoe_compile.backend.planning import make_plan
from disagmoe_compile.backend.sizing import choose_sizes
from disagmoe_compile.config import Options
from disagmoe_compile.errors import DisagMoEError
from disagmoe_compile.inspect.diff import count_operations
from disagmoe_compile.inspect.dot import to_dot, write_svg
from disagmoe_compile.inspect.dump import stage_texts
from disagmoe_compile.inspect.explain import Explanation
from disagmoe_compile.inspect.html_report import StageCode, report_document, write_report
from disagmoe_compile.inspect.schedule_grid import schedule_text
from disagmoe_compile.passes.captured import CapturedGraph
from disagmoe_compile.passes.pipeline import PartitionResult
from disagmoe_compile.plan.ir import Plan


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of the plan that is shown. `n_microbatches=None`: as many as the example batch allows."""

    attention_group_size: int = 1
    ffn_group_size: int = 1
    pipeline_groups: int = 1
    n_microbatches: int | None = None

    @property
    def world_size(self) -> int:
        return self.pipeline_groups * (self.attention_group_size + self.ffn_group_size)


def plan_to_show(captured: CapturedGraph, partition: PartitionResult, sizes: Sizes) -> Plan | str:
    """A plan, or why there is none. Raises what making a plan of these sizes raises, unless they are the default ones."""
    if not partition.programs.experts:
        return "the model has no experts, so there is nothing to plan"
    try:
        return _plan(captured, partition, sizes)
    except DisagMoEError as error:
        if sizes != Sizes():
            raise
        return str(error)


def write_files(
    out: Path, source: str, partition: PartitionResult, explanation: Explanation, shown: Plan | str
) -> dict[str, str]:
    """Kind of file -> its path. `shown`: the plan, or why there is none."""
    out.mkdir(parents=True, exist_ok=True)
    plan, reason = (shown, "") if isinstance(shown, Plan) else (None, shown)
    report = report_document(source, explanation, _code(partition), plan, reason)
    written = {"report": write_report(out / "report.html", report), "dot": out / "stages.dot"}
    written["dot"].write_text(to_dot(explanation), encoding="utf-8")
    svg = write_svg(written["dot"])
    if svg is not None:
        written["svg"] = svg
    if plan is not None:
        written["schedule"] = out / "schedule.txt"
        written["schedule"].write_text(
            schedule_text(plan, plan.training or plan.forward_only), encoding="utf-8"
        )
    return {kind: str(path) for kind, path in written.items()}


def _plan(captured: CapturedGraph, partition: PartitionResult, sizes: Sizes) -> Plan:
    options = Options(
        attention_group_size=sizes.attention_group_size,
        ffn_group_size=sizes.ffn_group_size,
        pipeline_groups=sizes.pipeline_groups,
        n_microbatches=sizes.n_microbatches,
    )
    values = captured.sizes(captured.example_inputs)
    topology, options = choose_sizes(partition.programs, values, options, sizes.world_size)
    names = captured.parameter_names()
    return make_plan(partition.programs, names, values, topology, options, partition.fingerprint)


def _code(partition: PartitionResult) -> Mapping[str, StageCode]:
    texts = stage_texts(partition.graph_module)
    modules = {f"A{p.boundary}": p.module for p in partition.programs.attention}
    modules |= {f"F{p.boundary}": p.function for p in partition.programs.experts}
    return {name: StageCode(text, count_operations(modules[name])) for name, text in texts.items()}
