"""Every error this project raises on purpose. Each says what, where, why, and what to do, in one line.

The command line prints `str(error)` and nothing else (unless `--debug`): bad input exits with status 2, a failure while
running with 1.
"""

from __future__ import annotations

from collections.abc import Sequence


class DisagMoEError(RuntimeError):
    """Base of all our errors. `exit_status` is what the command line ends with."""

    exit_status = 1


class InputError(DisagMoEError, ValueError):
    """The user asked for something that cannot be: an option, a size, a file."""

    exit_status = 2


class CaptureError(InputError):
    """Dynamo's graph of the model cannot be used: a graph break, a specialised batch, an untraceable experts implementation."""


class UnsupportedModelError(InputError):
    """The graph was captured, but a transformation that is needed cannot be shown to be safe."""


class PlanError(InputError):
    """A plan that breaks a rule. `violations` lists every rule broken, not only the first."""

    def __init__(self, message: str, violations: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.violations = tuple(violations)


class DivergenceError(DisagMoEError):
    """Ranks that must agree do not: different batches, graphs, plans, or gradient scales."""


class PeerError(DisagMoEError):
    """A peer died or did not answer within the timeout. Names this rank, its action and the peer."""
