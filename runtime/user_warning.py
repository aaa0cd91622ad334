"""Warnings whose place is the line of the script that called the compiled model, not one inside torch."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from types import FrameType

import torch
from torch._dynamo import eval_frame

_TORCH = f"{Path(torch.__file__).parent}{os.sep}"


def warn_at_call(message: str) -> None:
    """As `warnings.warn(message)` on the line of that call; once for each line, unless filters say otherwise."""
    frame = _caller()
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    warnings.warn_explicit(
        message,
        UserWarning,
        frame.f_code.co_filename,
        frame.f_lineno,
        module=frame.f_globals.get("__name__"),
        registry=registry,
    )


def _caller() -> FrameType:
    """Outside torch, of the compiled call that is under way; else the nearest."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and not _is_compiled_call(frame):
        frame = frame.f_back
    while frame is not None and frame.f_code.co_filename.startswith(_TORCH):
        frame = frame.f_back
    return sys._getframe(2) if frame is None else frame


def _is_compiled_call(frame: FrameType) -> bool:
    return frame.f_code.co_filename == eval_frame.__file__ and frame.f_code.co_name == "compile_wrapper"
