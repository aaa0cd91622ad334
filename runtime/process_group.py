"""torch.distributed for an unchanged script: the default process group from torchrun's environment, and the
groups of a pipeline.

Every group here is made by all ranks in the same order, which is what torch.distributed asks for.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from disagmoe_compile.errors import DisagMoEError, InputError
from disagmoe_compile.plan.topology import Group, Role, Topology

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Launch:
    """What torchrun tells a process. `uses_agent_store`: torchrun itself serves the store at that address."""

    rank: int
    world_size: int
    local_rank: int
    address: str
    port: int
    restarts: int
    uses_agent_store: bool

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise InputError(f"RANK={self.rank} is outside WORLD_SIZE={self.world_size}; start with torchrun")

    @staticmethod
    def from_environment(env: Mapping[str, str] = os.environ) -> Launch | None:
        """None outside torchrun. Raises InputError where the environment is incomplete or not numbers."""
        if "RANK" not in env and "WORLD_SIZE" not in env:
            return None
        needed = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        missing = [name for name in needed if not env.get(name)]
        if missing and env.get("WORLD_SIZE") != "1":
            raise InputError(f"{', '.join(missing)} not set in the environment; start with torchrun")
        try:
            return Launch(
                rank=int(env.get("RANK", "0")),
                world_size=int(env["WORLD_SIZE"]),
                local_rank=int(env.get("LOCAL_RANK", env.get("RANK", "0"))),
                address=env.get("MASTER_ADDR", "127.0.0.1"),
                port=int(env.get("MASTER_PORT", "0")),
                restarts=int(env.get("TORCHELASTIC_RESTART_COUNT", "0")),
                uses_agent_store=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            )
        except ValueError as error:
            if isinstance(error, InputError):
                raise
            raise InputError(f"torchrun's environment variables must be numbers: {error}") from error


def several_ranks() -> bool:
    """Whether this process is one of several, by its process group or else by what torchrun told it."""
    if not dist.is_available():
        return False
    if dist.is_initialized():
        return dist.get_world_size() > 1
    launch = Launch.from_environment()
    return launch is not None and launch.world_size > 1


def ensure_process_group(timeout_s: float, device: torch.device = _CPU) -> bool:
    """Whether several ranks run. Initialises torch.distributed if torchrun started us and the script did not.

    Gloo on CPU; on CUDA NCCL, with gloo beside it for what lives on the CPU. A group that we made is
    destroyed at exit. Raises InputError for an incomplete environment, a port in use, or two ranks on one
    CUDA device.
    """
    launch = Launch.from_environment()
    if not several_ranks() or dist.is_initialized() or launch is None:
        return several_ranks()
    timeout = timedelta(seconds=timeout_s)
    store = _store(launch, timeout)
    if device.type == "cuda":
        check_one_rank_per_device(store, launch, _device_identity(device))
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=launch.rank,
        world_size=launch.world_size,
        timeout=timeout,
    )
    atexit.register(_destroy)
    return True


def check_one_rank_per_device(store: dist.Store, launch: Launch, identity: str) -> None:
    """Raises InputError on every rank if two of them name the same device. `identity`: unique per device and
    machine.
    """
    store.set(f"device/{launch.rank}", f"{launch.local_rank} {identity}")
    owner: dict[str, tuple[int, str]] = {}
    for rank in range(launch.world_size):
        local_rank, _, name = store.get(f"device/{rank}").decode().partition(" ")
        if name in owner:
            other, other_local = owner[name]
            raise InputError(
                f"ranks {other} (LOCAL_RANK={other_local}) and {rank} (LOCAL_RANK={local_rank}) are both on {name}: "
                "call torch.cuda.set_device(int(os.environ['LOCAL_RANK'])) before the model is built"
            )
        owner[name] = rank, local_rank


@dataclass(frozen=True, slots=True)
class PipelineGroups:
    """The process groups of one plan. `members` has this rank's worker group alone; None where it is a single
    rank.

    `world` carries control messages of all ranks, on CPU tensors. The three lanes carry M2N, one direction
    each, so that a full queue of one direction never holds up the other.
    """

    topology: Topology
    world: dist.ProcessGroup
    attention_to_ffn: dist.ProcessGroup
    ffn_to_attention: dist.ProcessGroup
    attention_to_attention: dist.ProcessGroup
    members: dist.ProcessGroup | None

    @staticmethod
    def create(topology: Topology, timeout_s: float, device: torch.device = _CPU) -> PipelineGroups:
        """Collective. Raises InputError if the plan's world size is not the running one."""
        if topology.world_size != dist.get_world_size():
            raise InputError(
                f"the plan needs {topology.world_size} ranks ({topology.attention_groups} attention groups of "
                f"{topology.attention_group_size} and {topology.ffn_groups} FFN groups of {topology.ffn_group_size}), "
                f"but {dist.get_world_size()} are running; change the group sizes or torchrun's --nproc-per-node"
            )
        timeout = timedelta(seconds=timeout_s)
        backend = "nccl" if device.type == "cuda" else "gloo"

        def everyone(name: str, on: str = backend) -> dist.ProcessGroup:
            return dist.new_group(timeout=timeout, backend=on, group_desc=f"disagmoe {name}")

        world = everyone("world", "gloo")
        attention_to_ffn = everyone("attention to ffn")
        ffn_to_attention = everyone("ffn to attention")
        attention_to_attention = everyone("attention to attention")
        mine = topology.group_of_rank(dist.get_rank())
        members = None
        for group in topology.groups:
            ranks = list(topology.ranks_of_group(group))
            if len(ranks) > 1:
                made = dist.new_group(ranks, timeout=timeout, backend=backend, group_desc=f"disagmoe {group}")
                members = made if group == mine else members
        return PipelineGroups(
            topology, world, attention_to_ffn, ffn_to_attention, attention_to_attention, members
        )

    @property
    def group(self) -> Group:
        """This rank's worker group."""
        return self.topology.group_of_rank(dist.get_rank())

    @property
    def replicas(self) -> dist.ProcessGroup | None:
        """Of an attention rank with replicas: the group whose dense gradients are summed."""
        return self.members if self.group.role is Role.ATTENTION else None

    @property
    def lanes(self) -> dict[tuple[Role, Role], dist.ProcessGroup]:
        """(role of the sender, role of the receiver) -> group."""
        return {
            (Role.ATTENTION, Role.FFN): self.attention_to_ffn,
            (Role.FFN, Role.ATTENTION): self.ffn_to_attention,
            (Role.ATTENTION, Role.ATTENTION): self.attention_to_attention,
        }


