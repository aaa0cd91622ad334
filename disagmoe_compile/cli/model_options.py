"""Options that `disagmoe plan` and `disagmoe simulate` share: a model, a cluster, a batch, and the sizes that may be fixed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, TypeVar, overload

import typer

from disagmoe_compile.errors import InputError

NodesOption = Annotated[int | None, typer.Option(help="Nodes of the cluster.")]
SeqLengthOption = Annotated[int | None, typer.Option(help="Tokens of a sequence.")]
SequencesPerGpuOption = Annotated[int | None, typer.Option(help="Sequences of a step for each GPU, at most.")]
MicroBatchSizeOption = Annotated[
    int | None,
    typer.Option(help="Sequences of a micro-batch on an attention rank.", show_default="chosen"),
]
PipelineGroupsOption = Annotated[int | None, typer.Option(help="Groups of each kind.", show_default="chosen")]
AttentionGroupSizeOption = Annotated[
    int | None, typer.Option(help="Ranks of one attention group.", show_default="chosen")
]
FfnGroupSizeOption = Annotated[
    int | None, typer.Option(help="Ranks of one FFN group.", show_default="chosen")
]
CostsOption = Annotated[str, typer.Option(help="corrected, or paper: as printed there.")]
DedupOption = Annotated[str, typer.Option(help="Copies of a token that are sent: none, rank or node.")]
SharedExpertsOnOption = Annotated[str | None, typer.Option(help="attention or ffn.", show_default="chosen")]

Value = TypeVar("Value")


@overload
def one_of(name: str, given: str, values: Mapping[str, Value]) -> Value: ...
@overload
def one_of(name: str, given: str | None, values: Mapping[str, Value]) -> Value | None: ...
def one_of(name: str, given: str | None, values: Mapping[str, Value]) -> Value | None:
    """What an option's text stands for; None where it is not given. Raises InputError listing the texts."""
    if given is not None and given not in values:
        raise InputError(f"--{name} must be one of {', '.join(values)}, got {given!r}")
    return None if given is None else values[given]
