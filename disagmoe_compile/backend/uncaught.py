"""What a script under torchrun prints when it ends with one of our errors: its own lines and our one, not those inside torch.

    script.py, line 8, in main            kept
    torch/_dynamo/eval_frame.py ...       left out, with everything below, unless TORCHDYNAMO_VERBOSE=1 asks for it
    disagmoe_compile.errors.InputError: group sizes do not match ...

torchrun's summary at the end shows the same of the rank that failed first, as for a script whose main function is wrapped in
torch's `record`: it is written to the file that torchrun names for it.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import torch
import torch._dynamo
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

import disagmoe_compile.passes
import disagmoe_compile.runtime
from disagmoe_compile.errors import DisagMoEError

_INSIDE = tuple(
    f"{Path(module.__file__ or '').parent}{os.sep}"
    for module in (torch, disagmoe_compile, disagmoe_compile.passes, disagmoe_compile.runtime)
)


def shorten_uncaught() -> None:
    """From now on. Whatever else handles uncaught exceptions stays, and gets the shorter traceback."""
    if getattr(sys.excepthook, "_shortens", False):
        return
    before = sys.excepthook

    def excepthook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if isinstance(error, DisagMoEError) and not torch._dynamo.config.verbose:
            traceback = lines_of_script(traceback)
            error.__cause__, error.__suppress_context__ = None, True
            _tell_torchrun(error, traceback)
        before(kind, error, traceback)

    excepthook._shortens = True  # type: ignore[attr-defined]
    sys.excepthook = excepthook


def lines_of_script(traceback: TracebackType | None) -> TracebackType | None:
    """Cuts it, in place, before the first line that is torch's or ours; whole where that is all of it."""
    last = None
    for one in _each(traceback):
        if one.tb_frame.f_code.co_filename.startswith(_INSIDE):
            break
        last = one
    if last is not None:
        last.tb_next = None
    return traceback


def _each(traceback: TracebackType | None) -> Iterator[TracebackType]:
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next


def _tell_torchrun(error: DisagMoEError, traceback: TracebackType | None) -> None:
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not file or os.path.exists(file):  # `record` has written it already
        return
    # torch formats the exception that is being handled; the line that raises it here is not to be in it
    try:
        raise error
    except DisagMoEError:
        with contextlib.suppress(OSError):
            get_error_handler().record_exception(error.with_traceback(traceback))
