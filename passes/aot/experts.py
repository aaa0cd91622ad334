"""From the function of ONE expert to one stage over the rows of ALL experts of a rank.

`GroupedExperts` interprets the per-expert graph with every row of the rank at once. A value is one of

- rows: depends on the tokens; dim 0 is the row, as in the per-expert function;
- per expert (`PerExpert`): depends on parameters alone; one value per expert, stacked in dim 0;
- shared: the same for all experts (numbers, shapes, constants).

and each operator becomes

- on rows and shared values only: itself;
- on parameters only: itself, batched over experts with `torch.func.vmap`;
- a product of rows and a parameter: `grouped_mm`;
- an elementwise operator of rows and a parameter: the parameter is expanded to the rows first;
- anything else: `UnsupportedModelError`, naming it.

That is right only if no operator mixes rows, which the shape of an operator does not show. So `check_row_independence` runs
both forms on a few rows and compares every value: an operator that mixes rows sees different rows in the two.

Legend: P rows, D hidden, E experts of this rank, K and N sizes of a product, X any shape.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from disagmoe_compile.errors import UnsupportedModelError
from disagmoe_compile.passes.aot.grouped_mm import expand_to_rows, grouped_mm, runs
from disagmoe_compile.passes.program import ExpertsProgram

_MATMUL = frozenset({"matmul", "mm"})
_LINEAR = frozenset({"linear"})
_ADDMM = frozenset({"addmm"})
_ELEMENTWISE = frozenset(
    {"add", "iadd", "radd", "sub", "isub", "rsub", "mul", "imul", "rmul", "multiply", "subtract", "prelu"}
    | {
        "truediv",
        "itruediv",
        "rtruediv",
        "div",
        "divide",
        "true_divide",
        "pow",
        "float_power",
        "lerp",
        "where",
    }
    | {"maximum", "minimum", "fmax", "fmin", "clamp", "clip", "clamp_min", "clamp_max", "addcmul", "addcdiv"}
    | {"eq", "ne", "lt", "le", "gt", "ge"}
)
_SHAPE_QUERIES = frozenset({"getattr", "size", "dim", "stride", "numel", "ndimension"})
# Rows of the two experts that the check runs: two different counts, so that a mean over rows shows.
_CHECK_ROWS = (3, 2)
_CHECK_SEED = 20


@dataclass(frozen=True, slots=True)
class PerExpert:
    """One value per expert of this rank, stacked in dim 0."""

    value_EX: Tensor


def target_name(node: fx.Node) -> str:
    """`add` for torch.add, operator.add, Tensor.add and `+`."""
    target = node.target
    name = target if isinstance(target, str) else getattr(target, "__name__", str(target))
    return name.strip("_")


def _apply(node: fx.Node, module: fx.GraphModule, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    if node.op == "call_function":
        return node.target(*args, **kwargs)  # type: ignore[operator]
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    if node.op == "call_module":
        return module.get_submodule(str(node.target))(*args, **kwargs)
    if node.op == "get_attr":
        return operator.attrgetter(str(node.target))(module)
    raise UnsupportedModelError(f"expert function: node {node.name} has the unknown kind {node.op}")


def _leaves(args: Any) -> list[Any]:
    return pytree.tree_leaves(args, is_leaf=lambda leaf: isinstance(leaf, PerExpert))


def _map_per_expert(function: Callable[[PerExpert], Any], args: Any) -> Any:
    return pytree.tree_map(
        lambda leaf: function(leaf) if isinstance(leaf, PerExpert) else leaf,
        args,
        is_leaf=lambda leaf: isinstance(leaf, PerExpert),
    )


def _row_nodes(graph: fx.Graph) -> frozenset[fx.Node]:
    """Nodes that depend on the rows or on their weights: the first two placeholders."""
    seen: set[fx.Node] = set(graph.find_nodes(op="placeholder")[:2])
    for node in graph.nodes:
        if any(source in seen for source in node.all_input_nodes):
            seen.add(node)
    return frozenset(seen)


class GroupedExperts(torch.nn.Module):
    """`forward(rows_PD, weight_P, offsets_E, expert_P, *params) -> (rows_PN,)`; params stacked over this rank's experts.

    `observe(node, value)`, if given, is called with every value, in order of the graph.
    """

    def __init__(self, function: fx.GraphModule, boundary: int) -> None:
        super().__init__()
        self.function = function
        self.boundary = boundary
        self._rows = _row_nodes(function.graph)

    def forward(
        self,
        rows_PD: Tensor,
        weight_P: Tensor,
        offsets_E: Tensor,
        expert_P: Tensor,
        *params: Tensor,
        observe: Callable[[fx.Node, Any], None] | None = None,
    ) -> tuple[Tensor]:
        values: dict[fx.Node, Any] = {}
        inputs = iter([rows_PD, weight_P, *(PerExpert(p) for p in params)])
        for node in self.function.graph.nodes:
            if node.op == "placeholder":
                values[node] = next(inputs)
            elif node.op == "output":
                out = fx.map_arg(node.args[0], values.__getitem__)
                return (out[0] if isinstance(out, (tuple, list)) else out,)
            else:
                args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
                values[node] = self._run(node, args, kwargs, offsets_E, expert_P)
            if observe is not None:
                observe(node, values[node])
        raise UnsupportedModelError(f"expert function of boundary {self.boundary} has no output")

    def _run(self, node: fx.Node, args: Any, kwargs: Any, offsets_E: Tensor, expert_P: Tensor) -> Any:
        if not any(isinstance(leaf, PerExpert) for leaf in _leaves((args, kwargs))):
            return _apply(node, self.function, args, kwargs)
        if node.target is operator.getitem and isinstance(args[0], (tuple, list)):
            return args[0][args[1]]
        if node not in self._rows:
            return self._per_expert(node, args, kwargs)
        name = target_name(node)
        if name in _MATMUL or name in _LINEAR or name in _ADDMM:
            return self._product(node, name, args, kwargs, offsets_E, expert_P)
        if name in _ELEMENTWISE:
            rank = max(leaf.dim() for leaf in _leaves((args, kwargs)) if isinstance(leaf, Tensor))
            return self._elementwise(node, rank, args, kwargs, offsets_E, expert_P)
        raise self._unsupported(node, "combines rows with a parameter in a way that has no grouped form")

    def _per_expert(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        """An operator on parameters alone, batched over experts."""
        if target_name(node) in _SHAPE_QUERIES:
            first = _map_per_expert(lambda leaf: leaf.value_EX[0], (args, kwargs))
            result = _apply(node, self.function, *first)
            if not isinstance(result, Tensor):
                return result
        leaves, spec = pytree.tree_flatten((args, kwargs), is_leaf=lambda leaf: isinstance(leaf, PerExpert))
        at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, PerExpert)]

        def one_expert(*tensors: Tensor) -> Any:
            filled = list(leaves)
            for index, tensor in zip(at, tensors):
                filled[index] = tensor
            return _apply(node, self.function, *pytree.tree_unflatten(filled, spec))

        try:
            batched = torch.func.vmap(one_expert)(*(leaves[i].value_EX for i in at))
        except (RuntimeError, ValueError) as error:
            raise self._unsupported(node, f"cannot be batched over experts: {one_line(error)}") from error
        return pytree.tree_map(PerExpert, batched)

    def _product(
        self, node: fx.Node, name: str, args: Any, kwargs: Any, offsets_E: Tensor, expert_P: Tensor
    ) -> Tensor:
        bias: Any = None
        if name in _ADDMM:
            bias, x, weight = _take(args, kwargs, ("input", "mat1", "mat2"))
            if kwargs.get("alpha", 1) != 1 or kwargs.get("beta", 1) != 1:
                raise self._unsupported(node, "has a factor alpha or beta other than 1")
        elif name in _LINEAR:
            x, weight, bias = _take(args, kwargs, ("input", "weight", "bias"))
        else:
            x, weight = _take(args, kwargs, ("input", "other" if name == "matmul" else "mat2"))
        if not isinstance(x, Tensor) or not isinstance(weight, (PerExpert, Tensor)):
            raise self._unsupported(
                node, "multiplies a parameter by rows; only rows by a parameter has a grouped form"
            )
        if isinstance(weight, Tensor):  # only the bias is a parameter
            out = x @ (weight.t() if name in _LINEAR else weight)
        else:
            weight_EKN = weight.value_EX.transpose(-1, -2) if name in _LINEAR else weight.value_EX
            out = self._grouped(node, x, weight_EKN, offsets_E)
        if bias is None:
            return out
        if isinstance(bias, PerExpert):
            bias = self._expanded(node, bias, out.dim(), offsets_E, expert_P)
        return out + bias

    def _grouped(self, node: fx.Node, x: Tensor, weight_EKN: Tensor, offsets_E: Tensor) -> Tensor:
        if weight_EKN.dim() != 3 or x.dim() < 2:
            raise self._unsupported(
                node, f"multiplies rows of rank {x.dim()} by a parameter of rank {weight_EKN.dim() - 1}"
            )
        if x.dim() == 2:
            return grouped_mm(x, weight_EKN, offsets_E)
        inner = 1
        for size in x.shape[1:-1]:
            inner = inner * size
        out = grouped_mm(x.reshape(-1, x.shape[-1]), weight_EKN, offsets_E * inner)
        return out.reshape(*x.shape[:-1], weight_EKN.shape[2])

    def _elementwise(
        self, node: fx.Node, rank: int, args: Any, kwargs: Any, offsets_E: Tensor, expert_P: Tensor
    ) -> Any:
        filled = _map_per_expert(
            lambda leaf: self._expanded(node, leaf, rank, offsets_E, expert_P), (args, kwargs)
        )
        return _apply(node, self.function, *filled)

    def _expanded(
        self, node: fx.Node, leaf: PerExpert, rank: int, offsets_E: Tensor, expert_P: Tensor
    ) -> Tensor:
        """The parameter of each row's expert, shaped to broadcast against rows of `rank` dimensions."""
        shape = leaf.value_EX.shape[1:]
        if len(shape) == rank and shape[0] == 1:
            shape = shape[1:]
        if len(shape) >= rank:
            raise self._unsupported(
                node, f"a parameter of shape {tuple(shape)} lies along the rows of a value of rank {rank}"
            )
        values_EX = leaf.value_EX.reshape(-1, *[1] * (rank - 1 - len(shape)), *shape)
        return expand_to_rows(values_EX, offsets_E, expert_P)

    def _unsupported(self, node: fx.Node, why: str) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"experts of boundary {self.boundary}: {target_name(node)} ({node.name}) {why}; "
            f"experts must be products, elementwise operators and reshapes over independent rows"
        )


