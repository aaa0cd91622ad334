"""Regions written as a loop over experts, which Dynamo unrolls: one addend an expert.

    y = zeros_like(x)
    y = y + mlp_0(x) * scores[:, 0:1]                           every expert on every token, zeros by structure
    y = y.index_add(0, tok_1, mlp_1(x[tok_1]) * weights[tok_1, slot_1, None])         or its own tokens only
    ...

An expert is known by the number that its routing compares ids with, or the column of its scores; its parameters are
its own, or slices of stacked ones. All addends must be the same function of their rows. Starting from something else
than zeros is an addition of its own. What each part may look like is in `loop_routing.py` and `loop_expert.py`.

Legend: T tokens, k experts a token, D hidden size, E experts, e one of them.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from disagmoe_compile.passes.aliasing import live_nodes, storage_roots, written
from disagmoe_compile.passes.metadata import (
    describe,
    emit,
    emit_for,
    is_call,
    is_tensor,
    rank_of,
    shape,
    value,
)
from disagmoe_compile.passes.regions import Found, NoMatch, ParamNodes, Region
from disagmoe_compile.passes.styles.ids import are_distinct
from disagmoe_compile.passes.styles.loop_chain import (
    Chain,
    Link,
    adds_pairs,
    chain_of,
    starts_of_experts,
    with_parameters,
)
from disagmoe_compile.passes.styles.loop_expert import Addend
from disagmoe_compile.passes.styles.loop_routing import Routing
from disagmoe_compile.passes.styles.zeros import is_zero

_SHARED = -1


@dataclass(frozen=True, slots=True)
class ExpertLoop:
    name: str = "expert_loop"

    def find(self, graph: fx.Graph) -> Found:
        order = {node: position for position, node in enumerate(graph.nodes)}
        roots = storage_roots(graph)
        regions: dict[fx.Node, Region] = {}
        stopped: dict[str, NoMatch] = {}

        def read(starts: Mapping[int, Sequence[fx.Node]]) -> NoMatch | None:
            chain = None
            try:
                chain = chain_of(graph, starts, order)
                if chain.exit not in regions:
                    match = _Match(chain, order)
                    region = match.region()
                    _check_writes(graph, region, match.interior, order, roots)
                    regions[chain.exit] = region
            except NoMatch as reason:
                return None if chain is not None and chain.exit in regions else reason
            return None

        for starts in starts_of_experts(graph):
            reason = read(starts)
            if reason is not None:
                learned = with_parameters(graph, starts)
                if 1 < len(learned) < len(starts):
                    reason = read(learned)
            if reason is not None:
                stopped[str(reason)] = reason
        return Found(tuple(regions.values()), tuple(stopped.values()))


class _Match:
    """One chain of additions, read expert by expert. Raises NoMatch where it is not a region."""

    def __init__(self, chain: Chain, order: Mapping[fx.Node, int]) -> None:
        self.chain = chain
        owners = _owners(chain.links, order)
        self.routing = Routing((rank_of(chain.exit) or 0) - 1)
        self.own: list[set[fx.Node]] = [set() for _ in chain.links]
        self.shared = {node for node, owner in owners.items() if owner == _SHARED}
        for node in owners.keys() - self.shared:
            self.own[owners[node]].add(node)
        self.interior = set().union(*self.own)

    def region(self) -> Region:
        if self.routing.lead not in (1, 2):
            raise NoMatch(self.chain.exit, "it sums values that are not rows of tokens")
        dtype = value(self.chain.exit).dtype
        addends: dict[int, Addend] = {}
        functions: dict[int, fx.GraphModule] = {}
        for link, own in zip(self.chain.links, self.own, strict=True):
            addend = Addend(self.routing, own)
            function = addend.read(link.rows, link.index, dtype)
            if addend.expert is None:
                raise NoMatch(link.node, "nothing says which expert it adds")
            if addend.expert in addends:
                raise NoMatch(link.node, f"it adds expert {addend.expert} a second time")
            addends[addend.expert], functions[addend.expert] = addend, function
        experts = [addends[e] for e in sorted(addends)]
        self._check_numbers(sorted(addends))
        self._check_same(experts, [functions[e] for e in sorted(functions)])
        first = experts[0]
        ids = self._ids(experts)
        assert first.tokens is not None, "an addend without tokens is refused"
        top_k = 1 if rank_of(ids) == self.routing.lead else shape(ids)[-1]
        if not isinstance(top_k, int):
            raise NoMatch(ids, "the number of experts a token is not fixed")
        if shape(ids)[: self.routing.lead] != shape(first.tokens)[:-1]:
            raise NoMatch(ids, "the ids have another number of tokens than the experts")
        function = functions[0]
        if first.index is None:
            self._check_zero(first, ids, function)
        self._check_readers(experts)
        base = self.chain.base
        if any(link.replaces for link in self.chain.links):
            base = self._kept_base(ids, len(experts))
        return Region(
            style="expert_loop",
            tokens=first.tokens,
            token_ids=None,
            expert_ids=ids,
            weights=first.weights,
            params=self._params(experts),
            function=function,
            exit=self.chain.exit,
            num_experts=len(experts),
            top_k=top_k,
            weights_by_expert=first.by_expert,
            base=base,
        )

    def _kept_base(self, ids: fx.Node, num_experts: int) -> fx.Node | None:
        """What the sum starts from where experts replace rows: the rows of tokens that no expert takes.

        Replacing is adding only where no token has two experts. Whether one of them has none is not known.
        """
        replacing = next(link for link in self.chain.links if link.replaces)
        if rank_of(ids) != self.routing.lead or not all(link.replaces for link in self.chain.links):
            raise NoMatch(replacing.node, "it replaces rows instead of adding to them")
        base = self.chain.base
        if base is None:
            return None
        graph = ids.graph
        with graph.inserting_before(self.chain.exit):
            taken = emit_for(
                graph,
                base,
                torch.logical_and,
                (emit(graph, torch.ge, (ids, 0)), emit(graph, torch.lt, (ids, num_experts))),
            )
            rows = emit_for(graph, base, "unsqueeze", (taken, -1))
            return emit_for(graph, base, "masked_fill", (base, rows, 0))

    def _check_numbers(self, experts: Sequence[int]) -> None:
        missing = next((e for e, found in enumerate(experts) if e != found), None)
        if missing is not None:
            raise NoMatch(self.chain.exit, f"there is no expert {missing} among experts {list(experts)}")

    def _check_same(self, experts: Sequence[Addend], functions: Sequence[fx.GraphModule]) -> None:
        first = experts[0]
        for e, (expert, function) in enumerate(zip(experts, functions, strict=True)):
            for name in ("tokens", "ids", "weights"):
                if getattr(expert, name) is not getattr(first, name):
                    node = getattr(expert, name) or self.chain.exit
                    raise NoMatch(node, f"experts 0 and {e} have different {name}")
            if function.code != functions[0].code:
                raise NoMatch(self.chain.exit, f"experts 0 and {e} compute different functions")
            if (expert.index is None) != (first.index is None) or expert.by_expert != first.by_expert:
                raise NoMatch(self.chain.exit, f"experts 0 and {e} are routed in different ways")

    def _ids(self, experts: Sequence[Addend]) -> fx.Node:
        first = experts[0]
        ids = first.ids
        if ids is None:  # every token passes through every expert: what says which of them count?
            ids = first.weights_ids
        if ids is None:
            raise NoMatch(
                self.chain.exit, "every expert runs on every token, and no top-k says which of them count"
            )
        is_pair_by_pair = first.index is not None and all(adds_pairs(link) for link in self.chain.links)
        if not is_pair_by_pair and rank_of(ids) != self.routing.lead and not are_distinct(ids):
            raise NoMatch(ids, "a token's ids may repeat, which its experts count once")
        return ids

    def _params(self, experts: Sequence[Addend]) -> tuple[ParamNodes, ...]:
        params: list[ParamNodes] = []
        for slots in zip(*(expert.slots for expert in experts), strict=True):
            first = slots[0]
            for e, slot in enumerate(slots):
                if slot.shape != first.shape or value(slot.parameter).dtype != value(first.parameter).dtype:
                    raise NoMatch(
                        slot.parameter, f"the parameters of experts 0 and {e} differ in shape or type"
                    )
            parameters = [slot.parameter for slot in slots]
            if first.stacked is None:
                params.append(tuple(parameters))
            elif any(p is not parameters[0] for p in parameters) or shape(first.stacked)[0] != len(experts):
                raise NoMatch(first.parameter, f"it is not stacked over the {len(experts)} experts")
            else:
                params.append(first.stacked)
        every = [p for nodes in params for p in (nodes if isinstance(nodes, tuple) else (nodes,))]
        repeated = next((p for p in every if every.count(p) > 1), None)
        if repeated is not None:
            raise NoMatch(repeated, f"the parameter `{repeated.name}` belongs to several experts")
        return tuple(params)

    def _check_zero(self, first: Addend, ids: fx.Node, function: fx.GraphModule) -> None:
        """Tokens that an expert was not chosen for must get exactly nothing from it, whatever its parameters."""
        generator = torch.Generator().manual_seed(0)

        def random(sizes: Sequence[object], like: fx.Node) -> torch.Tensor:
            return torch.randn([int(s) for s in sizes], generator=generator).to(value(like).dtype)  # type: ignore[call-overload]

        unrouted = fx.GraphModule(function, fx.Graph())
        unrouted.graph.output(unrouted.graph.graph_copy(function.graph, {}))
        for node in unrouted.graph.nodes:
            if is_call(node, "ones_like"):
                node.target = torch.zeros_like
        unrouted.recompile()
        params = [random(s.shape[1:] if s.stacked is not None else s.shape, s.parameter) for s in first.slots]
        rows = random((3, shape(first.tokens)[-1]), first.tokens)  # type: ignore[arg-type]
        weight = torch.zeros(3) if first.weights_ids is ids else torch.randn(3, generator=generator)
        weight = weight.to(value(first.weights or first.tokens).dtype)  # type: ignore[arg-type]
        with torch.no_grad():
            result = unrouted(rows, weight, *params)
        if result.count_nonzero():
            raise NoMatch(
                self.chain.exit, "experts return more than zero for tokens that were not routed to them"
            )

    def _check_readers(self, experts: Sequence[Addend]) -> None:
        """What experts compute from their parameters must go into the sum and nowhere else."""
        inside = self._inside()
        of_experts = {slot.parameter for expert in experts for slot in expert.slots}
        for node in (n for n in self.chain.exit.graph.nodes if n in inside and n is not self.chain.exit):
            if of_experts.isdisjoint(node.all_input_nodes):
                continue
            of_experts.add(node)
            readers = [user for user in node.users if user not in inside and is_tensor(user)]
            live = live_nodes(node.graph) if readers else frozenset()
            reader = next((user for user in readers if user in live), None)
            if reader is not None:
                raise NoMatch(node, f"what it computes of an expert is also read at {describe(reader)}")

    def _inside(self) -> set[fx.Node]:
        """What only this sum is computed from, the sum included."""
        inside: set[fx.Node] = set()
        pending = [self.chain.exit]
        while pending:
            node = pending.pop()
            is_end = (
                node is self.chain.base or node in self.shared or node.op == "placeholder" or is_zero(node)
            )
            if node not in inside and not is_end:
                inside.add(node)
                pending += node.all_input_nodes
        return inside


def _owners(links: Sequence[Link], order: Mapping[fx.Node, int]) -> dict[fx.Node, int]:
    """node -> the one link that depends on it, or _SHARED. Walks back until all that is left is shared."""
    owners: dict[fx.Node, int] = {}
    pending: dict[int, fx.Node] = {}  # by position in the graph
    heap: list[int] = []
    own: set[fx.Node] = set()  # pending, and of one link so far

    def visit(node: fx.Node, owner: int) -> None:
        if node not in owners:
            owners[node] = owner
            if node.op != "placeholder":
                pending[order[node]] = node
                heapq.heappush(heap, -order[node])
                own.update([node] if owner != _SHARED else [])
        elif owners[node] != owner:
            owners[node] = _SHARED
            own.discard(node)

    for position, link in enumerate(links):
        visit(link.rows, position)
        if link.index is not None:
            visit(link.index, position)
    while own:
        node = pending.pop(-heapq.heappop(heap))
        own.discard(node)
        for source in node.all_input_nodes:
            visit(source, owners[node])
    return owners


def _check_writes(
    graph: fx.Graph,
    region: Region,
    interior: set[fx.Node],
    order: Mapping[fx.Node, int],
    roots: Mapping[fx.Node, fx.Node],
) -> None:
    """No write between the first expert and the last may change what experts read, or what they compute."""
    read = {roots[source] for node in interior for source in (node, *node.all_input_nodes)}
    first = min((order[node] for node in interior if node.op != "placeholder"), default=0)
    for node in graph.nodes:
        target = written(node) if first <= order.get(node, -1) <= order[region.exit] else None
        if target is not None and roots[target] in read:
            raise NoMatch(node, "it writes in place to what the experts read")
