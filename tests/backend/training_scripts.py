"""What training scripts do, one habit a function, each in lockstep with eager on every rank of a tiny model's world.

A script returns how far ours was from the twin, by name of what was compared; `run_scripts` runs several in one process, so
each also meets what the ones before it left behind.
"""

from __future__ import annotations

import gc
import io
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lockstep import Lockstep
from optimizer_scripts import (
    averaged_weights,
    muon_on_what_is_split,
    optimizers_and_schedulers,
    several_optimizers,
    weights_written_in_place,
)
from tiny_training import BATCH, SMALL, VOCAB, Errors, Options, adamw, make_batch, sgd, tiny
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import DTensor

from disagmoe_compile.errors import DisagMoEError
from disagmoe_compile.models import styles
from disagmoe_compile.runtime.binding import holder_of
from disagmoe_compile.runtime.clip import clip_grad_norm_
from disagmoe_compile.runtime.full_state import full_state_dict


def gradient_scaler_with_an_overflow(options: Options) -> Errors:
    """Half precision. The scale overflows from the first step on, later grows by itself, and once the model overflows: every rank
    must skip the same steps as eager. Then a loss outside the model, and an optimizer without parameters on FFN ranks.

    Eager goes through the batch slice by slice, one for each attention rank and micro-batch: in half precision the gradient of a
    weight is rounded, and overflows, as a sum over the tokens of one product. The head's, over all 72 tokens, does at 2**19;
    those of four slices do not."""
    slices = options["attention_group_size"] * options["n_microbatches"]
    inside = Lockstep(tiny, sgd, options)
    _scaled_steps(inside, "half precision", _loss_inside, slices, init_scale=2.0**20, overflow_at=6)
    outside = Lockstep(lambda: _freeze(tiny(), lambda name: "moe" not in name), sgd, options)
    _scaled_steps(outside, "half precision outside", _loss_outside, slices, init_scale=2.0**20, overflow_at=6)
    return {**inside.errors, **outside.errors}


def _loss_inside(call: Callable[..., Any], batch: Mapping[str, Tensor]) -> Tensor:
    return call(**batch).loss


def _loss_outside(call: Callable[..., Any], batch: Mapping[str, Tensor]) -> Tensor:
    logits = call(batch["input_ids"]).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), batch["labels"][:, 1:].flatten())


def _scaled_steps(
    both: Lockstep,
    name: str,
    loss_of: Callable[[Callable[..., Any], Mapping[str, Tensor]], Tensor],
    slices: int,
    init_scale: float,
    overflow_at: int,
) -> None:
    scales: list[list[float]] = [[], []]
    optimizers = (both.optimizer, both.twin_optimizer)
    for (call, model), optimizer, kept, parts in zip(
        both.sides, optimizers, scales, (1, slices), strict=True
    ):
        scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=2)
        for step in range(overflow_at + 3):
            if step in (
                overflow_at,
                overflow_at + 1,
            ):  # beyond the largest number of half precision, and back
                with torch.no_grad():
                    model.norm.weight.mul_(2.0**20 if step == overflow_at else 2.0**-20)
            for part, share in _sliced(make_batch(step), parts):
                with torch.autocast("cpu", dtype=torch.float16):
                    loss = loss_of(call, part) * share
                scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            kept.append(scaler.get_scale())
    changes = [after / before for before, after in zip([init_scale, *scales[1]], scales[1])]
    assert changes[0] == 0.5 and 2 in changes and changes[overflow_at] == 0.5, scales
    both.note(f"scales, {name}", *map(torch.tensor, scales))
    both.compare_parameters(name)


def _sliced(batch: Mapping[str, Tensor], parts: int) -> Iterator[tuple[dict[str, Tensor], float]]:
    """Slices of the batch, each with its share of the labels: the mean over a slice times its share adds up to the batch's."""
    labels = (batch["labels"][:, 1:] != -100).sum(1).chunk(parts)
    whole = sum(int(count.sum()) for count in labels)
    for index, mine in enumerate(labels):
        yield {name: tensor.chunk(parts)[index] for name, tensor in batch.items()}, int(mine.sum()) / whole


def _freeze(model: nn.Module, trains: Callable[[str], bool]) -> nn.Module:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trains(name))
    return model


FROZEN: Mapping[str, Callable[[str], bool]] = {
    "all but the head": lambda name: name.startswith("head"),
    "all but the experts": lambda name: "moe.w" in name or "moe.b" in name,
    "the experts": lambda name: "moe" not in name or "router" in name,
    "the attention": lambda name: "qkv" not in name and "out" not in name,
}


def frozen_parameters(options: Options) -> Errors:
    errors: dict[str, float] = {}
    for name, trains in FROZEN.items():
        both = Lockstep(lambda trains=trains: _freeze(tiny(), trains), sgd, options)
        assert any(p.requires_grad for p in both.twin.parameters())
        for step in range(2):
            both.train(name, **make_batch(step))
        both.compare_parameters(name)
        errors.update(both.errors)
    return errors


