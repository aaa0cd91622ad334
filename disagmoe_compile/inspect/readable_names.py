"""Names for people: nodes called by the module that made them and by what they call, `layers_0_self_attn_q_proj_linear`.

Nodes of stages have numbers for names, so that equal layers have equal code; nodes of the captured graph have Dynamo's, which say
`getitem_47`. Here every node of a copy gets a name from what is known about it: a placeholder from its parameter, or from what a
call passes for it; an operation from the innermost module that made it; an item of a tuple from the call that returned the tuple.
Names never decide anything.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping, Sequence

from torch import fx

from disagmoe_compile.passes import metadata
from disagmoe_compile.passes.experts_op import experts
from disagmoe_compile.passes.partition import STAGE, AttentionStage

_BEFORE_PARAMETERS = 4  # tokens, token and expert of each pair, weights
_ROOT = re.compile(r"^L\['\w+'\]\.?(_modules\.)?")


def readable_names(graph: fx.Graph, given: Sequence[str] = ()) -> dict[fx.Node, str]:
    """A unique Python identifier for every node but the output. `given`: names of the placeholders, in order."""
    taken = fx.graph._Namespace()
    names: dict[fx.Node, str] = {}
    passed = iter(given)
    for node in graph.nodes:
        if node.op == "placeholder":
            wanted = next(passed, None) or _placeholder(node)
        elif node.op == "output":
            continue
        else:
            wanted = _operation(node, names)
        names[node] = taken.create_name(identifier(wanted), None)
    return names


def named_copy(graph: fx.Graph, names: Mapping[fx.Node, str]) -> fx.Graph:
    """A copy of the graph under other names, without type annotations, which would need imports of their own."""
    copy = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), env.__getitem__)
        if node.op == "output":
            copy.output(args[0])
            continue
        # A placeholder's target is the argument's name: were it another, the code would start with an alias for each.
        target = names[node] if node.op == "placeholder" else node.target
        env[node] = copy.create_node(node.op, target, args, kwargs, name=names[node])
        env[node].meta = dict(node.meta)
    return copy


def names_passed(graph: fx.Graph, names: Mapping[fx.Node, str]) -> dict[str, tuple[str, ...]]:
    """Module -> what its first call passes, by name. The function of an expert gets rows, weights and the expert's slices."""
    found: dict[str, tuple[str, ...]] = {}
    for node in graph.nodes:
        passed = tuple(names.get(a, "") if isinstance(a, fx.Node) else "" for a in node.args)
        if node.op == "call_module":
            found.setdefault(str(node.target), passed)
        elif node.target is experts:
            function = node.kwargs["function"]
            assert isinstance(function, fx.Node)
            found.setdefault(str(function.target), ("rows", "weight", *passed[_BEFORE_PARAMETERS:]))
    return found


def module_path(node: fx.Node) -> str:
    """`model.layers.0.self_attn.q_proj`: the innermost module that made the node, or nothing where Dynamo recorded none."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return _ROOT.sub("", stack[-1][0]) if stack else ""


def identifier(name: str) -> str:
    text = re.sub(r"\W+", "_", name).strip("_") or "x"
    return f"_{text}" if text[0].isdigit() else text


def _placeholder(node: fx.Node) -> str:
    source = metadata.source_of(node)
    return source.name if source is not None and source.name else node.name


def _operation(node: fx.Node, names: Mapping[fx.Node, str]) -> str:
    if node.op in ("call_module", "get_attr"):
        return node.name if node.op == "call_module" else str(node.target)
    if (
        node.target is operator.getitem
        and isinstance(node.args[0], fx.Node)
        and isinstance(node.args[1], int)
    ):
        return _item(node.args[0], node.args[1], names)
    return f"{module_path(node)}.{_verb(node)}"


def _verb(node: fx.Node) -> str:
    """What the node calls; an index says of which kind it is."""
    if node.target is not operator.getitem:
        return metadata.target_name(node)
    return "gather" if metadata.is_gather(node) else "slice"


def _item(of: fx.Node, index: int, names: Mapping[fx.Node, str]) -> str:
    stage = of.meta.get(STAGE)
    if isinstance(stage, AttentionStage):
        return f"{names[of]}_{_output_name(stage, index)}"
    return f"{names[of]}_{index}"


def _output_name(stage: AttentionStage, index: int) -> str:
    """By the layout of an attention module's outputs."""
    if index < stage.n_dispatch:
        return ("tokens", "token_ids", "expert_ids", "weights")[index]
    index -= stage.n_dispatch
    if index < stage.n_carried:
        return f"carried_{index}"
    index -= stage.n_carried
    if index < len(stage.model_outputs):
        return f"model_output_{stage.model_outputs[index]}"
    return f"loss_numerator_{index - len(stage.model_outputs)}"
