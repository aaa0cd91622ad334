"""Pipelines without disaggregation, as compute-only schedules in the plan's IR: rank r runs chunks of consecutive layers.

Stage c * p + r is chunk c of rank r (p ranks, v chunks a rank); a micro-batch goes through the stages in order and back. Each
generator returns lists of F, B, I, W per rank; `hops` are the transfers between stages, `lower_lists` adds them.

    gpipe               every forward, then every backward
    one_f_one_b         p - 1 - r forwards to warm up, then one forward and one backward in turn
    interleaved_1f1b    the same over v chunks, in rounds of p micro-batches (Megatron-LM)
    zb1p                one_f_one_b with I sent on at once and W put off by r micro-batches (zero bubble, ZB-H1)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from disagmoe_compile.plan.action import Action, ActionKind
from disagmoe_compile.plan.ir import Direction, Schedule, Splits, Transfer, TransferKind
from disagmoe_compile.plan.topology import Group, Role


class PipelineRank(Group):
    """A worker that holds both components of its layers: its role means nothing."""

    __slots__ = ()

    def __str__(self) -> str:
        return f"rank.{self.index}"


def pipeline_rank(index: int) -> PipelineRank:
    return PipelineRank(Role.ATTENTION, index)


def hops(chains: Iterable[Sequence[int]]) -> tuple[Transfer, ...]:
    """Transfers from stage to stage along each chain, and back for the gradients."""
    transfers = []
    for chain in chains:
        for src, dst in pairwise(chain):
            name = f"activation.{src}"
            back = f"gradient.{src}"
            transfers.append(Transfer(name, TransferKind.P2P, Direction.FORWARD, src, dst, (), Splits.STATIC))
            transfers.append(
                Transfer(back, TransferKind.P2P, Direction.BACKWARD, dst, src, (), Splits.STATIC, name)
            )
    return tuple(transfers)


def gpipe(ranks: int, chunks: int, n_microbatches: int) -> Schedule:
    lists = []
    for rank in range(ranks):
        stages = [chunk * ranks + rank for chunk in range(chunks)]
        forwards = [_f(stage, i) for stage in stages for i in range(n_microbatches)]
        backwards = [_b(stage, i) for stage in reversed(stages) for i in range(n_microbatches)]
        lists.append(forwards + backwards)
    return _schedule("gpipe", lists)


def one_f_one_b(ranks: int, n_microbatches: int) -> Schedule:
    lists = []
    for rank in range(ranks):
        forwards = [_f(rank, i) for i in range(n_microbatches)]
        backwards = [_b(rank, i) for i in range(n_microbatches)]
        lists.append(_in_turn(forwards, backwards, warm_up=ranks - 1 - rank))
    return _schedule("1f1b", lists)


def interleaved_1f1b(ranks: int, chunks: int, n_microbatches: int) -> Schedule:
    """Rounds of `ranks` micro-batches. Where they do not divide, the last round has fewer: its list is that of a full round
    without the micro-batches that do not exist, and leaving out whole micro-batches cannot make others wait for each other.
    """
    rounds = -(-n_microbatches // ranks)
    lists = []
    for rank in range(ranks):
        forwards, backwards = [], []
        for first in range(0, rounds * ranks, ranks):
            for chunk in range(chunks):
                forwards += [_f(chunk * ranks + rank, first + k) for k in range(ranks)]
                backwards += [_b((chunks - 1 - chunk) * ranks + rank, first + k) for k in range(ranks)]
        warm_up = 2 * (ranks - 1 - rank) + (chunks - 1) * ranks if chunks > 1 else ranks - 1 - rank
        actions = _in_turn(forwards, backwards, warm_up)
        lists.append([a for a in actions if a.microbatch is not None and a.microbatch < n_microbatches])
    return _schedule("interleaved_1f1b", lists)


def zb1p(ranks: int, n_microbatches: int) -> Schedule:
    """Memory of 1F1B: rank r puts off each W by r micro-batches, which fill the gaps at the end of the ranks before it."""
    lists = []
    for rank in range(ranks):
        forwards = [_f(rank, i) for i in range(n_microbatches)]
        inputs = [Action(ActionKind.BACKWARD_INPUT, rank, i) for i in range(n_microbatches)]
        actions = []
        for action in _in_turn(forwards, inputs, warm_up=ranks - 1 - rank):
            actions.append(action)
            late = (action.microbatch or 0) - rank
            if action.kind is ActionKind.BACKWARD_INPUT and late >= 0:
                actions.append(_w(rank, late))
        actions += [_w(rank, i) for i in range(max(n_microbatches - rank, 0), n_microbatches)]
        lists.append(actions)
    return _schedule("zb1p", lists)


def _in_turn(forwards: Sequence[Action], backwards: Sequence[Action], warm_up: int) -> list[Action]:
    """`warm_up` forwards, then a forward and a backward in turn, then the backwards that are left."""
    warm_up = min(warm_up, len(forwards))
    steady = [action for pair in zip(forwards[warm_up:], backwards) for action in pair]
    return [*forwards[:warm_up], *steady, *backwards[len(forwards) - warm_up :]]


def _schedule(name: str, lists: Iterable[Sequence[Action]]) -> Schedule:
    return Schedule(
        name, lowered=False, actions={pipeline_rank(r): tuple(actions) for r, actions in enumerate(lists)}
    )


def _f(stage: int, microbatch: int) -> Action:
    return Action(ActionKind.FORWARD, stage, microbatch)


def _b(stage: int, microbatch: int) -> Action:
    return Action(ActionKind.BACKWARD, stage, microbatch)


def _w(stage: int, microbatch: int) -> Action:
    return Action(ActionKind.BACKWARD_WEIGHT, stage, microbatch)
