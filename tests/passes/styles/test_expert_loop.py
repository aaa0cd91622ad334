"""Loops over experts, one layer at a time: what is a region is exact; what is not is refused with the reason."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from disagmoe_compile.early_batch import mark_batch
from disagmoe_compile.errors import UnsupportedModelError
from disagmoe_compile.passes.deinplace import Deinplace
from disagmoe_compile.passes.find_regions import FindRegions
from disagmoe_compile.passes.pipeline import partition_model, working_copy
from disagmoe_compile.testing.graphs import capture_model, loss_and_gradients, relative_error, worst_error
from disagmoe_compile.testing.programs import run_programs

TOKENS, WIDTH, HIDDEN, EXPERTS, TOP_K = 12, 6, 8, 3, 2


class Layer(nn.Module):
    """A linear layer, then the routed layer under test as `loop(layer, tokens, weights, ids)`, then a mean of squares."""

    def __init__(self, loop: Callable[..., Tensor], *, bias: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.loop = loop
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.w1 = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN))
        self.w2 = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH))
        self.flat = nn.Parameter(torch.randn(EXPERTS * HIDDEN, WIDTH))
        self.scale = nn.Parameter(torch.randn(WIDTH))
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, HIDDEN, bias), nn.GELU(), nn.Linear(HIDDEN, WIDTH, bias))
            for _ in range(EXPERTS)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(EXPERTS))
        self.odd = nn.Sequential(nn.Linear(WIDTH, HIDDEN, bias), nn.ReLU(), nn.Linear(HIDDEN, WIDTH, bias))
        self.wide = nn.Sequential(nn.Linear(WIDTH, 9, bias), nn.GELU(), nn.Linear(9, WIDTH, bias))
        self.batch_norm = nn.BatchNorm1d(WIDTH, affine=False, track_running_stats=False)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.embed(x)
        weights, ids = self.gate(tokens).softmax(-1).topk(TOP_K, -1)
        return (tokens + self.loop(self, tokens, weights, ids)).square().mean()


def captured(loop: Callable[..., Tensor], make: Callable[..., Layer] = Layer, **options: bool):
    x = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))
    mark_batch(x)
    return capture_model(make(loop, **options), {"x": x})


def selected(
    layer: Layer,
    x: Tensor,
    w: Tensor,
    ids: Tensor,
    expert: Callable[[int, Tensor], Tensor],
    y: Tensor | None = None,
) -> Tensor:
    """Each expert on its own tokens."""
    y = torch.zeros_like(x) if y is None else y
    for e in range(EXPERTS):
        tok, slot = torch.where(ids == e)
        y = y.index_add(0, tok, expert(e, x[tok]) * w[tok, slot, None])
    return y


def masked(
    layer: Layer, x: Tensor, w: Tensor, ids: Tensor, expert: Callable[[int, Tensor], Tensor]
) -> Tensor:
    """Every expert on every token."""
    y = torch.zeros_like(x)
    for e in range(EXPERTS):
        y = y + expert(e, x) * (w * (ids == e)).sum(-1, keepdim=True)
    return y


# ---- exact


def modules_on_their_tokens(m, x, w, ids):
    return selected(m, x, w, ids, lambda e, rows: m.experts[e](rows))


def in_another_order(m, x, w, ids):
    """Expert 2 of the ids is the first module of the list."""
    y = torch.zeros_like(x)
    for place, e in enumerate((2, 0, 1)):
        tok, slot = torch.where(ids == e)
        y = y.index_add(0, tok, m.experts[place](x[tok]) * w[tok, slot, None])
    return y


def added_to_rows(m, x, w, ids):
    y = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        tok, slot = (ids == e).nonzero(as_tuple=True)
        y[tok] += expert(x[tok]) * w[tok, slot].unsqueeze(-1)
    return y


def boolean_index(m, x, w, ids):
    y = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        chosen = (ids == e).any(-1)
        weight = torch.where(ids == e, w, 0.0).sum(-1)
        y[chosen] += weight[chosen][:, None] * expert(x[chosen])
    return y


def scattered(m, x, w, ids):
    y = torch.zeros_like(x)
    for e in range(EXPERTS):
        tok, slot = torch.where(ids == e)
        rows = torch.tanh(x.index_select(0, tok) @ m.w1[e]) @ m.w2[e] * w[tok, slot].view(-1, 1)
        y = y.scatter_add(0, tok[:, None].expand_as(rows), rows)
    return y


def started_from_a_residual(m, x, w, ids):
    return selected(m, x, w, ids, lambda e, rows: m.experts[e](rows), y=m.odd(x))


def without_weights(m, x, w, ids):
    y = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        y = y + expert(x) * (ids == e).any(-1).unsqueeze(-1)
    return y


def chosen_by_where(m, x, w, ids):
    """Biases, and zero by `where`, not by a product."""
    y = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        y = y + torch.where((ids == e).any(-1)[:, None], expert(x), 0.0)
    return y


def normalised_mask(m, x, w, ids):
    """Probabilities under the mask of the top-k, as columns and as parts of an unbind."""
    scores = F.one_hot(ids, EXPERTS).sum(1) * m.gate(x).sigmoid()
    columns = (scores / scores.sum(-1, keepdim=True)).unbind(-1)
    return torch.stack([m.experts[e](x) * columns[e].unsqueeze(-1) for e in range(EXPERTS)]).sum(0)


def seen_expert_by_expert(m, x, w, ids):
    """[E * H, D] seen as [E, H, D], both ways (DBRX)."""
    stacked = m.flat.view(EXPERTS, HIDDEN, WIDTH)
    return selected(m, x, w, ids, lambda e, rows: F.relu(rows @ stacked[e].t()) @ stacked[e])


def cut_into_pieces(m, x, w, ids):
    first, second = m.w1.chunk(EXPERTS, 0), m.w2.unbind(0)
    return selected(m, x, w, ids, lambda e, rows: F.relu(rows @ first[e].squeeze(0)) @ second[e])


def normed_by_each_expert(m, x, w, ids):
    return selected(m, x, w, ids, lambda e, rows: m.experts[e](m.norms[e](rows)))


def one_expert_a_token(m, x, w, ids):
    weight, best = w[:, 0] * 2, ids[:, 0]
    y = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        (tok,) = torch.where(best == e)
        y.index_add_(0, tok, expert(x[tok]) * weight[tok, None])
    return y


def weights_of_another_top_k(m, x, w, ids):
    """Strange, and well defined: the weights of a slot need not be those that chose its expert."""
    other = m.gate(x.flip(-1)).softmax(-1).topk(TOP_K, -1)[0]
    return selected(m, x, other, ids, lambda e, rows: m.experts[e](rows))


def weights_at_the_input(m, x, w, ids):
    scores = torch.zeros(x.shape[0], EXPERTS).scatter(1, ids, w)
    return sum(m.experts[e](x * scores[:, e : e + 1]) for e in range(EXPERTS))


def summed_with_zeros_that_were_written(m, x, w, ids):
    y = torch.zeros_like(x)
    y[:, 0] = x[:, 1]
    for e in range(EXPERTS):
        y = y + m.experts[e](x) * (w * (ids == e)).sum(-1, keepdim=True)
    return y


def added_to_zeros_that_were_written(m, x, w, ids):
    y = torch.zeros_like(x)
    y[:, 0] = x[:, 1]
    for e, expert in enumerate(m.experts):
        tok, slot = torch.where(ids == e)
        y = y.index_add(0, tok, expert(x[tok]) * w[tok, slot, None])
    return y


def the_last_expert_is_left_out(m, x, w, ids):
    """Its pairs add nothing, as dropped ones do."""
    y = torch.zeros_like(x)
    for e in range(EXPERTS - 1):
        tok, slot = torch.where(ids == e)
        y = y.index_add(0, tok, m.experts[e](x[tok]) * w[tok, slot, None])
    return y


def rows_set(m, x, y, ids):
    """One expert a token: setting its rows is adding to them."""
    for e, expert in enumerate(m.experts):
        y[ids == e] = expert(x[ids == e])
    return y


def rows_set_of_every_pair(m, x, w, ids):
    """DeepSeek's code for training: tokens repeated once a pair, and a buffer that is not initialised."""
    rows = x.repeat_interleave(TOP_K, dim=0)
    pairs = rows_set(m, rows, torch.empty_like(rows), ids.flatten())
    return (pairs.view(*w.shape, -1) * w.unsqueeze(-1)).sum(1)


