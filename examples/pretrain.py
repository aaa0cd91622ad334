"""Pretrains a tiny Qwen3-MoE on Python source text: an ordinary PyTorch script that knows nothing of ranks.

python examples/pretrain.py                         # one process
torchrun --nproc-per-node 4 examples/pretrain.py    # attention and experts on disjoint ranks, same losses
"""

import logging
import sysconfig
from pathlib import Path

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

STEPS, BATCH_SIZE, SEQ_LENGTH = 10, 8, 64


def text() -> torch.Tensor:
    """Some standard-library modules as bytes: one token a byte."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:50]
    return torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in files)), dtype=torch.uint8)


def main() -> None:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        use_cache=False,
    )
    model = Qwen3MoeForCausalLM(config)
    compiled = torch.compile(model, backend="disagmoe")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = text()
    for step in range(STEPS):
        starts = torch.randint(0, len(tokens) - SEQ_LENGTH, (BATCH_SIZE, 1))
        ids = tokens[starts + torch.arange(SEQ_LENGTH)].long()
        loss = compiled(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        logging.info("step %d loss %.6f", step, loss.item())


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    main()
