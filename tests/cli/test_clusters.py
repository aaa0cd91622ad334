from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

CommandLine = Callable[..., tuple[int, str, str]]


def test_the_catalogue_is_listed_with_sources(disagmoe: CommandLine) -> None:
    status, out, _ = disagmoe("clusters", "--json")
    clusters = json.loads(out)["clusters"]
    h800 = next(cluster for cluster in clusters if cluster["name"] == "H800-SXM5")
    assert status == 0
    assert (h800["gpu_flops"], h800["nic_bytes_per_s"], h800["gpus_per_node"]) == (989e12, 50e9, 8)
    assert all(cluster["sources"] for cluster in clusters)


def test_people_get_a_table(disagmoe: CommandLine) -> None:
    _, out, _ = disagmoe("clusters")
    assert "H800-SXM5" in out and "989" in out


def test_shares_of_peaks_are_shown_and_guesses_are_marked(disagmoe: CommandLine) -> None:
    _, out, _ = disagmoe("clusters")
    assert "0.7*" in out and "0.77" in out and "0.77*" not in out
    _, out, _ = disagmoe("clusters", "--json")
    reached = json.loads(out)["clusters"][0]["efficiencies"]
    assert set(reached) == {"gemm", "attention_core", "memory", "link", "network"}
    assert all(share["source"] for share in reached.values())


def test_a_cluster_file_is_shown_or_refused_in_one_line(disagmoe: CommandLine, tmp_path: Path) -> None:
    path = tmp_path / "ours.json"
    path.write_text('{"base": "h800", "nodes": 16, "efficiencies": {"network": 0.8}}')
    _, out, _ = disagmoe("clusters", str(path), "--json")
    (ours,) = json.loads(out)["clusters"]
    assert (ours["name"], ours["nodes"], ours["efficiencies"]["network"]["value"]) == ("ours", 16, 0.8)
    path.write_text('{"base": "h800", "nic_bytes_per_s": -1}')
    status, out, err = disagmoe("clusters", str(path))
    assert status == 2 and not out and err.count("\n") == 1
    assert "ours.json': nic_bytes_per_s of cluster 'ours' must be a positive number, got -1" in err