def rows_set_beside_those_of_no_expert(m, x, w, ids):
    """Tokens of the last expert keep what was there."""
    y, best = x.clone(), ids[:, 0]
    for e, expert in enumerate(m.experts[:-1]):
        (tok,) = torch.where(best == e)
        y[tok] = expert(x[tok])
    return y * w[:, :1]


def dropped_beyond_a_capacity(m, x, w, ids):
    """Switch Transformer: a token that its expert has no place for passes unchanged."""
    chosen = F.one_hot(ids[:, 0], EXPERTS)
    chosen = (chosen * (chosen.cumsum(0) <= 3)).bool()
    y = x.clone()
    for e, expert in enumerate(m.experts):
        y[chosen[:, e]] = expert(x[chosen[:, e]])
    return y * w[:, :1]


def pairs_dropped_beyond_a_capacity(m, x, w, ids):
    """The same where a token has several experts: `where` of a column of [T, k, E]."""
    mask = F.one_hot(ids, EXPERTS)
    mask = mask * (mask.cumsum(0) <= 3)
    y = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        tok, slot = torch.where(mask[..., e])
        y = y.index_add(0, tok, expert(x[tok]) * w[tok, slot, None])
    return y


def numbers_without_an_expert(m, x, w, ids):
    """The last number stands for the token itself (zero experts, identity experts)."""
    y = torch.zeros_like(x)
    for e in range(EXPERTS - 1):
        tok, slot = torch.where(ids == e)
        y = y.index_add(0, tok, m.experts[e](x[tok]) * w[tok, slot, None])
    return y + (w * (ids == EXPERTS - 1)).sum(-1, keepdim=True) * x