class LoRA(nn.Module):
    """A frozen linear layer with a trained correction of low rank."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def _with_adapters() -> nn.Module:
    model = tiny().requires_grad_(False)
    torch.manual_seed(7)
    for block in model.blocks:
        block.qkv = LoRA(block.qkv)
    return model


def adapters(options: Options) -> Errors:
    both = Lockstep(_with_adapters, sgd, options)
    for step in range(2):
        both.train("adapters", **make_batch(step))
    both.compare_parameters("adapters")
    return both.errors


def accumulation(options: Options) -> Errors:
    """Several backward calls before a step, gradients zeroed in place, a loss that is scaled, two losses added up."""
    both = Lockstep(tiny, sgd, options)
    for cycle in range(2):
        for call, _ in both.sides:
            for step in range(3):
                (call(**make_batch(10 * cycle + step)).loss / 3).backward()
        both.compare_gradients("accumulated")
        for optimizer in (both.optimizer, both.twin_optimizer):
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    for call, _ in both.sides:
        (call(**make_batch(1)).loss + 0.5 * call(**make_batch(2)).loss).backward()
    both.compare_gradients("two losses")
    norms = [
        clip_grad_norm_(both.model.parameters(), 0.1),
        nn.utils.clip_grad_norm_(both.twin.parameters(), 0.1),
    ]
    both.note("norm", *norms)
    both.step()
    both.compare_parameters("after clipping")
    return both.errors


def gradient_hooks(options: Options) -> Errors:
    """Hooks from before the first call see each owned parameter's whole gradient, once a backward."""
    both = Lockstep(tiny, sgd, options)
    calls: dict[int, int] = {}
    for _, model in both.sides:
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: gradient.clamp(-1e-2, 1e-2))
            parameter.register_post_accumulate_grad_hook(
                lambda parameter: calls.update({id(parameter): calls.get(id(parameter), 0) + 1})
            )
    for step in range(2):
        both.train("clamped by a hook", **make_batch(step))
    both.compare_parameters("clamped by a hook")
    owned = [p for p in both.model.parameters() if p.numel()]
    assert all(calls.get(id(p), 0) == 2 for p in owned), "a hook did not run once a backward"
    return both.errors


def evaluation_between_steps(options: Options) -> Errors:
    both = Lockstep(tiny, sgd, options)
    for step, mode in enumerate((torch.no_grad, torch.inference_mode, torch.no_grad)):
        both.train("training", **make_batch(step))
        both.model.eval(), both.twin.eval()
        with mode():
            ours, theirs = (call(**make_batch(5 + step)) for call, _ in both.sides)
            both.note("evaluation", ours.loss, theirs.loss)
            both.note("logits", ours.logits, theirs.logits)
        both.model.train(), both.twin.train()
    return both.errors


def twenty_shapes(options: Options) -> Errors:
    """Past the number of graphs that Dynamo would keep for one function."""
    both = Lockstep(tiny, sgd, options)
    for length in range(4, 24):
        both.train("shapes", **make_batch(length, BATCH * (1 + length % 2), length))
    both.train("shapes", **make_batch(0))
    return both.errors


class Scaled(nn.Module):
    """A number of the model in its loss: another one in the next model."""

    def __init__(self, hidden: int, scale: float) -> None:
        super().__init__()
        self.inner = styles.build("where_loop", n_layers=1, vocab=VOCAB, hidden=hidden, seed=3)
        self.scale = scale

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        output = self.inner(input_ids, labels)
        return output._replace(loss=output.loss * self.scale)


def several_models(options: Options) -> Errors:
    """Alternating; each starts when the ones before it are already bound."""
    first = Lockstep(tiny, sgd, options)
    first.train("first", **make_batch(0))
    others = {
        f"width {hidden}": Lockstep(partial(Scaled, hidden, hidden**-0.5), sgd, options)
        for hidden in (16, 24)
    }
    for step in range(2):
        for name, other in others.items():
            other.train(name, **make_batch(step))
        first.train("first", **make_batch(step))
    return {**first.errors, **{n: e for other in others.values() for n, e in other.errors.items()}}


@dataclass
class Result:
    loss: Tensor | None
    extras: dict[str, Any]


