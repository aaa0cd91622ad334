"""One HTML file that shows how a model is split: the stages as a picture, the plan's timeline beside it, the code of each stage.

The file opens without a network: libraries (assets/vendor), style, script and data stand in it. The picture's layout is ELK's,
its drawing Cytoscape's; what happens here is the document that they are given:

    stages     as in Explanation, with the code, what it calls and how often, and in a plan its group and ranks
    blocks     what is drawn as one box until it is opened: an attention stage and the experts it feeds
    links      one per pair of stages between which something is sent: bytes a token, and of the gradients on the way back
    timeline   per group its actions with their slots (schedule_grid.py)
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from disagmoe_compile.inspect.explain import Explanation, StageInfo, TransferInfo
from disagmoe_compile.inspect.schedule_grid import Lane, place, rank_range
from disagmoe_compile.plan.ir import Plan

_SCRIPTS = ("picture.js", "panel.js", "timeline.js", "main.js")
_LIBRARIES = ("vendor/cytoscape.min.js", "vendor/elk.bundled.js")


@dataclass(frozen=True, slots=True)
class StageCode:
    """The Python text of a stage, and the bare names of what it calls with how often."""

    text: str
    operations: Mapping[str, int] = field(default_factory=dict)


def write_report(path: Path, document: Mapping[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render_report(document), encoding="utf-8")
    return path


def report_document(
    title: str,
    explanation: Explanation,
    code: Mapping[str, StageCode],
    plan: Plan | None = None,
    no_plan: str = "",
) -> dict[str, Any]:
    """What the report shows. `code` by the name of the stage; `no_plan` says why there is no timeline."""
    return {
        "title": title,
        "fingerprint": explanation.fingerprint,
        "stages": [_stage(stage, code.get(stage.name), plan) for stage in explanation.stages],
        "blocks": _blocks(explanation.stages),
        "links": _links(explanation.transfers),
        "experts": [asdict(one) for one in explanation.experts],
        "breaks": [asdict(one) for one in explanation.graph_breaks],
        "batch_coupled": list(explanation.batch_coupled),
        "passes": [{"name": name, "report": str(report)} for name, report in explanation.passes],
        "timeline": None if plan is None else _timeline(plan),
        "no_plan": no_plan,
    }


def render_report(document: Mapping[str, Any]) -> str:
    """The file's text. Nothing in the document can end the element that it stands in."""
    parts = {
        "title": _text(str(document["title"])),
        "style": _asset("report.css"),
        "libraries": "\n".join(f"<script>{_script(_asset(name))}</script>" for name in _LIBRARIES),
        "data": json.dumps(document, separators=(",", ":")).replace("<", "\\u003c"),
        "script": "\n".join(_script(_asset(name)) for name in _SCRIPTS),
    }
    return Template(_asset("report.html")).substitute(parts)


def _asset(name: str) -> str:
    return (resources.files("disagmoe_compile.inspect") / "assets" / name).read_text(encoding="utf-8")


def _text(value: str) -> str:
    return value.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _script(text: str) -> str:
    """Inside a string or a pattern of a script, `<\\/script` is the same text and does not end the element."""
    return re.sub(r"</(?=script)", r"<\\/", text, flags=re.IGNORECASE)


def _stage(stage: StageInfo, code: StageCode | None, plan: Plan | None) -> dict[str, Any]:
    found = {**asdict(stage), "boundary": int(stage.name[1:])}
    found["code"] = code.text if code is not None else ""
    found["operations"] = dict(Counter(code.operations).most_common()) if code is not None else {}
    if plan is not None:
        group = plan.topology.group_of_stage(_index(stage.name))
        found |= {"group": str(group), "ranks": rank_range(plan.topology, group)}
    return found


def _index(name: str) -> int:
    return 2 * int(name[1:]) + (name[0] == "F")


def _blocks(stages: tuple[StageInfo, ...]) -> list[dict[str, Any]]:
    """Stages of one boundary; the head is a block of its own."""
    by_boundary: dict[int, list[StageInfo]] = {}
    for stage in stages:
        by_boundary.setdefault(int(stage.name[1:]), []).append(stage)
    return [
        {"id": f"block{boundary}", "label": _block_label(members), "stages": [s.name for s in members]}
        for boundary, members in by_boundary.items()
    ]


def _block_label(members: list[StageInfo]) -> str:
    layers = sorted({layer for stage in members for layer in stage.layers})
    if not layers:
        return "head" if len(members) == 1 else f"boundary {members[0].name[1:]}"
    return f"layer {layers[0]}" if len(layers) == 1 else f"layers {layers[0]}-{layers[-1]}"


def _links(transfers: tuple[TransferInfo, ...]) -> list[dict[str, Any]]:
    """Forward transfers, each with the bytes of its gradients' way back."""
    back = {(t.dst, t.src, t.kind): t for t in transfers if t.direction == "backward"}
    links = []
    for transfer in transfers:
        if transfer.direction != "forward":
            continue
        mirrored = back.get((transfer.src, transfer.dst, transfer.kind))
        link = asdict(transfer) | {"kind": "residual" if transfer.kind == "p2p" else transfer.kind}
        link["gradient_name"] = None if mirrored is None else mirrored.name
        link["gradient_bytes"] = None if mirrored is None else mirrored.bytes_per_token
        links.append(link)
    return links


def _timeline(plan: Plan) -> dict[str, Any]:
    schedule = plan.training or plan.forward_only
    placed = place(plan, schedule)
    stages = [stage.name for stage in plan.stages]
    lanes = list(Lane)
    return {
        "schedule": schedule.name,
        "n_microbatches": plan.workload.n_microbatches,
        "n_slots": 1 + max((p.slot for actions in placed.values() for p in actions), default=0),
        "fingerprint": plan.fingerprint,
        "stage_names": stages,
        "groups": [
            {
                "name": str(group),
                "ranks": rank_range(plan.topology, group),
                "actions": [
                    [str(p.action), p.look, p.action.stage, p.slot, lanes.index(p.lane)] for p in actions
                ],
            }
            for group, actions in placed.items()
        ],
    }