def second_results_that_nobody_reads(m, x, w, ids):
    def expert(e, rows):
        out = m.experts[e](rows)
        return out, out.square().mean()

    return selected(m, x, w, ids, lambda e, rows: expert(e, rows)[0])


EXACT = [
    modules_on_their_tokens, in_another_order, added_to_rows, boolean_index, scattered, started_from_a_residual,
    without_weights, chosen_by_where, normalised_mask, seen_expert_by_expert, cut_into_pieces, normed_by_each_expert,
    one_expert_a_token, weights_of_another_top_k, weights_at_the_input, the_last_expert_is_left_out,
    added_to_zeros_that_were_written, summed_with_zeros_that_were_written, rows_set_of_every_pair,
    rows_set_beside_those_of_no_expert, dropped_beyond_a_capacity, pairs_dropped_beyond_a_capacity,
    numbers_without_an_expert, second_results_that_nobody_reads,
]  # fmt: skip
WITH_BIAS = (chosen_by_where, without_weights, in_another_order, added_to_rows)
COUPLED = (dropped_beyond_a_capacity, pairs_dropped_beyond_a_capacity)


@pytest.mark.parametrize("loop", EXACT, ids=lambda loop: loop.__name__)
def test_a_loop_is_a_region_with_the_same_numbers(loop):
    graph, args = captured(loop, bias=loop in WITH_BIAS)
    result = partition_model(graph)
    assert [e.style for e in result.programs.experts] == ["expert_loop"], result.reports[2]
    expected = loss_and_gradients(graph.graph_module, args, 0)
    n_microbatches = 1 if loop in COUPLED else 2
    actual = loss_and_gradients(lambda *a: run_programs(graph, result.programs, a, n_microbatches), args, 0)
    assert relative_error(actual[0], expected[0]) < 1e-6
    assert worst_error(actual[1], expected[1]) < 1e-5


