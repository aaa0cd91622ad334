from __future__ import annotations

import pytest

from disagmoe_compile.errors import InputError
from disagmoe_compile.planner.hardware import ASSUMED, GPU, Cluster, catalogue, find_cluster, local_cpu


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
    assert (here.gpus, here.nics, here.has_nic_per_gpu) == (4, 4, True)


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
