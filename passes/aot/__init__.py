"""Ahead-of-time compilation of stages: forward, input gradient and weight gradient as separate code."""

from disagmoe_compile.passes.aot.cache import (
    PROCESS_CACHE,
    CompileStats,
    StageCache,
    attention_key,
    experts_key,
)
from disagmoe_compile.passes.aot.experts import reference_experts
from disagmoe_compile.passes.aot.recomputed import RecomputedStage
from disagmoe_compile.passes.aot.stages import compile_attention, compile_experts

__all__ = [
    "PROCESS_CACHE",
    "CompileStats",
    "RecomputedStage",
    "StageCache",
    "attention_key",
    "compile_attention",
    "compile_experts",
    "experts_key",
    "reference_experts",
]