# ---- refused


def different_code(m, x, w, ids):
    return selected(m, x, w, ids, lambda e, rows: (m.odd if e == 1 else m.experts[e])(rows))


def different_sizes(m, x, w, ids):
    return selected(m, x, w, ids, lambda e, rows: (m.wide if e == 1 else m.experts[e])(rows))


def tied_experts(m, x, w, ids):
    return selected(m, x, w, ids, lambda e, rows: m.experts[min(e, 1)](rows))


def shared_parameter(m, x, w, ids):
    return selected(m, x, w, ids, lambda e, rows: m.experts[e](rows) * m.scale)


def missing_expert(m, x, w, ids):
    y = torch.zeros_like(x)
    for e in (0, 2):
        tok, slot = torch.where(ids == e)
        y = y.index_add(0, tok, m.experts[e](x[tok]) * w[tok, slot, None])
    return y


def twice(m, x, w, ids):
    y = torch.zeros_like(x)
    for e in (0, 1, 1, 2):
        tok, slot = torch.where(ids == e)
        y = y.index_add(0, tok, m.experts[e](x[tok]) * w[tok, slot, None])
    return y


def other_slice(m, x, w, ids):
    return selected(m, x, w, ids, lambda e, rows: F.relu(rows @ m.w1[e]) @ m.w2[(e + 1) % EXPERTS])


def other_tokens(m, x, w, ids):
    y = torch.zeros_like(x)
    for e in range(EXPERTS):
        tok, slot = torch.where(ids == e)
        y = y.index_add(0, (tok + 1) % TOKENS, m.experts[e](x[tok]) * w[tok, slot, None])
    return y


def slots_of_other_ids(m, x, w, ids):
    other = ids.flip(-1)
    y = torch.zeros_like(x)
    for e in range(EXPERTS):
        tok, _ = torch.where(ids == e)
        _, slot = torch.where(other == e)
        y = y.index_add(0, tok, m.experts[e](x[tok]) * w[tok, slot, None])
    return y


def mask_of_other_ids(m, x, w, ids):
    other = m.gate(x.flip(-1)).topk(TOP_K, -1)[1]
    y = torch.zeros_like(x)
    for e in range(EXPERTS):
        mask = (other == e).any(-1, keepdim=False)[:, None]
        y = y + m.experts[e](x) * mask * (w * (ids == e)).sum(-1, keepdim=True)
    return y


def biased_with_weights_at_the_input(m, x, w, ids):
    scores = torch.zeros(x.shape[0], EXPERTS).scatter(1, ids, w)
    return sum(m.experts[e](x * scores[:, e : e + 1]) for e in range(EXPERTS))


def small_scores(m, x, w, ids):
    scores = m.gate(x).softmax(-1)
    scores = scores * (scores > 0.3)
    return sum(m.experts[e](x) * scores[:, e : e + 1] for e in range(EXPERTS))


def normalised_over_rows(m, x, w, ids):
    return selected(m, x, w, ids, lambda e, rows: m.experts[e](rows).softmax(0))


def batch_norm(m, x, w, ids):
    return masked(m, x, w, ids, lambda e, rows: m.experts[e](m.batch_norm(rows)))


def tokens_change_between_experts(m, x, w, ids):
    y = torch.zeros_like(x)
    x = x.clone()
    for e in range(EXPERTS):
        y = y + m.experts[e](x) * (w * (ids == e)).sum(-1, keepdim=True)
        x += 1
    return y


def a_view_of_the_tokens_changes(m, x, w, ids):
    y = torch.zeros_like(x)
    x = x.clone()
    for e in range(EXPERTS):
        y = y + m.experts[e](x) * (w * (ids == e)).sum(-1, keepdim=True)
        x[:, 0].mul_(2)
    return y


def something_between_experts(m, x, w, ids):
    y = torch.zeros_like(x)
    for e in range(EXPERTS):
        y = y + m.experts[e](x) * (w * (ids == e)).sum(-1, keepdim=True)
        y = y + x if e == 1 else y
    return y


