"""One step of one worker group, and its text.

The text is the name of the action everywhere: plan file, dump, simulator, timeline, watchdog. It parses back.

    3F1                     forward of stage 3 for micro-batch 1
    3B1  3I1  3W1           its full backward, its input gradient, its weight gradient
    2SEND[dispatch.1]0      stage 2 starts to send transfer `dispatch.1` of micro-batch 0
    3RECV[dispatch.1]0      stage 3 posts the receive
    3WAIT[dispatch.1]0      the forward stream of stage 3's group waits until it has arrived
    2WAIT[dispatch.1]0      (on the sender) waits until the send buffer may be reused
    2WAIT[F]0@comm_send     the send stream waits for the compute event recorded after 2F0
    3FREE[dispatch.1]0      releases the buffers of that transfer on this side
    0REDUCE_GRAD[grads.0]   sums the gradients that stage 0 owns over the replicas of its group
    OVERLAP(3F1,5B0)        the parts are independent and may run at the same time

A stream other than the kind's usual one is written behind `@`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum


class ActionKind(StrEnum):
    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    SEND = "SEND"
    RECV = "RECV"
    WAIT = "WAIT"
    FREE = "FREE"
    REDUCE_GRAD = "REDUCE_GRAD"
    OVERLAP = "OVERLAP"


class Stream(StrEnum):
    """An ordered queue of a worker. On CUDA a stream; on CPU the order of the list."""

    FORWARD = "forward"
    BACKWARD = "backward"
    COMM_SEND = "comm_send"
    COMM_RECV = "comm_recv"


COMPUTE_KINDS = frozenset(
    {ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT}
)
_TRANSFER_KINDS = frozenset({ActionKind.SEND, ActionKind.RECV, ActionKind.FREE, ActionKind.REDUCE_GRAD})
_USUAL_STREAM = {
    ActionKind.FORWARD: Stream.FORWARD,
    ActionKind.BACKWARD: Stream.BACKWARD,
    ActionKind.BACKWARD_INPUT: Stream.BACKWARD,
    ActionKind.BACKWARD_WEIGHT: Stream.BACKWARD,
    ActionKind.SEND: Stream.COMM_SEND,
    ActionKind.RECV: Stream.COMM_RECV,
    ActionKind.WAIT: Stream.FORWARD,
    ActionKind.FREE: Stream.FORWARD,
    ActionKind.REDUCE_GRAD: Stream.BACKWARD,
    ActionKind.OVERLAP: Stream.FORWARD,
}
_TEXT = re.compile(
    r"^(?P<stage>\d+)(?P<kind>REDUCE_GRAD|SEND|RECV|WAIT|FREE|[FBIW])"
    r"(?:\[(?P<target>[A-Za-z0-9_.]+)\])?(?P<microbatch>\d+)?(?:@(?P<stream>[a-z_]+))?$"
)


@dataclass(frozen=True, slots=True)
class Action:
    """`transfer` names a Transfer; a WAIT has either that or `after`, the local compute kind whose event it waits for.

    `stream=None` means the kind's usual stream and is replaced by it. `parts` belongs to OVERLAP alone.
    """

    kind: ActionKind
    stage: int
    microbatch: int | None = None
    transfer: str | None = None
    after: ActionKind | None = None
    stream: Stream | None = None
    parts: tuple[Action, ...] = ()

    def __post_init__(self) -> None:
        if self.stream is None:
            object.__setattr__(self, "stream", _USUAL_STREAM[self.kind])
        if self.stage < 0 or (self.microbatch is not None and self.microbatch < 0):
            raise ValueError(f"stage {self.stage} and micro-batch {self.microbatch} must not be negative")
        if (self.kind is ActionKind.OVERLAP) != bool(self.parts):
            raise ValueError(
                f"OVERLAP, and only OVERLAP, has parts: kind {self.kind}, {len(self.parts)} parts"
            )
        if self.kind is ActionKind.OVERLAP:
            if any(part.kind not in COMPUTE_KINDS for part in self.parts):
                raise ValueError(
                    f"parts of an OVERLAP are compute actions, got {[str(p) for p in self.parts]}"
                )
            return
        if self.kind is ActionKind.WAIT:
            if (self.transfer is None) == (self.after is None):
                raise ValueError(
                    f"a WAIT names a transfer or a compute kind, got {self.transfer} and {self.after}"
                )
        elif self.after is not None:
            raise ValueError(f"only WAIT waits for a compute event, got {self.kind} after {self.after}")
        if self.after is not None and self.after not in COMPUTE_KINDS:
            raise ValueError(f"a compute event is one of F, B, I, W, got {self.after}")
        if self.kind in _TRANSFER_KINDS and self.transfer is None:
            raise ValueError(f"{self.kind} needs a transfer")
        if self.kind in COMPUTE_KINDS and self.transfer is not None:
            raise ValueError(f"{self.kind} has no transfer, got {self.transfer}")
        if (self.microbatch is None) != (self.kind is ActionKind.REDUCE_GRAD):
            raise ValueError(
                f"every action but REDUCE_GRAD has a micro-batch: {self.kind}, {self.microbatch}"
            )

    def __str__(self) -> str:
        if self.kind is ActionKind.OVERLAP:
            return f"OVERLAP({','.join(map(str, self.parts))})"
        target = self.transfer or (self.after.value if self.after else None)
        text = f"{self.stage}{self.kind.value}" + (f"[{target}]" if target else "")
        if self.microbatch is not None:
            text += str(self.microbatch)
        return text if self.stream is _USUAL_STREAM[self.kind] else f"{text}@{self.stream}"

    @staticmethod
    def parse(text: str) -> Action:
        """Inverse of `str(action)`. Raises ValueError naming the text."""
        if text.startswith("OVERLAP(") and text.endswith(")"):
            return overlap(*(Action.parse(part) for part in text[len("OVERLAP(") : -1].split(",")))
        found = _TEXT.match(text)
        if found is None:
            raise ValueError(
                f"not an action: {text!r}; expected e.g. 3F1, 2SEND[dispatch.1]0, 2WAIT[F]0@comm_send"
            )
        kind, target, microbatch, stream = (
            found["kind"],
            found["target"],
            found["microbatch"],
            found["stream"],
        )
        compute = {k.value for k in COMPUTE_KINDS}
        is_event = kind == "WAIT" and target in compute
        if stream is not None and stream not in set(Stream):
            raise ValueError(f"unknown stream {stream!r} in action {text!r}; one of {', '.join(Stream)}")
        return Action(
            kind=ActionKind(kind),
            stage=int(found["stage"]),
            microbatch=None if microbatch is None else int(microbatch),
            transfer=None if is_event else target,
            after=ActionKind(target) if is_event else None,
            stream=None if stream is None else Stream(stream),
        )


def overlap(*parts: Action) -> Action:
    """The composite of independent compute actions; it takes stage and micro-batch of its first part."""
    if not parts:
        raise ValueError("OVERLAP needs at least one part")
    return Action(ActionKind.OVERLAP, parts[0].stage, parts[0].microbatch, parts=parts)
