"""One trace instead of two: the batch dimension is marked before Dynamo looks at the model.

    first call ──> Dynamo starts to compile ──> marked here ──> trace (symbolic batch) ──> backend
                                      not marked ──> trace ──> backend restarts it ──> trace ──> backend

The backend can only ask for a symbolic batch once Dynamo has traced the whole model (`capture.py`), which takes seconds. What is
marked here is decided on the arguments alone, and only where they leave no doubt; `capture` has the last word, and restarts the
trace wherever this module kept out of it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

import torch
import torch._dynamo
from torch import Tensor
from torch._dynamo import convert_frame
from torch._dynamo.callback import CallbackArgs, callback_handler
from torch.utils import _pytree as pytree


def mark_batch(arguments: Any) -> None:
    """Marks dimension 0 of the batch inputs among `arguments` (containers in any nesting) as dynamic, if all agree on its size.

    The rule is that of `capture`, without its ways out of a tie: inputs of two dimensions or more share one first size above 1,
    and a vector belongs to the batch if it has that size and no input has it as a length.
    """
    found = [leaf for leaf in pytree.tree_leaves(arguments) if type(leaf) is Tensor and leaf.dim() > 0]
    wide = [tensor for tensor in found if tensor.dim() > 1]
    sizes = {int(tensor.shape[0]) for tensor in wide} - {1}
    if len(sizes) != 1:
        return
    (size,) = sizes
    lengths = {int(length) for tensor in wide for length in tensor.shape[1:]}
    for tensor in found:
        if tensor.shape[0] == size and (tensor.dim() > 1 or size not in lengths):
            mark_samples(tensor, in_doubt=size in lengths)


def mark_samples(tensor: Tensor, *, in_doubt: bool) -> None:
    """Dimension 0 gets a symbol of its own. `in_doubt`: it may turn out to be no batch (a mask [S, S] where B equals S), and
    the trace may then fix it; otherwise that is an error."""
    if in_doubt:
        torch._dynamo.maybe_mark_dynamic(tensor, 0)
    else:
        torch._dynamo.mark_dynamic(tensor, 0)


def is_marked(tensor: Tensor) -> bool:
    marks = ("_dynamo_dynamic_indices", "_dynamo_weak_dynamic_indices")
    return any(0 in getattr(tensor, name, ()) for name in marks)


class MarkBeforeTracing:
    """Does it for every call that Dynamo compiles for `backend`, while `applies()`."""

    def __init__(self, backend: Callable[..., Any], applies: Callable[[], bool]) -> None:
        self._backend, self._applies = backend, applies

    def register(self) -> None:
        """Once, however often called; `torch._dynamo.reset()` undoes it, so call it from every backend call too."""
        if self not in callback_handler.start_callbacks:
            callback_handler.register_start_callback(self)

    def __call__(self, _: CallbackArgs) -> None:
        compilation = _compilation()
        if compilation is None or innermost(compilation.get("compiler_fn")) is not self._backend:
            return
        if self._applies():
            mark_batch(compilation.get("locals"))


def _compilation() -> Mapping[str, Any] | None:
    """Arguments of Dynamo's compilation that called us back: the callback itself is told nothing of them."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is convert_frame._compile.__code__:
            return frame.f_locals
        frame = frame.f_back
    return None


def innermost(backend: Any) -> Any:
    """The backend function inside Dynamo's and torch.compile's wrappers."""
    while True:
        inner = getattr(backend, "_torchdynamo_orig_backend", None) or getattr(backend, "compiler_fn", None)
        if inner is None:
            return backend
        backend = inner