def ids_that_repeat(m, x, w, ids):
    ids = torch.stack([ids[:, 0], ids[:, 0]], -1)
    return masked(m, x, w, ids, lambda e, rows: m.experts[e](rows))


def replaced_rows(m, x, w, ids):
    y = torch.zeros_like(x)
    for e in range(EXPERTS):
        tok, slot = torch.where(ids == e)
        y = y.index_put((tok,), m.experts[e](x[tok]) * w[tok, slot, None])
    return y


def read_elsewhere(m, x, w, ids):
    y, total = torch.zeros_like(x), 0.0
    for e in range(EXPERTS):
        out = m.experts[e](x) * (w * (ids == e)).sum(-1, keepdim=True)
        y, total = y + out, total + out.square().mean()
    return y + total


def no_routing(m, x, w, ids):
    return selected(m, x, w, ids, lambda e, rows: rows * 2.0)


def weights_outside_are_zeros_that_were_written(m, x, w, ids):
    outside = torch.zeros_like(w)
    outside[:, 0] = 1.0
    y = torch.zeros_like(x)
    for e in range(EXPERTS):
        y = y + m.experts[e](x) * torch.where(ids == e, w, outside).sum(-1, keepdim=True)
    return y


REFUSED = {
    weights_outside_are_zeros_that_were_written: "a value that is neither tokens nor routing weights enters the experts",
    different_code: "experts 0 and 1 compute different functions",
    different_sizes: "the parameters of experts 0 and 1 differ in shape",
    tied_experts: "belongs to several experts",
    shared_parameter: "belongs to several experts",
    missing_expert: "there is no expert 1 among experts",
    twice: "it adds an expert a second time",
    other_slice: "what belongs to one expert meets another expert's",
    other_tokens: "it does not select the tokens of one expert",
    slots_of_other_ids: "weights are taken at other slots than the rows' own",
    mask_of_other_ids: "routed by other ids",
    biased_with_weights_at_the_input: "more than zero for tokens that were not routed",
    small_scores: "routes no region",
    normalised_over_rows: "it may mix rows",
    batch_norm: "no rule shows that it acts on each row alone",
    tokens_change_between_experts: "have different tokens",
    a_view_of_the_tokens_changes: "writes in place",
    something_between_experts: "it adds something else between the experts",
    ids_that_repeat: "ids may repeat",
    replaced_rows: "it replaces rows instead of adding",
    read_elsewhere: "what it computes of an expert is also read at",
    no_routing: "no parameter enters the expert",
}


@pytest.mark.parametrize("loop", REFUSED, ids=lambda loop: loop.__name__)
def test_what_is_no_region_is_refused_with_the_reason(loop):
    graph, _ = captured(loop, bias=loop is biased_with_weights_at_the_input)
    graph_module = working_copy(graph)
    Deinplace().run(graph_module)
    report = FindRegions().run(graph_module)
    assert report.matched == 0
    assert any(REFUSED[loop] in reason for reason in report.skipped), "\n".join(report.skipped)
    assert all("test_expert_loop.py" in reason for reason in report.skipped)


def test_an_experts_parameter_that_is_also_used_elsewhere_is_an_error_that_names_it():
    class Decayed(Layer):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 0.1 * self.experts[1][0].weight.square().mean()

    graph, _ = captured(modules_on_their_tokens, Decayed)
    with pytest.raises(
        UnsupportedModelError, match=r"`experts\.1\.0\.weight` is used by experts and, at `square`"
    ):
        partition_model(graph)


def test_dimensions_of_the_captured_batch_stay_symbolic():
    """Sizes that depend on data (the rows of one expert) are gone with the loop."""
    result = partition_model(captured(modules_on_their_tokens)[0])
    code = result.graph_module.code + "".join(p.module.code for p in result.programs.attention)
    assert "where" not in code and "sym_size" not in code and "index_add" not in code
