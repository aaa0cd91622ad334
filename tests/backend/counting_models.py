"""A tiny language model whose MoE layers keep counts in buffers, as routers without an auxiliary loss do."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from disagmoe_compile.models.styles.language_model import LanguageModel, Output, Sizes, expert_weights

SIZES = Sizes(vocab=32, hidden=16, heads=2, n_layers=2, num_experts=4, top_k=2, expert_hidden=8)


class CountingMoE(nn.Module):
    """`tokens_per_expert` in float, assigned; `dropped` whole numbers, in place; `bias` steers the choice, and is only read."""

    def __init__(self, sizes: Sizes, assigns: bool = True) -> None:
        super().__init__()
        self.sizes, self.assigns = sizes, assigns
        self.router = nn.Linear(sizes.hidden, sizes.num_experts, bias=False)
        self.up = expert_weights(sizes.num_experts, sizes.hidden, sizes.expert_hidden)
        self.down = expert_weights(sizes.num_experts, sizes.expert_hidden, sizes.hidden)
        self.register_buffer("tokens_per_expert", torch.full((sizes.num_experts,), 7.0))
        self.register_buffer("mass", torch.zeros(sizes.num_experts))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("bias", torch.linspace(-0.3, 0.3, sizes.num_experts))

    def forward(self, tokens_TD: Tensor) -> Tensor:
        scores_TE = self.router(tokens_TD).softmax(-1)
        ids_Tk = (
            (scores_TE + self.bias + 1e-3 * self.tokens_per_expert).topk(self.sizes.top_k, dim=-1).indices
        )
        weights_Tk = scores_TE.gather(1, ids_Tk)
        counts_E = torch.histc(
            ids_Tk.float(), bins=self.sizes.num_experts, min=0, max=self.sizes.num_experts - 1
        )
        with torch.no_grad():
            if self.assigns:
                self.tokens_per_expert = self.tokens_per_expert + counts_E
                self.calls += 1
            else:
                self.tokens_per_expert.add_(counts_E)
                self.calls.add_(1)
            self.mass.copy_(self.mass + scores_TE.sum(0))
        hidden_TkH = torch.einsum("td,tkdh->tkh", tokens_TD, self.up[ids_Tk]).relu()
        return torch.einsum("tkh,tkhd,tk->td", hidden_TkH, self.down[ids_Tk], weights_Tk)


class CountingModel(LanguageModel):
    """Counts all tokens too, in one buffer that every block and the head add to. `recompute`: blocks are checkpointed."""

    def __init__(self, recompute: bool = False, sizes: Sizes = SIZES) -> None:
        super().__init__(sizes, lambda sizes: CountingMoE(sizes, assigns=not recompute))
        self.recompute = recompute
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Output:
        x_BSD = self.embed(input_ids)
        for block in self.blocks:
            x_BSD = checkpoint(block, x_BSD, use_reentrant=False) if self.recompute else block(x_BSD)
            self.seen.add_((x_BSD.detach() > 0).sum())
        self.seen.add_(input_ids.shape[0] * input_ids.shape[1])
        logits = self.head(self.norm(x_BSD))
        if labels is None:
            return Output(None, logits)
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return Output(loss, logits)


def counting_batch(seed: int = 0, batch: int = 6, length: int = 5) -> dict[str, Tensor]:
    ids = torch.randint(0, SIZES.vocab, (batch, length), generator=torch.Generator().manual_seed(seed))
    labels = ids.clone()
    labels[0, :3] = -100
    return {"input_ids": ids, "labels": labels}


def count_on_ranks(distributed: bool) -> dict[str, Tensor]:
    """All buffers by name after two training steps and one evaluation, as each rank's state_dict has them; or eager's."""
    torch.manual_seed(0)
    model = CountingModel(sizes=replace(SIZES, n_layers=1))
    options = {
        "attention_group_size": 2,
        "ffn_group_size": 1,
        "n_microbatches": 2,
        "stage_compiler": "eager",
        "timeout_s": 60,
    }
    call = torch.compile(model, backend="disagmoe", options=options) if distributed else model
    for step in range(2):
        call(**counting_batch(step, batch=8)).loss.backward()
    model.eval()
    with torch.no_grad():
        call(**counting_batch(2, batch=8))
    names = {name for name, _ in model.named_buffers()}
    return {name: value for name, value in model.state_dict().items() if name in names}