def _take(args: Sequence[Any], kwargs: Mapping[str, Any], names: Sequence[str]) -> list[Any]:
    """Arguments by position or name; None where absent."""
    return [args[i] if i < len(args) else kwargs.get(name) for i, name in enumerate(names)]


def one_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__


def reference_experts(
    program: ExpertsProgram, rows_PD: Tensor, weight_P: Tensor, offsets_E: Tensor, *params: Tensor
) -> Tensor:
    """The plain loop over experts: the oracle of `GroupedExperts`. Differentiable; returns rows_PN, sorted as the input."""
    outs = []
    for expert, start, end in runs(offsets_E):
        out = program.function(rows_PD[start:end], weight_P[start:end], *(p[expert] for p in params))
        outs.append(out[0] if isinstance(out, (tuple, list)) else out)
    return torch.cat(outs)


class _Recorder(fx.Interpreter):
    """Runs a graph and keeps every value, by node."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.values: dict[fx.Node, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        self.values[n] = super().run_node(n)
        return self.values[n]


def example_rows(program: ExpertsProgram) -> list[Tensor]:
    """Inputs of the grouped form for two experts with different numbers of rows: random values from a private generator."""
    generator = torch.Generator().manual_seed(_CHECK_SEED)

    def random(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.randn(tuple(shape), generator=generator).mul_(0.5).to(dtype)

    n_rows, n_experts = sum(_CHECK_ROWS), len(_CHECK_ROWS)
    counts_E = torch.tensor(_CHECK_ROWS)
    return [
        random((n_rows, program.in_features), program.token_dtype),
        random((n_rows,), program.weight_dtype),
        counts_E.cumsum(0).to(torch.int32),
        torch.repeat_interleave(torch.arange(n_experts), counts_E),
        *(
            random((n_experts, *(int(d) for d in p.shape[1:])), p.dtype or program.token_dtype)
            for p in program.params
        ),
    ]


def check_output(program: ExpertsProgram, out_PN: Tensor, n_rows: int) -> None:
    """Raise `UnsupportedModelError` for another shape or type than the program declares."""
    if tuple(out_PN.shape) != (n_rows, program.out_features) or out_PN.dtype != program.out_dtype:
        raise UnsupportedModelError(
            f"experts of boundary {program.boundary} return {tuple(out_PN.shape)} {out_PN.dtype} for {n_rows} rows, "
            f"expected ({n_rows}, {program.out_features}) {program.out_dtype}"
        )


def check_row_independence(program: ExpertsProgram) -> None:
    """Raise `UnsupportedModelError` if the grouped form differs from the loop anywhere, naming the first operator that does.

    Two experts, five rows, random values; the global generator is left as it was.
    """
    rows_PD, weight_P, offsets_E, expert_P, *params = example_rows(program)
    with torch.no_grad(), torch.random.fork_rng(devices=[]), torch._C._DisableAutocast():
        recorders = [_Recorder(program.function) for _ in _CHECK_ROWS]
        for expert, start, end in runs(offsets_E):
            recorders[expert].run(rows_PD[start:end], weight_P[start:end], *(p[expert] for p in params))
        grouped = GroupedExperts(program.function, program.boundary)
        of_rows = _row_nodes(program.function.graph)
        is_coarse = any(_has_16_bits(value) for value in recorders[0].values.values())

        def compare(node: fx.Node, value: Any) -> None:
            if node not in of_rows or not isinstance(value, Tensor):
                return
            parts = [recorder.values[node] for recorder in recorders]
            if not _same_rows(value, parts, is_coarse=is_coarse):
                raise grouped._unsupported(node, "mixes rows, or its result has no row per input row")

        (out_PN,) = _named_failure(grouped, rows_PD, weight_P, offsets_E, expert_P, params, compare)
    check_output(program, out_PN, rows_PD.shape[0])


def _named_failure(
    grouped: GroupedExperts,
    rows_PD: Tensor,
    weight_P: Tensor,
    offsets_E: Tensor,
    expert_P: Tensor,
    params: Sequence[Tensor],
    compare: Callable[[fx.Node, Any], None],
) -> tuple[Tensor]:
    """Run the grouped form; an operator that fails on all rows, though it ran on one expert's, is named."""
    done: list[fx.Node] = []

    def observe(node: fx.Node, value: Any) -> None:
        compare(node, value)
        done.append(node)

    try:
        return grouped(rows_PD, weight_P, offsets_E, expert_P, *params, observe=observe)
    except UnsupportedModelError:
        raise
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        failed = done[-1].next if done else next(iter(grouped.function.graph.nodes))
        raise grouped._unsupported(
            failed, f"fails on the rows of several experts: {one_line(error)}"
        ) from error


