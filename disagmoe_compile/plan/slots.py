"""When each pass of an in-order AF-Pipe runs, in slots: 1F1B interleaved over places.

A pipeline of p attention and p FFN groups has 4p places, messages counted:

    place    0     1     2     3     4     5   ...       A_b is at place 4 (b mod p), F_b at the place two after it
             A_0  send  F_0  send   A_1  send  ...       a chunk: p boundaries in a row; v = ceil(L / p) of them, the last full

Micro-batches go in rounds of q, chunk by chunk. Place x stands at x' = floor(x q / 4p) of q positions, and in slot t it runs a
forward and then a backward, k and j counting the passes of one place (micro-batch i of round r, chunk c):

    forward    t = k + x'                             k = (r v + c) q + i
    backward   t = j + (v - 1) q + 2 (q - 1) - x'     j = (r v + v - 1 - c) q + i

Whatever a pass needs is in an earlier slot, or in the same one and before it: forwards by stage, then backwards from the last.
For a forward: x' does not fall along a chunk, and q - 1 < q from its end to the next one. For a backward the same; the last
place's comes 2 (q - 1 - x') >= 0 slots after its forward. The head stands at the last place and runs both ways in one slot.

Group 0 has run (v - 1) q + 2 (q - 1) + 1 forwards before its first backward, then one of each in turn: it holds v q + q - 1
activations, with q = 4p the 4L + 4p - 1 of the paper.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Slots:
    """`groups`: p, of either role. `interleave`: q. Raises ValueError on a size below 1."""

    n_boundaries: int
    groups: int
    interleave: int

    def __post_init__(self) -> None:
        for name in ("n_boundaries", "groups", "interleave"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

    @property
    def chunks(self) -> int:
        return -(-self.n_boundaries // self.groups)

    @property
    def period(self) -> int:
        """Slots from a round to the next."""
        return self.chunks * self.interleave

    def place(self, stage: int) -> tuple[int, int]:
        """The chunk of a stage, and the position of its place."""
        boundary, is_ffn = divmod(stage, 2)
        if boundary == self.n_boundaries:
            chunk, place = self.chunks - 1, 4 * self.groups - 1
        else:
            first = (
                self.chunks * self.groups - self.n_boundaries
            )  # an uneven chunk is the first: nothing waits for it
            chunk, within = divmod(boundary + first, self.groups)
            place = 4 * within + 2 * is_ffn
        return chunk, place * self.interleave // (4 * self.groups)

    def forward(self, stage: int, microbatch: int) -> int:
        """The slot of a forward."""
        chunk, position = self.place(stage)
        r, i = divmod(microbatch, self.interleave)
        return r * self.period + chunk * self.interleave + i + position

    def backward(self, stage: int, microbatch: int) -> int:
        """The slot of a backward."""
        chunk, position = self.place(stage)
        q, v = self.interleave, self.chunks
        r, i = divmod(microbatch, q)
        return r * self.period + (v - 1 - chunk) * q + i + (v - 1) * q + 2 * (q - 1) - position
