"""One rank of `disagmoe train`: `python -m disagmoe_compile.cli.train_worker RUN_FOLDER`, started with
torchrun's environment.

The training itself is an ordinary loop; what is added here is only the record of it.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from disagmoe_compile.cli.run_folder import RunFolder
from disagmoe_compile.cli.train_loop import Training, TrainSettings, load_for_training
from disagmoe_compile.errors import DisagMoEError
from disagmoe_compile.plan.serialize import dump
from disagmoe_compile.runtime.pulse import end_with_parent
from disagmoe_compile.runtime.session import Session, active_sessions


def main(folder: RunFolder) -> int:
    """Trains; leaves this rank's report and events. Returns the exit status."""
    end_with_parent()
    rank = int(os.environ["RANK"])
    try:
        report = _train(folder, rank)
    except Exception as error:
        traceback.print_exc()
        status = error.exit_status if isinstance(error, DisagMoEError) else 1
        cause = {"type": type(error).__name__, "message": _first_paragraph(error), "exit_status": status}
        folder.save_report(rank, {"rank": rank, "error": cause})
        return status
    folder.save_report(rank, report)
    return 0


def _train(folder: RunFolder, rank: int) -> dict[str, Any]:
    settings = TrainSettings.load(folder.settings)
    torch.set_num_threads(1)
    source = load_for_training(settings)
    training = Training(
        settings,
        source,
        lambda model: torch.compile(model, backend="disagmoe", options=dict(settings.options)),
    )
    for result in training.run():
        if rank == 0:
            if result.step == 0:
                dump(active_sessions()[0].plan, folder.plan)
            with folder.losses.open("a") as lines:
                lines.write(json.dumps(asdict(result)) + "\n")
    sessions = active_sessions()
    folder.save_events(rank, (event for session in sessions for event in session.events))
    return {
        "rank": rank,
        "role": str(sessions[0].group.role),
        "group": sessions[0].group.index,
        "param_bytes": sessions[0].parameter_bytes,
        "optimizer_bytes": _optimizer_bytes(training.optimizer),
        "mixes_samples": bool(sessions[0].mixes_samples),
        "sent_bytes": sum(sum(session.sent_bytes.values()) for session in sessions),
        "sent_bytes_by_transfer": _by_transfer(sessions),
    }


def _first_paragraph(error: Exception) -> str:
    """What it says, without the advice on debugging that torch appends."""
    return " ".join(str(error).strip().split("\n\n")[0].split())


def _optimizer_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the state tensors, step counters aside (AdamW keeps one small counter a parameter)."""
    states = (value for state in optimizer.state.values() for key, value in state.items() if key != "step")
    return sum(t.numel() * t.element_size() for t in states if isinstance(t, torch.Tensor))


def _by_transfer(sessions: list[Session]) -> dict[str, int]:
    total: dict[str, int] = {}
    for session in sessions:
        for name, nbytes in session.sent_bytes.items():
            total[name] = total.get(name, 0) + nbytes
    return total


if __name__ == "__main__":
    sys.exit(main(RunFolder(Path(sys.argv[1]))))
