"""Which backwards a script ran through a model, kept to be compared with other ranks.

`backward()` of a loss that the model computed asks no other rank: its gradients are there since the call. So a rank whose script
skipped it, or scaled its loss by another number, would go on alone, and its part of the model with it. The next call and the next
`step()`, which meet the other ranks anyway, compare what happened since.
"""

from __future__ import annotations

import hashlib
import struct

# what differs, in an error
SAME_BACKWARDS = (
    "the backward() calls before this, or the scale of the losses they started from (torch.autograd.grad of parameters that live "
    "on other ranks counts as none)"
)


class BackwardHistory:
    """Of one model on one rank. Starts with its binding, so it is equal on ranks that did the same."""

    def __init__(self) -> None:
        self._calls = 0
        self._digest = b""

    def start_call(self) -> int:
        """A number for a call that a backward may follow."""
        self._calls += 1
        return self._calls

    def note(self, call: int, incoming: float) -> None:
        """The backward of this call ran, and `incoming` is the gradient of the loss that it came with."""
        self._digest = hashlib.sha256(self._digest + struct.pack("<qd", call, incoming)).digest()

    @property
    def digest(self) -> bytes:
        return self._digest
