"""A port for ranks to meet at."""

from __future__ import annotations

import contextlib
import random
import socket

from disagmoe_compile.errors import DisagMoEError

_ADDRESS = "127.0.0.1"
# Below the range from which systems give ports to outgoing connections (Linux: from 32768): a rank listens only when its model is
# first called, and until then another process's connection could have been given the port.
_PORTS = range(15000, 30000)
_TRIES = 100


def free_port() -> int:
    """A TCP port of the loopback interface that nobody listens on at this moment. Raises DisagMoEError if none is found."""
    for port in random.SystemRandom().sample(_PORTS, k=_TRIES):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((_ADDRESS, port))
            return port
    raise DisagMoEError(f"none of {_TRIES} ports between {_PORTS.start} and {_PORTS.stop} is free")
