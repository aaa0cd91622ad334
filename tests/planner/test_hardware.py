from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from disagmoe_compile.errors import InputError
from disagmoe_compile.planner.efficiency import ASSUMED, Efficiencies, Efficiency, uniform
from disagmoe_compile.planner.hardware import (
    GPU,
    Cluster,
    catalogue,
    find_cluster,
    local_cpu,
    parse_cluster,
)

NUMBERS: dict[str, Any] = {
    "gpus_per_node": 4,
    "nics_per_node": 2,
    "gpu_flops": 1e14,
    "memory_bytes": 4e10,
    "memory_bytes_per_s": 1e12,
    "link_bytes_per_s": 1e11,
    "nic_bytes_per_s": 2.5e10,
}


def test_every_catalogue_entry_has_sources_and_is_not_assumed() -> None:
    assert len(catalogue()) >= 7
    for cluster in catalogue().values():
        assert cluster.gpu.sources and not cluster.gpu.is_assumed


def test_units_are_flops_and_bytes_in_one_direction() -> None:
    h800 = find_cluster("H800-SXM5")
    assert h800.gpu.flops == 989e12
    assert h800.gpu.link_bytes_per_s == 200e9  # not the marketing total of 400
    assert h800.nic_bytes_per_s == 50e9  # 400 Gbit/s
    assert (h800.gpus, h800.nics) == (8, 8)


def test_nodes_multiply_gpus_and_nics() -> None:
    sixteen = find_cluster("h800", nodes=16)
    assert (sixteen.gpus, sixteen.nics) == (128, 128)


def test_a_unique_beginning_is_enough_and_an_exact_name_wins() -> None:
    assert find_cluster("b200").name.startswith("B200")
    assert find_cluster("H20").name == "H20"  # though H200 begins with it


