"""What changed between any two passes: operations that came and went, and the dumps' texts against each other."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import fx

from disagmoe_compile.errors import InputError
from disagmoe_compile.inspect.diff import count_operations
from disagmoe_compile.inspect.dump import render
from disagmoe_compile.passes.base import PassReport


@dataclass(frozen=True, slots=True)
class PairDiff:
    """`added` and `removed`: operation -> how many more or fewer after `second` than after `first`. `code`: a unified diff."""

    first: str
    second: str
    added: Mapping[str, int]
    removed: Mapping[str, int]
    code: str


@dataclass(slots=True)
class PairRecorder:
    """Observer of a pass manager: keeps the graph after each of two passes, named by number or name: `3`, `partition`.

    `diff()` raises InputError where one of them did not run, or where the second runs before the first.
    """

    first: str
    second: str
    _seen: list[str] = field(default_factory=list)
    _kept: list[tuple[str, str, Counter[str]]] = field(default_factory=list)

    def __call__(self, index: int, pass_name: str, graph_module: fx.GraphModule, report: PassReport) -> None:
        label = f"{index:02d}_{pass_name}"
        self._seen.append(label)
        if any(_names(wanted, index, pass_name) for wanted in (self.first, self.second)):
            self._kept.append((label, render(graph_module), count_operations(graph_module)))

    @classmethod
    def parse(cls, text: str) -> PairRecorder:
        """Of `FIRST:SECOND`. Raises InputError for another form."""
        first, separator, second = text.partition(":")
        if not (first and separator and second) or first == second:
            raise InputError(
                f"--diff takes two passes by number or name, e.g. 3:6 or deinplace:partition, got {text!r}"
            )
        return cls(first, second)

    def diff(self) -> PairDiff:
        if len(self._kept) != 2 or not _names(self.first, *_parts(self._kept[0][0])):
            raise InputError(
                f"--diff {self.first}:{self.second} needs two passes, the earlier one first; the passes are "
                f"{', '.join(self._seen) or 'none: the model has no graph'}"
            )
        (before, old, had), (after, new, has) = self._kept
        lines = difflib.unified_diff(old.splitlines(), new.splitlines(), before, after, lineterm="")
        return PairDiff(
            before,
            after,
            dict(sorted((has - had).items())),
            dict(sorted((had - has).items())),
            "\n".join(lines),
        )


def _names(wanted: str, index: int, pass_name: str) -> bool:
    return int(wanted) == index if wanted.isdigit() else wanted == pass_name


def _parts(label: str) -> tuple[int, str]:
    number, _, name = label.partition("_")
    return int(number), name
