"""The canonical node is the sum over routed pairs, with exact gradients."""

from __future__ import annotations

import torch

from disagmoe_compile.passes.experts_op import experts


def function(rows, weight, w, b):
    return torch.tanh(rows @ w + b) * weight.unsqueeze(-1)


def inputs(n_tokens=5, top_k=2, n_experts=3):
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64, requires_grad=True)

    tokens, weight = normal(n_tokens, 4), normal(n_tokens * top_k)
    token = torch.arange(n_tokens * top_k) // top_k
    expert = torch.randint(0, n_experts, (n_tokens * top_k,), generator=generator)
    return tokens, token, expert, weight, normal(n_experts, 4, 6), normal(n_experts, 6)


def test_equals_the_definition_pair_by_pair():
    tokens, token, expert, weight, w, b = inputs()
    expected = torch.zeros(5, 6, dtype=torch.float64)
    for p in range(len(token)):
        e = expert[p]
        expected[token[p]] += function(tokens[token[p]][None], weight[p][None], w[e], b[e])[0].detach()
    actual = experts(tokens, token, expert, weight, w, b, function=function, num_experts=3)
    torch.testing.assert_close(actual.detach(), expected)


def test_gradients_are_exact():
    tokens, token, expert, weight, w, b = inputs()

    def run(tokens, weight, w, b):
        return experts(tokens, token, expert, weight, w, b, function=function, num_experts=3)

    assert torch.autograd.gradcheck(run, (tokens, weight, w, b))


def test_pairs_of_no_expert_add_nothing():
    tokens, token, expert, weight, w, b = inputs()
    dropped = torch.full_like(expert, 3)
    assert not experts(tokens, token, dropped, weight, w, b, function=function, num_experts=3).any()


def test_no_pairs_and_no_tokens_are_normal():
    tokens, token, expert, weight, w, b = inputs()
    nothing = experts(tokens[:0], token[:0], expert[:0], weight[:0], w, b, function=function, num_experts=3)
    assert nothing.shape == (0, 6)
    nothing.sum().backward()
    assert not w.grad.any()
