"""Numbers have the last word over rules: the partition is tried on a few real samples before anything runs on it.

Rules read the graph and may misread an operation they half know. So the head's loss is computed on some samples at once, as
the model wrote it, and sample by sample, as the pipeline will; and each attention stage likewise. A loss or an update of a buffer
that does not add up is refused; a stage that gives other values names the first operation that mixes samples. Where only the
predictions that a cross entropy reads depend on other samples (batch normalisation behind the last experts), the loss itself
still adds up, and the operation is named too.

Parameters and values from other stages are random, so that zeros of an initialisation hide nothing. The cost is two forwards
of each distinct attention stage on at most three samples.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import fx
from torch._C._functorch import is_functorch_wrapped_tensor

from disagmoe_compile.errors import UnsupportedModelError
from disagmoe_compile.passes.buffer_updates import BUFFER_UPDATE_ADVICE
from disagmoe_compile.passes.captured import CapturedGraph
from disagmoe_compile.passes.metadata import describe, free_symbols, is_call, is_tensor, shape
from disagmoe_compile.passes.modes import closes_block, leaving, opens_block
from disagmoe_compile.passes.program import (
    AttentionProgram,
    InputKind,
    LossProgram,
    ModelPrograms,
    StageInput,
    bind,
)

_SAMPLES = 3
_TOLERANCE = 1e-3
_COARSE_TOLERANCE = 5e-2  # 16-bit values, or autocast
_COARSE_COUNTS = 0.3  # of counts: rounding sends some tokens to other experts
_SCALE = 0.2  # of random parameters and activations
_ATTENTION = ("scaled_dot_product_attention", "multi_head_attention_forward", "flex_attention")
Sizes = dict[sympy.Symbol, int]


def coupled_by_numbers(
    programs: ModelPrograms, captured: CapturedGraph, unsplit_loss: fx.GraphModule | None, loss_reduction: str
) -> tuple[str, ...]:
    """One line per operation that mixes samples. `unsplit_loss`: the head as the model wrote it, returning its loss.

    Raises UnsupportedModelError where the loss does not add up and no `loss_reduction` says how it should.
    """
    symbol = captured.batch_symbol
    if symbol is None:
        return ()
    sizes = captured.sizes(captured.example_inputs)
    n_samples = min(_SAMPLES, sizes[symbol])
    probe = _Probe(captured, programs, {**sizes, symbol: n_samples}, symbol)
    lines: dict[str, None] = {}
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # e.g. a deviation over one sample
        if programs.loss is not None and unsplit_loss is not None:
            mismatch = probe.loss_mismatch(programs.attention[-1], programs.loss, unsplit_loss)
            if mismatch and loss_reduction == "auto":
                raise UnsupportedModelError(
                    f"the loss does not add up over samples: {mismatch}; compute what concerns the whole batch (counts, "
                    "normalisers, terms without samples) outside the model, or accept the loss of each micro-batch with "
                    'options={"loss_reduction": "mean"} (or "sum")'
                )
            if mismatch:
                lines[f"the loss ({mismatch})"] = None
        seen: set[str] = set()
        for program in programs.attention:
            if program.module.code not in seen:
                seen.add(program.module.code)
                found = probe.mixing_operation(program)
                if found:
                    lines[found] = None
                else:
                    probe.check_buffer_deltas(program)
    return tuple(lines)


def check_order_of_samples(
    programs: ModelPrograms, captured: CapturedGraph, outputs: Collection[int]
) -> None:
    """Of `outputs` (indices), those with several rows for each sample, and those with the samples in a later dimension, must have
    the rows of a sample beside each other, sample after sample: only then do parts of the batch make up the whole.

    Raises UnsupportedModelError naming the output whose rows, of the last of a few samples, differ from that sample's alone.
    """
    symbol = captured.batch_symbol
    if symbol is None:
        return
    in_doubt = {
        one.index
        for one in programs.outputs
        if one.index in outputs and one.batch_dim is not None and one.shape[one.batch_dim] != symbol
    }
    sizes = captured.sizes(captured.example_inputs)
    n_samples = min(_SAMPLES, sizes[symbol])
    probe = _Probe(captured, programs, {**sizes, symbol: n_samples}, symbol)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for program in programs.attention:
            for index in sorted(in_doubt & program.model_outputs.keys()):
                dim = programs.outputs[index].batch_dim
                assert dim is not None
                if not probe.follows_samples(program, program.model_outputs[index], dim):
                    raise UnsupportedModelError(
                        f"output {index} of the model (shape {programs.outputs[index].shape}) has rows of several samples whose "
                        "order is not that of the samples, or that depend on other samples, so parts of the batch do not make up "
                        "the whole: return it with the batch as its first dimension"
                    )


class _Probe:
    def __init__(
        self, captured: CapturedGraph, programs: ModelPrograms, sizes: Sizes, symbol: sympy.Symbol
    ) -> None:
        self.captured, self.sizes, self.symbol = captured, sizes, symbol
        self.n_samples = sizes[symbol]
        self._after_slots = {one.boundary + 1 for one in programs.experts if one.style == "slots"}

    # ---- the loss
    def loss_mismatch(self, head: AttentionProgram, loss: LossProgram, unsplit: fx.GraphModule) -> str | None:
        if head.uses_rng or self._reads_slots(head):
            return None
        inputs = self._whole(head.inputs)
        expected = float(_Run(unsplit).run(*inputs))
        denominators = [float(d) for d in _Run(loss.denominators).run(*self._whole(loss.inputs))]

        def total(predictions: Mapping[fx.Node, torch.Tensor]) -> float:
            found = 0.0
            for sample in range(self.n_samples):
                run = _Run(head.module, {node: (value, sample) for node, value in predictions.items()})
                outputs = run.run(*self._of_sample(head.inputs, inputs, sample))
                numerators = [float(outputs[position]) for position in head.loss_numerators]
                terms = zip(loss.coefficients, numerators, denominators, strict=True)
                found += sum(c * n / d if d else math.nan for c, n, d in terms)
            return found

        def adds_up(found: float) -> bool:
            return abs(found - expected) <= self._tolerance(inputs) * max(abs(expected), 1e-6)

        try:
            found = total({})
            if math.isnan(expected) or adds_up(found):  # NaN: no valid label among these samples
                return None
            predictions = self._predictions(head)
            if predictions and self.mixing_operation(head):
                whole = _values(head.module, inputs)
                if adds_up(total({node: whole[node] for node in predictions})):
                    return None
        except Exception as error:  # whatever the model's own operations raise on a single sample
            return f"it cannot be computed on one sample alone ({_first_line(error)})"
        return f"on {self.n_samples} samples it is {expected:.6g} at once and {found:.6g} sample by sample"

    def _predictions(self, head: AttentionProgram) -> list[fx.Node]:
        """What cross entropies read as scores of classes, row by row: no normaliser can hide behind it."""
        read = [
            node.args[0]
            for node in head.module.graph.nodes
            if is_call(node, "cross_entropy") and node.args and is_tensor(node.args[0])
        ]
        return [node for node in read if self.symbol not in free_symbols(shape(node)[1:])]

    # ---- stages
    def mixing_operation(self, program: AttentionProgram) -> str | None:
        """The first operation whose values for a sample depend on the other samples, if an output does.

        The sample is the last: it has a place of its own in the batch, and others before it that may use up a capacity.
        """
        if (
            program.uses_rng
            or any(self._cannot_slice(i) for i in program.inputs)
            or self._reads_slots(program)
        ):
            return None
        inputs = self._whole(program.inputs)
        alone = self._of_sample(program.inputs, inputs, self.n_samples - 1)
        tolerance = self._tolerance(inputs)
        whole = _values(program.module, inputs)
        try:
            part = _values(program.module, alone)
        except Exception as error:  # whatever the model's own operations raise on a single sample
            return (
                f"attention stage {program.boundary}, which fails on one sample alone ({_first_line(error)})"
            )
        output = next(iter(reversed(program.module.graph.nodes)))
        sums = {output.args[0][position] for position in (*program.loss_numerators, *program.buffer_deltas)}
        results = [*(r for r in output.args[0] if r not in sums), *self._predictions(program)]
        if not any(_differ(whole[result], part[result], tolerance) for result in results):
            return None
        before: list[fx.Node] = []
        for node in program.module.graph.nodes:
            before.append(node)
            if node.op != "output" and _differ(whole[node], part[node], tolerance):
                self._check_attention(before, whole, part, tolerance)
                return describe(node)
        return None

    def _check_attention(
        self,
        nodes: Sequence[fx.Node],
        whole: Mapping[fx.Node, Any],
        part: Mapping[fx.Node, Any],
        tolerance: float,
    ) -> None:
        """Raises UnsupportedModelError where one of `nodes` is an attention over dimension 0 of the inputs: a model that has its
        samples in another dimension. Each micro-batch would see a piece of every sequence.
        """
        for node in nodes:
            if not is_tensor(node) or part[node].dim() != whole[node].dim():
                continue
            of_samples = [d for d, size in enumerate(shape(node)) if self.symbol in free_symbols((size,))]
            attends = is_call(node.args[0] if is_call(node, "getitem") else node, *_ATTENTION)
            if attends or (is_call(node, "softmax") and len(of_samples) > 1):
                last = whole[node]
                for dim in of_samples:
                    last = last.narrow(dim, last.shape[dim] - part[node].shape[dim], part[node].shape[dim])
                if _differ(last, part[node], tolerance):
                    raise UnsupportedModelError(
                        f"{describe(node)} attends over dimension 0 of the inputs, which is taken for the batch: pass inputs "
                        "with the batch first, and transpose them inside the model"
                    )

    def follows_samples(self, program: AttentionProgram, position: int, dim: int) -> bool:
        """Whether the last sample's rows of an output are those that it has alone. Ids are compared too: their order tells."""
        if program.uses_rng or any(self._cannot_slice(i) for i in program.inputs):
            return False
        inputs = self._whole(program.inputs)
        whole: torch.Tensor = _Run(program.module).run(*inputs)[position]
        alone = self._of_sample(program.inputs, inputs, self.n_samples - 1)
        part: torch.Tensor = _Run(program.module).run(*alone)[position]
        last = whole.narrow(dim, whole.shape[dim] - part.shape[dim], part.shape[dim])
        if not part.is_floating_point():
            return bool((last == part).double().mean() > 1 - _COARSE_COUNTS)
        return not _differ(last, part, self._tolerance(inputs))

    def check_buffer_deltas(self, program: AttentionProgram) -> None:
        """Raises UnsupportedModelError where what all samples add to a buffer is not the sum of what each adds."""
        if (
            not program.buffer_deltas
            or program.uses_rng
            or any(self._cannot_slice(i) for i in program.inputs)
        ):
            return
        inputs = self._whole(program.inputs)
        whole = _Run(program.module).run(*inputs)
        alone = [
            _Run(program.module).run(*self._of_sample(program.inputs, inputs, sample))
            for sample in range(self.n_samples)
        ]
        is_coarse = self._tolerance(inputs) == _COARSE_TOLERANCE
        results = next(iter(reversed(program.module.graph.nodes))).args[0]
        for position, delta in program.buffer_deltas.items():
            parts = [part[position].double() for part in (alone[:1] if delta.once else alone)]
            expected = whole[position].double()
            error = (torch.stack(parts).sum(0) - expected).norm()
            if not error <= (_COARSE_COUNTS if is_coarse else _TOLERANCE) * (expected.norm() + 1e-6):
                name = self.captured.inputs[delta.position].name
                raise UnsupportedModelError(
                    f"the model updates its buffer `{name}` at {describe(results[position].args[0])}, and what it adds for "
                    f"{self.n_samples} samples is not the sum over them; {BUFFER_UPDATE_ADVICE}"
                )

    # ---- inputs
    def _whole(self, inputs: Sequence[StageInput]) -> list[Any]:
        generator = torch.Generator().manual_seed(0)
        return [self._value(one, generator) for one in inputs]

    def _value(self, one: StageInput, generator: torch.Generator) -> Any:
        if one.kind is InputKind.SYMBOL:
            return bind(one.shape, self.sizes)[0]
        if one.kind in (InputKind.BUFFER, InputKind.INPUT):
            actual = self.captured.example_inputs[one.position].detach()
            return actual.narrow(0, 0, self.n_samples) if one.per_sample else actual
        shape = bind(one.shape, self.sizes)
        random = torch.randn(shape, generator=generator) * _SCALE
        device = (
            self.captured.example_inputs[one.position].device if one.kind is InputKind.PARAMETER else None
        )
        return random.to(device=device, dtype=one.dtype)

    def _of_sample(self, inputs: Sequence[StageInput], whole: Sequence[Any], sample: int) -> list[Any]:
        alone = {**self.sizes, self.symbol: 1}
        values = []
        for one, value in zip(inputs, whole, strict=True):
            if one.kind is InputKind.SYMBOL:
                values.append(bind(one.shape, alone)[0])
            elif self._has_samples(one):
                rows = bind(one.shape, alone)[0]
                values.append(value.narrow(0, sample * rows, rows).contiguous())
            else:
                values.append(value)
        return values

    def _has_samples(self, one: StageInput) -> bool:
        return bool(one.shape) and self.symbol in getattr(one.shape[0], "free_symbols", ())

    def _reads_slots(self, program: AttentionProgram) -> bool:
        """Whether it reads rows of experts slot by slot, as many as the batch asks for: they belong to no sample."""
        return program.boundary in self._after_slots and any(
            one.kind is InputKind.COMBINED and self._has_samples(one) for one in program.inputs
        )

    def _cannot_slice(self, one: StageInput) -> bool:
        return one.kind is not InputKind.SYMBOL and any(
            self.symbol in getattr(dim, "free_symbols", ()) for dim in one.shape[1:]
        )

    def _tolerance(self, inputs: Sequence[Any]) -> float:
        is_coarse = self.captured.autocast.enabled or any(
            isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16)
            for value in inputs
        )
        return _COARSE_TOLERANCE if is_coarse else _TOLERANCE