class UnusualSignature(nn.Module):
    """Inputs in a dict, by keyword, None and bool; a dataclass with a dict, None and a bool for an answer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = tiny()

    def forward(
        self, batch: dict[str, Tensor], *, smooth: bool = False, weights: Tensor | None = None
    ) -> Result:
        logits = self.inner(batch["input_ids"]).logits
        flat, labels = logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()
        loss = F.cross_entropy(flat, labels, weight=weights, label_smoothing=0.1 if smooth else 0.0)
        return Result(loss, {"smooth": smooth, "nothing": None, "logits": logits.detach()})


def unusual_signatures(options: Options) -> Errors:
    both = Lockstep(UnusualSignature, sgd, options)
    weights = torch.linspace(0.5, 2.0, VOCAB)
    for step, kwargs in enumerate(({}, {"smooth": True}, {"weights": weights}, {})):
        results = [call(make_batch(step), **kwargs) for call, _ in both.sides]
        for result in results:
            result.loss.backward()
            assert isinstance(result, Result)
            assert (result.extras["smooth"], result.extras["nothing"]) == (bool(kwargs.get("smooth")), None)
        both.note("loss", results[0].loss, results[1].loss)
        both.compare_gradients("gradients")
        both.step()
    return both.errors


def _tied() -> nn.Module:
    model = tiny()
    model.head.weight = model.embed.weight
    return model


def tied_embeddings(options: Options) -> Errors:
    both = Lockstep(_tied, lambda model: adamw(model.parameters()), options)
    for step in range(3):
        both.train("tied", **make_batch(step))
    both.compare_parameters("tied")
    return both.errors


def _undecided() -> nn.Module:
    """All scores equal: top-k has nothing but ties, and every token goes to the same experts."""
    model = tiny()
    for name, parameter in model.named_parameters():
        if "router" in name or "gate" in name:
            nn.init.zeros_(parameter)
    return model


def all_tokens_to_the_same_experts(options: Options) -> Errors:
    """Ranks without tokens take part; their experts' gradients are zero, not None and not NaN."""
    both = Lockstep(_undecided, lambda model: torch.optim.SGD(model.parameters(), lr=0.0), options)
    for step in range(2):
        both.train("one expert", **make_batch(step))
    return both.errors


def numbers_that_are_not(options: Options) -> Errors:
    """A NaN in the model reaches loss and gradients, hangs nobody, and is gone with its cause."""
    both = Lockstep(tiny, sgd, options)
    both.train("before", **make_batch(0))
    for call, model in both.sides:
        kept = model.norm.weight.detach().clone()
        with torch.no_grad():
            model.norm.weight.fill_(float("nan"))
        loss = call(**make_batch(1)).loss
        loss.backward()
        assert loss.isnan()
        assert all(
            p.grad.isnan().any() for n, p in model.named_parameters() if p.grad is not None and "qkv" in n
        )
        with torch.no_grad():
            model.norm.weight.copy_(kept)
        model.zero_grad()
    both.train("after", **make_batch(2))
    return both.errors


def whole_model_on_rank_0(options: Options) -> Errors:
    """Saved by `torch.save`, loaded strictly into a plain model and back into the ranks' parts; torch's own way raises."""
    both = Lockstep(lambda: styles.build("gathered_einsum", num_experts=7, **SMALL), sgd, options)
    both.train("before", **make_batch(0))
    state = full_state_dict(both.compiled)
    rank = torch.distributed.get_rank()
    assert bool(state) == (rank == 0)
    file = io.BytesIO()
    torch.save(state, file)
    sent = [file.getvalue()]
    torch.distributed.broadcast_object_list(sent)
    loaded = torch.load(io.BytesIO(sent[0]), weights_only=True)
    assert {type(value) for value in loaded.values()} == {Tensor}
    plain = styles.build("gathered_einsum", seed=9, num_experts=7, **SMALL)
    plain.load_state_dict(loaded, strict=True)
    for name, value in plain.state_dict().items():
        both.note("saved", value, both.twin.state_dict()[name])
    both.train("between", **make_batch(1))
    for _, model in both.sides:
        model.load_state_dict(loaded, strict=True)
    both.compare_parameters("loaded")
    both.train("after", **make_batch(2))
    state = both.model.state_dict()
    elsewhere = [state[n] for n, p in both.model.named_parameters() if not holder_of(p).bound.is_owned]
    for value in elsewhere:
        if isinstance(value, DTensor):
            with pytest.raises(DisagMoEError, match="full_state_dict"):
                value.full_tensor()
    with pytest.raises(DisagMoEError, match="full_state_dict"):  # at once on every rank, even or not
        get_model_state_dict(both.model, options=StateDictOptions(full_state_dict=True))
    return both.errors


SCRIPTS: Mapping[str, Callable[[Options], Errors]] = {
    script.__name__: script
    for script in (
        optimizers_and_schedulers,
        several_optimizers,
        muon_on_what_is_split,
        averaged_weights,
        weights_written_in_place,
        gradient_scaler_with_an_overflow,
        frozen_parameters,
        adapters,
        accumulation,
        gradient_hooks,
        evaluation_between_steps,
        twenty_shapes,
        several_models,
        unusual_signatures,
        tied_embeddings,
        all_tokens_to_the_same_experts,
        numbers_that_are_not,
        whole_model_on_rank_0,
    )
}


def run_scripts(options: Options, names: tuple[str, ...]) -> dict[str, Errors | str]:
    """By name: what the script returned, or why it failed. A failure ends the run: other ranks would wait for this one."""
    found: dict[str, Errors | str] = {}
    for name in names:
        torch._dynamo.reset()
        torch.manual_seed(0)
        try:
            found[name] = SCRIPTS[name](options)
        except Exception:
            found[name] = traceback.format_exc()
            break
    return found


def threads_of_process_groups() -> int:
    """Each process group over gloo that is alive has a loop of its own."""
    gc.collect()
    return sum(
        thread.read_text().startswith("gloo_tcp_loop") for thread in Path("/proc/self/task").glob("*/comm")
    )
