"""`torch.compile(model, backend="disagmoe")`: capture -> passes -> plan -> bind. The only file that knows all parts.

Dynamo calls `disagmoe` with a graph of the user's model. Under several ranks the answer is a Session (runtime/session.py)
that runs this rank's part of a plan. In one process there is nothing to disaggregate: the stage compiler gets the whole graph.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import fx
from torch._dynamo.exc import ShortenTraceback

from disagmoe_compile.backend.bound_model import OPTIMIZER_GUARD, bound_model
from disagmoe_compile.backend.graph_session import make_session
from disagmoe_compile.backend.uncaught import shorten_uncaught
from disagmoe_compile.backend.watched_call import watch_calls_of
from disagmoe_compile.capture import capture, root_module
from disagmoe_compile.config import Options
from disagmoe_compile.early_batch import MarkBeforeTracing
from disagmoe_compile.errors import DisagMoEError, InputError, UnsupportedModelError
from disagmoe_compile.graph_breaks import check_graph_break, check_whole_model
from disagmoe_compile.inspect.dump import GraphDumper
from disagmoe_compile.inspect.structured import structured_trace, trace_wanted
from disagmoe_compile.passes.base import Observer
from disagmoe_compile.passes.captured import CapturedGraph
from disagmoe_compile.passes.pipeline import PartitionResult, partition_model
from disagmoe_compile.runtime.failure import default_store, describe_failure
from disagmoe_compile.runtime.process_group import Launch, ensure_process_group, several_ranks
from disagmoe_compile.runtime.retrace import require_global_shapes
from disagmoe_compile.runtime.user_warning import warn_at_call


def disagmoe(
    gm: fx.GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None
) -> Any:
    """The backend. `options`: docs/options.md. Raises InputError (a ValueError) for bad options, graphs and sizes."""
    try:
        return _compile(gm, example_inputs, Options.from_mapping(options))
    except DisagMoEError as error:
        raise _through_dynamo(error) from error


def _compile(gm: fx.GraphModule, example_inputs: Sequence[Any], options: Options) -> Any:
    device = next((e.device for e in example_inputs if isinstance(e, torch.Tensor)), torch.device("cpu"))
    if not ensure_process_group(options.timeout_s, device):
        return _compile_alone(gm, example_inputs, options)
    if device.type != "cpu":
        raise UnsupportedModelError(
            f"the model is on {device}, but this version runs several ranks over gloo on the CPU only; "
            "move the model to the CPU or run one process"
        )
    check_graph_break(gm)
    check_whole_model(root_module())
    _MARK_BEFORE_TRACING.register()
    require_global_shapes(e for e in example_inputs if isinstance(e, torch.nn.Parameter))
    captured = capture(gm, example_inputs)
    partition = _partition(captured, options)
    if not partition.programs.experts:
        raise UnsupportedModelError(
            f"no MoE region found in the model{_why_not(partition)}; "
            f"{dist.get_world_size()} ranks need one to split attention from experts: run one process, or another backend"
        )
    if partition.batch_coupled:
        warn_at_call(_coupled(partition.batch_coupled))
    try:
        model = bound_model(captured, partition, options)
        return make_session(captured, partition, model, options)
    except Exception as error:
        rank = dist.get_rank()
        raise describe_failure(error, rank, "distributing the model", [], default_store()) from error


def _compile_alone(gm: fx.GraphModule, example_inputs: Sequence[Any], options: Options) -> Any:
    sizes = (options.attention_group_size, options.ffn_group_size, options.pipeline_groups)
    if any(sizes) or options.plan:
        raise InputError(
            "group sizes do not match the world size: one process runs, and attention_group_size, ffn_group_size, "
            "pipeline_groups and plan describe several ranks; start with torchrun --nproc-per-node, or leave them out"
        )
    if options.trace_dir or trace_wanted():
        # What is written beside a run in one process must not stop it, unless it was asked for.
        with contextlib.nullcontext() if options.trace_dir else contextlib.suppress(DisagMoEError):
            check_graph_break(
                gm
            )  # Dynamo cannot restart the trace of a graph that it broke, which `capture` may ask for
            _partition(capture(gm, example_inputs), options)
    compiler = torch._dynamo.backends.registry.lookup_backend(options.stage_compiler)
    return compiler(gm, list(example_inputs))


def _partition(captured: CapturedGraph, options: Options) -> PartitionResult:
    """Runs the passes; dumps go to `trace_dir` from one rank, and to torch's structured trace where one is being written."""
    trace = structured_trace(captured)
    observers: list[Observer] = [] if trace is None else [trace]
    if options.trace_dir and (not dist.is_initialized() or dist.get_rank() == 0):
        observers.append(GraphDumper(options.trace_dir))
    return partition_model(
        captured,
        observers=observers,
        loss_reduction=options.loss_reduction,
        disabled=options.disable_passes,
    )


def _coupled(operations: Sequence[str]) -> str:
    return (
        f"disagmoe: {', '.join(operations)} mix samples of a batch; they act on each micro-batch of each attention rank, so the "
        "numbers are those of eager on these slices, not on the whole batch"
    )


def _why_not(partition: PartitionResult) -> str:
    reasons = [reason for _, report in partition.reports for reason in report.skipped]
    return f" ({'; '.join(map(str, reasons[:3]))})" if reasons else ""


def _through_dynamo(error: DisagMoEError) -> DisagMoEError:
    """The same error, of a class that Dynamo hands to the user as it is instead of wrapping it in BackendCompilerFailed."""
    kind = type(error)
    passing = type(kind.__name__, (_Passing, kind), {"__module__": kind.__module__})
    one: DisagMoEError = passing.__new__(passing, *error.args)
    one.args = error.args
    one.__dict__.update(error.__dict__, message=str(error))
    return one


class _Passing(ShortenTraceback):
    """What Dynamo looks for. It also keeps our one line: Dynamo adds advice about its own logs to every message."""

    first_useful_frame = None
    message: str

    def __str__(self) -> str:
        return self.message


# This module is loaded when torch.compile(backend="disagmoe") looks the backend up: before the first call.
_MARK_BEFORE_TRACING = MarkBeforeTracing(disagmoe, applies=several_ranks)
_MARK_BEFORE_TRACING.register()
watch_calls_of(disagmoe, check_options=Options.from_mapping)
_launch = Launch.from_environment()
if _launch is not None:
    OPTIMIZER_GUARD.expect_first_call(_launch.world_size)
    shorten_uncaught()