class _Run(fx.Interpreter):
    """As calling the module, but an expected error leaves nothing on stderr and no mode switched.

    `given`: node -> (its value for all samples, which sample this run is of), in place of what the run computes.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        given: Mapping[fx.Node, tuple[torch.Tensor, int]] | None = None,
        *,
        keep_values: bool = False,
    ) -> None:
        super().__init__(module, garbage_collect_values=not keep_values)
        self.extra_traceback = False
        self.given = given or {}
        self.undo: list[Callable[[], object]] = []

    def run(self, *inputs: Any) -> Any:  # type: ignore[override]
        with torch.no_grad():
            try:
                return super().run(*inputs)
            finally:
                for leave in reversed(self.undo):
                    leave()

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if n in self.given:
            whole, sample = self.given[n]
            rows = result.shape[0]
            return whole.narrow(0, sample * rows, rows)
        if opens_block(n):
            self.undo.append(leaving(n, result))
        elif closes_block(n):
            self.undo.pop()
        return result


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _values(module: fx.GraphModule, inputs: Sequence[Any]) -> Mapping[fx.Node, Any]:
    """Every value of the graph, by node."""
    run = _Run(module, keep_values=True)
    run.run(*inputs)
    return run.env


def _differ(whole: Any, part: Any, tolerance: float) -> bool:
    """Whether a value of the last sample alone is not its value among others. Ids are not compared: they may flip on ties."""
    if (
        not isinstance(whole, torch.Tensor)
        or not isinstance(part, torch.Tensor)
        or is_functorch_wrapped_tensor(part)  # a value inside vmap, whose level is over
        or not part.is_floating_point()
    ):
        return False
    if not part.dim() or whole.dim() != part.dim() or whole.shape[0] < part.shape[0]:
        return False
    last, part = whole[whole.shape[0] - part.shape[0] :].double(), part.double()
    if last.shape != part.shape:
        return False
    if not torch.equal(last.isfinite(), part.isfinite()):
        return True
    last, part = (
        value.nan_to_num(0.0, 0.0, 0.0) for value in (last, part)
    )  # fully masked rows are NaN in both
    return bool((last - part).norm() > tolerance * (part.norm() + 1e-6))
