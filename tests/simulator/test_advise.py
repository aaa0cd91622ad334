"""Who wins where memory decides, and what two kinds of nodes change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace

import pytest

from disagmoe_compile.models.catalogue import find_model
from disagmoe_compile.planner.hardware import find_cluster
from disagmoe_compile.planner.step_costs import model_costs
from disagmoe_compile.simulator import advise as advising
from disagmoe_compile.simulator.advise import Verdict, half_slower, summary
from disagmoe_compile.simulator.mixed_cluster import AnyCluster, MixedCluster
from disagmoe_compile.simulator.mixed_rivals import EQUAL_SHARES
from disagmoe_compile.simulator.results import Result
from disagmoe_compile.simulator.search import Setting


@pytest.mark.parametrize(
    ("fits", "rival_fits", "answer"),
    [
        (True, True, "Do not disaggregate: AF-Pipe is 50% slower"),
        (True, False, "Disaggregate: no rival fits"),
        (False, True, "Do not disaggregate: AF-Pipe, unlike a rival, never fits"),
    ],
)
def test_a_system_that_fits_beats_a_faster_one_that_does_not(
    fits: bool, rival_fits: bool, answer: str
) -> None:
    now = Verdict("as asked", -0.5, 1.0, "tutel", 2.0, fits, rival_fits)
    assert summary([now], find_cluster("h800")).startswith(answer)


def test_a_change_flips_the_answer_where_the_rival_stops_to_fit() -> None:
    now = Verdict("as asked", -0.5, 1.0, "tutel", 2.0)
    longer = Verdict("longer", -0.5, 1.0, "tutel", 2.0, rival_fits=False)
    assert summary([now, longer], find_cluster("h800")).endswith("The answer flips with: longer.")


def test_half_of_the_nodes_half_as_fast() -> None:
    """Rounded down; same memory and network."""
    mixed = half_slower(find_cluster("h800", 5))
    fast, slow = mixed.attention, mixed.ffn
    assert (fast, slow.nodes) == (find_cluster("h800", 3), 2)
    assert (slow.gpu.flops, slow.gpu.memory_bytes_per_s) == (
        fast.gpu.flops / 2,
        fast.gpu.memory_bytes_per_s / 2,
    )
    kept = replace(slow, name=fast.name, gpu=fast.gpu, nodes=3)
    assert kept == fast and slow.gpu.memory_bytes == fast.gpu.memory_bytes


def _result(system: str, setting: Setting, tokens_per_s: float) -> Result:
    """As little of one as advice looks at."""
    cluster = setting.cluster
    options = {"placement": cluster.placement} if isinstance(cluster, MixedCluster) else {}
    kept = dict.fromkeys((field.name for field in fields(Result)), None)
    given = {"schedule": system, "step_s": 1.0, "tokens": tokens_per_s, "mfu": 0.5, "gpus": cluster.gpus}
    return Result(**kept | given | {"fits": True, "options": options})  # type: ignore[arg-type]


def _search(speed: Callable[[str, AnyCluster], float]) -> Callable[..., Result]:
    """In place of `search.best`: systems that reach so many tokens/s on a cluster."""

    def best(setting: Setting, system: str, beat: Result | None = None) -> Result:
        found = _result(system, setting, speed(system, setting.cluster))
        return found if beat is None or found.tokens > beat.tokens else beat

    return best


@pytest.fixture(scope="module")
def setting() -> Setting:
    costs = model_costs(find_model("OLMoE"), seq_length=2048)
    return Setting(costs, find_cluster("h800", 4), 64)


@pytest.mark.parametrize("fastest", ["as made", "swapped", "in step"])
def test_af_pipe_puts_its_sides_where_it_is_fastest(
    fastest: str, setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixed = half_slower(find_cluster("h800", 4))
    clusters: dict[str, AnyCluster] = {
        "as made": mixed,
        "swapped": mixed.swapped(),
        "in step": mixed.in_step(),
    }
    monkeypatch.setattr(advising, "best", _search(lambda _, on: 2.0 if on == clusters[fastest] else 1.0))
    found = advising.af_pipe_anywhere(replace(setting, cluster=mixed), mixed)
    placements = {"as made": mixed.placement, "swapped": mixed.swapped().placement, "in step": EQUAL_SHARES}
    assert found.options["placement"] == placements[fastest]
    assert (found.tokens, found.gpus) == (2.0, 32)


def test_sizes_that_are_pinned_for_equal_nodes_leave_af_pipe_those(setting: Setting) -> None:
    """24 of 32 attention ranks have no place on half of the nodes, on all they do."""
    mixed = half_slower(find_cluster("h800", 4))
    pinned = replace(setting, attention_group_size=24, ffn_group_size=8, cluster=mixed, simulated=1)
    found = advising.af_pipe_anywhere(pinned, mixed)
    assert (found.options["placement"], found.options["attention_group_size"]) == (EQUAL_SHARES, 24)


def test_a_flip_by_two_kinds_of_nodes_is_named(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rivals reach 1 everywhere; AF-Pipe 2 with attention on slower GPUs, and 0.5 elsewhere."""

    def speed(system: str, cluster: AnyCluster) -> float:
        if system != "af_pipe":
            return 1.0
        return 2.0 if isinstance(cluster, MixedCluster) and "half speed" in cluster.attention.name else 0.5

    best = _search(speed)
    monkeypatch.setattr(advising, "best", best)
    now = [best(setting, system) for system in ("af_pipe", "tutel")]
    verdicts = advising.advise(find_model("OLMoE"), setting, now)
    assert summary(verdicts, setting.cluster).endswith(
        "The answer flips with: half of the nodes (2 of 4) with GPUs half as fast."
    )
    last = verdicts[-1].to_dict()
    assert last["gain"] == 1.0
    assert last["af_pipe_placement"] == "attention on H800-SXM5 at half speed, FFN on H800-SXM5"


@pytest.mark.parametrize(
    ("cluster", "last"),
    [
        (find_cluster("h800"), "experts spread"),
        (find_cluster("h800", 2), "half of the nodes (1 of 2)"),
        (
            MixedCluster(find_cluster("h800"), find_cluster("h20")),
            "sides swapped (attention on H20, FFN on H800",
        ),
    ],
)
def test_what_is_changed_about_nodes_follows_from_their_kinds(
    cluster: AnyCluster, last: str, setting: Setting
) -> None:
    *_, (change, make) = advising.changes(find_model("OLMoE"), replace(setting, cluster=cluster))
    assert change.startswith(last)
    assert make().cluster.gpus == cluster.gpus


def test_a_slower_network_is_slower_on_both_kinds_of_nodes(setting: Setting) -> None:
    mixed = MixedCluster(find_cluster("h800"), find_cluster("a100"))
    found = dict(advising.changes(find_model("OLMoE"), replace(setting, cluster=mixed)))
    slower = found["network half as fast"]().cluster
    assert isinstance(slower, MixedCluster)
    assert [kind.nic_bytes_per_s for kind in slower.kinds] == [25e9, 12.5e9]