def _has_16_bits(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)


def _same_rows(value: Tensor, parts: Sequence[Tensor], *, is_coarse: bool) -> bool:
    if value.dim() == 0 or value.shape[0] != sum(_CHECK_ROWS):
        return False
    if any(p.dim() == 0 or p.shape[0] != n for p, n in zip(parts, _CHECK_ROWS)):
        return False
    return same_values(value, torch.cat(list(parts)), is_coarse=is_coarse)


def same_values(value: Tensor, expected: Tensor, *, is_coarse: bool = False) -> bool:
    """Equal shape and type, and equal up to the rounding of another order of additions; `is_coarse`: in 16 bits before."""
    if value.shape != expected.shape or value.dtype != expected.dtype:
        return False
    if not value.is_floating_point():
        return torch.equal(value, expected)
    if not is_coarse and not _has_16_bits(value):
        return torch.allclose(value, expected, rtol=1e-4, atol=1e-5, equal_nan=True)
    # 16 bits round a bias separately from its product: what cancels is off by the size of the product.
    largest = float(expected.abs().nan_to_num(0.0, 0.0, 0.0).amax()) if expected.numel() else 0.0
    return torch.allclose(value, expected, rtol=3e-2, atol=max(3e-3, 2e-2 * largest), equal_nan=True)
