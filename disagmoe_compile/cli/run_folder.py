"""The folder that `disagmoe train` leaves behind: what is in it, and under which name."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from disagmoe_compile.errors import InputError
from disagmoe_compile.runtime.timeline import Event


@dataclass(frozen=True, slots=True)
class RunFolder:
    """plan.json, graphs/NN_pass.py, timeline.json, losses.jsonl, settings.json, and per rank a log and a
    report.
    """

    path: Path

    @staticmethod
    def create(path: Path | None) -> RunFolder:
        """A new folder, by default `runs/<time>`. Raises InputError where it holds files or cannot be made."""
        folder = path or Path("runs") / datetime.now().strftime("%Y-%m-%d_%H-%M-%S-%f")[:-3]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if any(folder.iterdir()):
                raise InputError(f"--output-dir {folder} is not empty; name a new folder")
            (folder / "ranks").mkdir()
        except OSError as error:
            raise InputError(f"--output-dir {folder} cannot be made: {error.strerror}") from error
        return RunFolder(folder.resolve())

    @property
    def settings(self) -> Path:
        return self.path / "settings.json"

    @property
    def plan(self) -> Path:
        return self.path / "plan.json"

    @property
    def losses(self) -> Path:
        return self.path / "losses.jsonl"

    @property
    def timeline(self) -> Path:
        return self.path / "timeline.json"

    @property
    def graphs(self) -> Path:
        return self.path / "graphs"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def save_report(self, rank: int, report: Mapping[str, Any]) -> None:
        self._rank_file(rank, "report").write_text(json.dumps(report))

    def report(self, rank: int) -> dict[str, Any] | None:
        """What a rank said at its end, its error included; None where it said nothing."""
        path = self._rank_file(rank, "report")
        return dict(json.loads(path.read_text())) if path.exists() else None

    def save_events(self, rank: int, events: Iterable[Event]) -> None:
        self._rank_file(rank, "events").write_text(json.dumps([asdict(event) for event in events]))

    def events(self, rank: int) -> list[Event]:
        path = self._rank_file(rank, "events")
        return [Event(**fields) for fields in json.loads(path.read_text())] if path.exists() else []

    def _rank_file(self, rank: int, what: str) -> Path:
        return self.path / "ranks" / f"{what}_{rank}.json"
