"""`disagmoe models [NAME|FILE]`: the models that `--model` knows, or one of them, with parameters, layers and sources."""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from disagmoe_compile.cli.output import DebugOption, JsonOption, Output, command
from disagmoe_compile.models.catalogue import catalogue, find_model
from disagmoe_compile.planner.layer_costs import active_parameters, total_parameters
from disagmoe_compile.planner.model_spec import ModelSpec

MOST_OFF = 0.02
"""Relative; a computed figure that is further from the published one is explained beside the table."""

ModelArgument = Annotated[
    str | None,
    typer.Argument(metavar="[NAME|FILE]", help="Only this one: a name, or a Hugging Face config.json."),
]


@command
def models(model: ModelArgument = None, as_json: JsonOption = False, debug: DebugOption = False) -> Output:
    """The catalogue of models: parameters as computed and as published."""
    known = list(catalogue().values()) if model is None else [find_model(model)]
    document = {"models": [describe(spec) for spec in known]}
    return Output(document, lambda console: _render(console, known))


def describe(spec: ModelSpec) -> dict[str, Any]:
    """The spec with its parameter counts; layers as a number of each kind."""
    return {
        **spec.to_dict(),
        "layers": spec.n_layers,
        "layer_kinds": _layer_kinds(spec),
        "total_parameters": total_parameters(spec),
        "active_parameters": active_parameters(spec),
    }


def _layer_kinds(spec: ModelSpec) -> dict[str, int]:
    """`full attention, experts` -> number of such layers."""
    return dict(
        Counter(
            f"{layer.context} attention, {'experts' if layer.has_experts else 'dense'}"
            for layer in spec.layers
        )
    )


def _render(console: Console, known: list[ModelSpec]) -> None:
    table = Table(title="Models (parameters in 1e9; active ones as the vendor counts them)")
    table.add_column("name", no_wrap=True)
    table.add_column("attention")
    for column in ("layers", "with\nexperts", "hidden", "experts", "top_k", "expert\nwidth", "shared\nwidth"):
        table.add_column(column, justify="right")
    for column in ("total", "published", "active", "published"):
        table.add_column(column, justify="right")
    for spec in known:
        table.add_row(
            spec.name,
            " + ".join(_kinds_of_attention(spec)),
            str(spec.n_layers),
            str(len(spec.expert_layers)),
            *map(str, (spec.hidden, spec.num_experts, spec.top_k, spec.expert_hidden, spec.shared_hidden)),
            f"{total_parameters(spec) / 1e9:.2f}",
            _billions(spec.published_total),
            f"{active_parameters(spec) / 1e9:.2f}",
            _billions(spec.published_active),
        )
    console.print(table)
    for spec in known:
        off = _active_is_off(spec)
        if abs(off) > MOST_OFF:
            console.print(
                f"{spec.name}: active {off:+.1%} from the published figure. {spec.notes}", highlight=False
            )
    console.print("Sources and notes: disagmoe models --json")


def _active_is_off(spec: ModelSpec) -> float:
    """Relative; 0 where nothing is published."""
    return active_parameters(spec) / spec.published_active - 1 if spec.published_active else 0.0


def _kinds_of_attention(spec: ModelSpec) -> list[str]:
    """`gqa`, and the contexts of its layers where they are not all full."""
    contexts = sorted({layer.context.value for layer in spec.layers} - {"full"})
    return [spec.attention.kind.value, *contexts]


def _billions(parameters: float | None) -> str:
    return "" if parameters is None else f"{parameters / 1e9:g}"
