"""Systems of alike workers on two kinds of nodes: the best of all in step, one kind alone, and a copy on each."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from disagmoe_compile.errors import InputError
from disagmoe_compile.models.catalogue import find_model
from disagmoe_compile.planner.hardware import Cluster, find_cluster
from disagmoe_compile.planner.model_spec import layer_pattern
from disagmoe_compile.planner.step_costs import model_costs
from disagmoe_compile.simulator.bound import Bound
from disagmoe_compile.simulator.mixed_cluster import MixedCluster
from disagmoe_compile.simulator.mixed_rivals import Search, best_placed
from disagmoe_compile.simulator.results import Result
from disagmoe_compile.simulator.search import Setting, best
from disagmoe_compile.simulator.timeline import Share

MIXED = MixedCluster(find_cluster("H800-SXM5", 2), find_cluster("H20", 2))
EQUAL, SOME, BY_SPEED = (MIXED.in_step(by_speed) for by_speed in (0.0, 0.25, 1.0))


def _result(nodes: Cluster, tokens_per_s: float, tokens: int, fits: bool = True) -> Result:
    """A step of so many tokens, half of it computing, a quarter exposed; it cannot be shorter than 0.8 of that."""
    step = tokens / tokens_per_s
    kept = dict.fromkeys((field.name for field in fields(Result)), None)
    given = {
        "step_s": step,
        "tokens": tokens,
        "gpus": nodes.gpus,
        "exposed_s": step / 4,
        "critical": Share(step / 2, step / 4, step / 4),
        "bound": Bound(0.8 * step, "compute", 0.5 * step),
        "mfu": 0.5,
        "activation_bytes": {"worker": 1.0},
        "peak_bytes": {"worker": tokens_per_s},
        "fits": fits,
        "options": {"ep_size": 8},
    }
    return Result(**kept | given)  # type: ignore[arg-type]


def _search(speed: dict[Cluster, float], misfits: tuple[Cluster, ...] = ()) -> Search:
    """Of systems that reach so many tokens/s on some nodes, and have no sizes on others; sequences are tokens here."""

    def search(nodes: Cluster, sequences: int, beat: Result | None) -> Result:
        if nodes not in speed:
            raise InputError(f"no sizes on {nodes.gpus} GPUs")
        found = _result(nodes, speed[nodes], sequences, nodes not in misfits)
        both = (found,) if beat is None else (beat, found)
        return max(both, key=lambda one: (one.fits, one.tokens / one.step_s))

    return search


@pytest.mark.parametrize(
    ("speeds", "placement", "tokens_per_s"),
    [
        ({EQUAL: 900.0, BY_SPEED: 700.0}, "all in step, equal shares", 900.0),
        ({EQUAL: 700.0, BY_SPEED: 900.0}, "all in step, shares 100% by speed", 900.0),
        ({EQUAL: 500.0, MIXED.attention: 500.0, MIXED.ffn: 100.0}, "side by side", 600.0),
        ({EQUAL: 500.0, MIXED.ffn: 100.0}, "all in step, equal shares", 500.0),
        ({MIXED.attention: 500.0}, "2 x H800-SXM5 alone", 500.0),
        ({EQUAL: 50.0, MIXED.ffn: 100.0}, "2 x H20 alone", 100.0),
    ],
)
def test_a_rival_takes_the_fastest_placement(
    speeds: dict[Cluster, float], placement: str, tokens_per_s: float
) -> None:
    found = best_placed(MIXED, 1000, _search(speeds))
    assert found.options["placement"] == placement
    assert found.tokens_per_s_per_gpu == pytest.approx(tokens_per_s / 32)


def test_a_placement_that_fits_in_memory_beats_faster_ones_that_do_not() -> None:
    speeds = {EQUAL: 900.0, MIXED.attention: 500.0, MIXED.ffn: 100.0}
    found = best_placed(MIXED, 1000, _search(speeds, (EQUAL, MIXED.attention)))
    assert (found.options["placement"], found.fits) == ("2 x H20 alone", True)


def test_the_largest_share_by_speed_that_fits_is_taken() -> None:
    """All of the way does not fit, three quarters do; of a quarter nothing is asked."""
    shares = {part: MIXED.in_step(part) for part in (1.0, 0.75, 0.5, 0.25, 0.0)}
    speeds = {nodes: 500.0 + 400.0 * part for part, nodes in shares.items()}
    asked: list[Cluster] = []
    search = _search(speeds, (shares[1.0],))

    def counted(nodes: Cluster, sequences: int, beat: Result | None) -> Result:
        asked.append(nodes)
        return search(nodes, sequences, beat)

    found = best_placed(MIXED, 1000, counted)
    assert (found.options["placement"], found.fits) == ("all in step, shares 75% by speed", True)
    assert SOME not in asked and EQUAL in asked


def test_no_sizes_anywhere_is_an_error() -> None:
    with pytest.raises(InputError, match="no sizes on 32 GPUs"):
        best_placed(MIXED, 1000, _search({}))


def test_side_by_side_adds_speeds_and_charges_all_gpus() -> None:
    """3 : 1 in speed as in matmuls: 750 and 250 tokens, each a step of the same length."""
    slower = replace(MIXED.attention, name="slower", gpu=replace(MIXED.attention.gpu, flops=989e12 / 3))
    mixed = MixedCluster(MIXED.attention, slower)
    found = best_placed(mixed, 1000, _search({mixed.attention: 300.0, slower: 100.0}))
    assert (found.tokens, found.step_s, found.gpus) == (1000, 2.5, 32)
    assert found.exposed_s == pytest.approx(2.5 / 4) and found.mfu == pytest.approx(0.5)
    assert found.critical == Share(1.25, 0.625, 0.625) and found.bound.seconds == pytest.approx(2.0)
    assert found.peak_bytes == {"worker": 300.0}
    assert [(copy["cluster"], copy["tokens"]) for copy in found.options["copies"]] == [
        ("H800-SXM5", 750),
        ("slower", 250),
    ]


def test_a_kind_alone_is_charged_for_the_other() -> None:
    found = best_placed(MIXED, 1000, _search({MIXED.attention: 500.0}))
    assert found.gpus == 32
    assert found.mfu == pytest.approx(0.5 * 989 / (989 + 148))


@pytest.mark.parametrize("system", ["megatron_1f1b", "dualpipe"])
def test_a_rival_is_never_worse_than_on_either_kind_alone_or_on_all_in_step(system: str) -> None:
    spec = replace(find_model("DeepSeek-MoE-16B"), layers=layer_pattern(8))
    setting = Setting(model_costs(spec, seq_length=4096), MIXED, 128, simulated=1)
    found = best(setting, system)
    for nodes in (*MIXED.kinds, EQUAL, BY_SPEED):
        alone = best(replace(setting, cluster=nodes), system)
        assert found.tokens_per_s_per_gpu * 32 >= alone.tokens_per_s_per_gpu * nodes.gpus
