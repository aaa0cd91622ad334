"""What every command has in common: `--json`, `--debug`, one document on stdout, one line on stderr for an error.

A command is a function that returns an `Output`; `@command` turns it into what typer runs:

    @command
    def clusters(as_json: JsonOption = False, debug: DebugOption = False) -> Output:
        return Output({"gpus": [...]}, lambda console: console.print(table))

With `--json` whatever a library prints while the command runs goes to stderr, so that stdout holds the document alone.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ParamSpec

import typer
from rich.console import Console

from disagmoe_compile.errors import DisagMoEError

SCHEMA_VERSION = 1
"""Of every JSON document; a field that changes its meaning or goes away raises it, a new field does not."""

_WIDTH_OF_FILES = 160

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]
DebugOption = Annotated[bool, typer.Option("--debug", help="Print the traceback of an error.")]

P = ParamSpec("P")


@dataclass(frozen=True, slots=True)
class Output:
    """What a command found: `document` for `--json`, `render` for people.

    `failure` ends the command with that error AFTER the output was shown, e.g. a comparison that did not hold.
    """

    document: Mapping[str, Any]
    render: Callable[[Console], None]
    failure: DisagMoEError | None = None


def command(function: Callable[P, Output]) -> Callable[P, None]:
    """Runs `function`, shows its output, and turns an error into one line and an exit status.

    The function must take `as_json: JsonOption` and `debug: DebugOption`.
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        as_json, debug = bool(kwargs.get("as_json")), bool(kwargs.get("debug"))
        try:
            with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
                output = function(*args, **kwargs)
            emit(output, as_json)
            if output.failure is not None:
                raise output.failure
        except (typer.Exit, typer.Abort, typer.TyperException, BrokenPipeError):
            raise
        except Exception as error:
            if debug:
                traceback.print_exception(error)
            raise typer.Exit(report(error)) from error

    return run


def emit(output: Output, as_json: bool) -> None:
    """Shows an output on stdout. NaN and infinity are not JSON: a document that holds one is our own mistake and raises."""
    if as_json:
        document = {"schema_version": SCHEMA_VERSION, **output.document}
        sys.stdout.write(json.dumps(document, indent=2, allow_nan=False) + "\n")
        sys.stdout.flush()
    else:
        output.render(_console())


def _console() -> Console:
    """As wide as the terminal; a file or a pipe has no width, and lines cut at 80 characters lose names and commands."""
    is_free = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return Console(width=_WIDTH_OF_FILES if is_free else None)


def report(error: BaseException) -> int:
    """Prints the one line of an error on stderr; returns the exit status: 2 for bad input, 1 for a failure while running."""
    if isinstance(error, DisagMoEError):
        status, text = error.exit_status, str(error)
    elif isinstance(error, typer.TyperException):
        status, text = 2, error.format_message()
    else:
        status = 1
        text = f"internal error, {type(error).__name__}: {error}; run it again with --debug for the traceback"
    sys.stderr.write(f"disagmoe: error: {' '.join(text.split())}\n")
    return status