@pytest.mark.parametrize(
    ("name", "message"), [("h", "fits H100"), ("tpu", "not in the catalogue"), ("", "not in")]
)
def test_an_unknown_or_unclear_name_lists_the_known(name: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        find_cluster(name)


def test_the_local_cpu_is_marked_assumed_and_has_a_link_for_each_rank() -> None:
    here = local_cpu(4)
    assert here.gpu.is_assumed and here.to_dict()["assumed"]
    assert (here.gpus, here.nics) == (4, 4)


@pytest.mark.parametrize("value", [0, -1, 1.5, True])
def test_counts_are_whole_numbers(value: object) -> None:
    with pytest.raises(InputError, match="gpus_per_node"):
        Cluster("x", local_cpu(1).gpu, gpus_per_node=value, nics_per_node=1, nic_bytes_per_s=1.0)


@pytest.mark.parametrize("field", ["flops", "memory_bytes", "memory_bytes_per_s", "link_bytes_per_s"])
def test_a_gpu_without_a_speed_is_refused(field: str) -> None:
    numbers = {"flops": 1.0, "memory_bytes": 1.0, "memory_bytes_per_s": 1.0, "link_bytes_per_s": 1.0}
    with pytest.raises(InputError, match=field):
        GPU("x", **{**numbers, field: 0.0}, sources=(ASSUMED,))


def test_a_gpu_without_a_source_is_refused() -> None:
    with pytest.raises(InputError, match="source"):
        GPU("x", 1.0, 1.0, 1.0, 1.0, sources=())


def test_a_nic_without_a_speed_is_refused() -> None:
    with pytest.raises(InputError, match="nic_bytes_per_s"):
        Cluster("x", local_cpu(1).gpu, gpus_per_node=1, nics_per_node=1, nic_bytes_per_s=0.0)


def test_every_share_of_a_peak_is_named_and_has_a_source() -> None:
    for cluster in catalogue().values():
        for field in fields(Efficiencies):
            reached = getattr(cluster.efficiencies, field.name)
            assert 0 < reached.value < 1 and reached.source
    assert find_cluster("h800").efficiencies.link.value == 0.77  # its own, measured
    assert find_cluster("h100").efficiencies.link.value == 0.8


def test_the_local_cpu_states_what_is_reached() -> None:
    assert local_cpu(2).efficiencies == uniform(1.0)


def test_the_ridge_is_of_what_is_reached() -> None:
    h800 = find_cluster("h800")
    assert h800.ridge_flops_per_byte == pytest.approx(989e12 * 0.7 / (3350e9 * 0.8))


def test_efficiencies_are_overridden_by_name() -> None:
    changed = uniform(0.5).overridden({"gemm": 0.6, "network": {"value": 0.9, "source": "measured"}})
    assert (changed.gemm, changed.network) == (Efficiency(0.6), Efficiency(0.9, "measured"))
    assert changed.link.value == 0.5 and changed.gemm.source == ASSUMED


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gpu": 0.5}, "unknown efficiency 'gpu'; known: gemm, attention_core, memory, link, network"),
        ({"gemm": 0}, "efficiency 'gemm' must be a share above 0 and up to 1, got 0"),
        ({"gemm": -0.5}, "efficiency 'gemm' must be a share"),
        ({"gemm": 1.5}, "efficiency 'gemm' must be a share"),
        ({"gemm": float("nan")}, "efficiency 'gemm' must be a share"),
        ({"gemm": {"value": 0.5, "source": ""}}, "efficiency 'gemm' needs a source"),
        ({"gemm": {"source": "x"}}, "efficiency 'gemm' must be a number or an object"),
        (0.5, "efficiencies must be an object"),
    ],
)
def test_an_impossible_efficiency_is_named(changes: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        uniform(1.0).overridden(changes)


def test_a_cluster_file_gives_all_numbers_or_what_differs_from_a_base(tmp_path: Path) -> None:
    path = tmp_path / "ours.json"
    path.write_text(json.dumps({**NUMBERS, "nodes": 3}))
    own = find_cluster(str(path))
    assert (own.name, own.gpus, own.nics, own.gpu.flops) == ("ours", 12, 6, 1e14)
    assert own.efficiencies == uniform(1.0) and own.gpu.is_assumed
    path.write_text(json.dumps({"base": "h800", "nics_per_node": 4, "efficiencies": {"network": 0.85}}))
    based = find_cluster(str(path), nodes=2)
    assert (based.gpus, based.nics, based.gpu.flops) == (16, 8, 989e12)
    assert (based.efficiencies.network.value, based.efficiencies.link.value) == (0.85, 0.77)
    assert based.gpu.is_assumed and len(based.gpu.sources) > 1


def test_what_a_cluster_says_of_itself_is_a_cluster_file() -> None:
    h800 = find_cluster("h800", nodes=5)
    again = parse_cluster(json.loads(json.dumps(h800.to_dict())), name="x")
    assert again == h800


@pytest.mark.parametrize("missing", NUMBERS)
def test_a_missing_number_is_named(missing: str) -> None:
    with pytest.raises(InputError, match=f"missing field '{missing}'; state it, or a base"):
        parse_cluster({name: value for name, value in NUMBERS.items() if name != missing}, name="x")


@pytest.mark.parametrize("field", NUMBERS)
@pytest.mark.parametrize("value", [-1, 0, "8", None, True])
def test_a_negative_or_odd_number_is_named(field: str, value: object) -> None:
    with pytest.raises(InputError, match=field.removeprefix("gpu_")):
        parse_cluster({**NUMBERS, field: value}, name="x")


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([], "expected an object with gpus_per_node,"),
        ({**NUMBERS, "gpu_flop": 1}, "unknown field 'gpu_flop'; known:"),
        ({"base": "tpu"}, "cluster 'tpu' is not in the catalogue"),
        ({"base": 3}, "base must be a name of the catalogue, got 3"),
        ({**NUMBERS, "nodes": 0}, "nodes of cluster 'x' must be a whole number of at least 1, got 0"),
        ({**NUMBERS, "sources": "me"}, "sources must be a list of texts"),
    ],
)
def test_a_wrong_cluster_file_is_one_clear_line(document: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_cluster(document, name="x")


def test_the_cluster_file_is_named_in_its_errors(tmp_path: Path) -> None:
    path = tmp_path / "broken.json"
    with pytest.raises(InputError, match=r"cannot read the cluster file '.*broken.json': No such file"):
        find_cluster(str(path))
    path.write_text("{")
    with pytest.raises(InputError, match=r"cluster file '.*broken.json': not JSON"):
        find_cluster(str(path))
    path.write_text("{}")
    with pytest.raises(InputError, match=r"cluster file '.*broken.json': missing field 'gpus_per_node'"):
        find_cluster(str(path))
