"""Memory for messages, used again instead of being allocated for each micro-batch.

A buffer is a lease: who took it gives it back once nothing reads it any more; where tensors of it live on as activations, for
as long as autograd or a stage keeps them, it is lent and comes back by itself. Sizes that routing decides differ a little from
message to message, so buffers come in classes, eight for each doubling: at most an eighth of one is unused.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections import defaultdict

import torch

_SMALLEST = 4096  # bytes; smaller messages share one class


def size_class(nbytes: int) -> int:
    """The size that is allocated for `nbytes`, at most 9/8 of it above the smallest class."""
    step = 1 << max((nbytes - 1).bit_length() - 4, 0)
    return max(-(-nbytes // step) * step, _SMALLEST)


class Buffers:
    """Free buffers by size, in the CPU's memory. The progress thread takes some while the main thread gives others back.

    `allocated` counts those that were not found free.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock = threading.RLock()  # a lent buffer may come back while the collector runs inside of it
        self._free: defaultdict[int, list[torch.Tensor]] = defaultdict(list)
        self._untouched: dict[int, int] = {}  # per size, of the free ones those that this step has not needed
        self.allocated = 0

    def take(self, nbytes: int) -> torch.Tensor:
        """[at least nbytes] uint8, with anything in it."""
        size = size_class(nbytes)
        with self._lock:
            free = self._free[size]
            if free:
                buffer = free.pop()
                self._untouched[size] = min(self._untouched.get(size, 0), len(free))
                return buffer
            self.allocated += 1
        return torch.empty(size, dtype=torch.uint8, device=self._device)

    def lend(self, nbytes: int) -> torch.Tensor:
        """As `take`, and given back when the last tensor that uses it, or its storage, is gone."""
        buffer = self.take(nbytes)
        memory = (ctypes.c_uint8 * buffer.numel()).from_address(buffer.data_ptr())
        weakref.finalize(memory, self.give, buffer).atexit = False
        return torch.frombuffer(memory, dtype=torch.uint8)  # holds `memory` for as long as its storage lives

    def give(self, buffer: torch.Tensor) -> None:
        with self._lock:
            self._free[buffer.numel()].append(buffer)

    def begin_step(self) -> None:
        """Lets go of buffers that the step before had no use for: other batches need other sizes."""
        with self._lock:
            for size, free in self._free.items():
                del free[: self._untouched.get(size, 0)]
                self._untouched[size] = len(free)