def _store(launch: Launch, timeout: timedelta) -> dist.Store:
    """The keys carry the number of restarts: torchrun's own store survives a restart, and with it the
    addresses of the dead.
    """
    is_server = launch.rank == 0 and not launch.uses_agent_store
    where = f"{launch.address}:{launch.port}"
    try:
        store = dist.TCPStore(
            launch.address,
            launch.port,
            launch.world_size,
            is_master=is_server,
            timeout=timeout,
            wait_for_workers=False,
            multi_tenant=True,
        )
    except dist.DistNetworkError as error:
        if is_server and "EADDRINUSE" in str(error):
            raise InputError(
                f"port {launch.port} of {launch.address} is in use: set MASTER_PORT (torchrun --master-port) to a free one"
            ) from error
        raise DisagMoEError(
            f"rank {launch.rank} cannot reach the store at {where}: {_first_line(error)}"
        ) from error
    except dist.DistError as error:
        raise DisagMoEError(
            f"rank {launch.rank} had no answer from the store at {where} within {timeout.total_seconds():.0f} s: "
            f"{_first_line(error)}"
        ) from error
    return dist.PrefixStore(f"disagmoe/{launch.restarts}", store)


def _device_identity(device: torch.device) -> str:
    index = torch.cuda.current_device() if device.index is None else device.index
    return f"{socket.gethostname()} cuda:{torch.cuda.get_device_properties(index).uuid}"


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _destroy() -> None:
    if dist.is_initialized():
        with contextlib.suppress(RuntimeError):  # a peer that is already gone is no news at exit
            dist.destroy_process_group()
