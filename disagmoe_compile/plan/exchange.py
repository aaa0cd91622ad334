"""How M2N sends rows between attention and FFN ranks: how many copies of a token, and in which type. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from disagmoe_compile.plan.ir import DTYPE_BYTES

PAYLOAD_DTYPES = ("bfloat16", "float16", "float32")
DEDUPS = ("none", "rank")
_FLOATS = frozenset({"float64", *PAYLOAD_DTYPES})


@dataclass(frozen=True, slots=True)
class RowExchange:
    """`dedup`: "rank" sends a token once to each FFN rank that has an expert of it and gets one summed row back; "none" sends
    and gets back a row for each (token, expert). `payload_dtype`: type of rows and of their gradients on the wire, None for the
    type they are computed in. Rows are never widened; routing weights and what attention stages hand each other keep their type.
    """

    dedup: str = "rank"
    payload_dtype: str | None = None

    def __post_init__(self) -> None:
        if self.dedup not in DEDUPS:
            raise ValueError(f"dedup must be one of {', '.join(DEDUPS)}, got {self.dedup!r}")
        if self.payload_dtype is not None and self.payload_dtype not in PAYLOAD_DTYPES:
            raise ValueError(
                f"payload_dtype must be one of {', '.join(PAYLOAD_DTYPES)}, got {self.payload_dtype!r}"
            )

    @staticmethod
    def of_options(options: Mapping[str, Any]) -> RowExchange:
        """Of a plan's options; a plan of before there was a choice has none."""
        return RowExchange(options.get("dedup", "rank"), options.get("payload_dtype"))

    @property
    def row_per_pair(self) -> bool:
        return self.dedup == "none"

    def wire_dtype(self, dtype: str) -> str:
        """The type on the wire of rows computed in `dtype`."""
        payload = self.payload_dtype
        if payload is None or dtype not in _FLOATS or DTYPE_BYTES[payload] >= DTYPE_BYTES[dtype]:
            return dtype
        return payload

    def is_scaled(self, dtype: str) -> bool:
        """Whether rows travel with an exponent of two: float16 alone holds neither large activations nor small gradients."""
        return self.wire_dtype(dtype) == "float16" != dtype


AS_COMPUTED = RowExchange()
