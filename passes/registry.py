"""Passes of other packages, found through the entry point group `disagmoe_compile.passes`.

    [project.entry-points."disagmoe_compile.passes"]
    quantize_payload = "my_package.quantize:QuantizePayload"

The entry names a `GraphPass` or a callable without arguments that makes one. Where it runs follows from its contract: right
after the first point at which everything it requires holds. Its source and options enter the plan's fingerprint like those of
any pass, so ranks that have different passes installed notice before the first message.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from importlib.metadata import entry_points

from disagmoe_compile.errors import InputError
from disagmoe_compile.passes.base import GraphPass
from disagmoe_compile.passes.contract import Capability, ContractError, standing
from disagmoe_compile.passes.find_regions import FindRegions

GROUP = "disagmoe_compile.passes"


def registered_passes() -> tuple[GraphPass, ...]:
    """One pass per installed entry, sorted by name so that all ranks agree. Raises InputError for an entry that is no pass."""
    return tuple(
        _load(entry.name, entry.load) for entry in sorted(entry_points(group=GROUP), key=lambda e: e.name)
    )


def with_extra(
    passes: Sequence[GraphPass], extra: Iterable[GraphPass], given: frozenset[Capability]
) -> tuple[GraphPass, ...]:
    """`passes` with each extra one where its requirements first hold; extra passes at one place keep their order.

    Raises ContractError for a name that is taken, and for requirements that never hold together.
    """
    result = list(passes)
    for one in extra:
        if any(one.name == other.name for other in result):
            raise ContractError(f"two passes are called {one.name}; give yours another name")
        result.insert(_place(result, one, passes, given), one)
    return tuple(result)


def without(passes: Sequence[GraphPass], disabled: Iterable[str]) -> tuple[GraphPass, ...]:
    """`passes` less those named; `find_regions.STYLE` turns one style of recognising experts off. For bisecting.

    Raises InputError for an unknown name. Whether the rest can do without it is for the contract to say.
    """
    kept = list(passes)
    for name in disabled:
        for index, one in enumerate(kept):
            if one.name == name:
                del kept[index]
                break
            if isinstance(one, FindRegions) and name in (f"{one.name}.{style.name}" for style in one.styles):
                styles = tuple(s for s in one.styles if name != f"{one.name}.{s.name}")
                kept[index] = replace(one, styles=styles)
                break
        else:
            raise InputError(f"no pass {name!r} to turn off; there are {', '.join(names(passes))}")
    return tuple(kept)


def names(passes: Iterable[GraphPass]) -> list[str]:
    """Of every pass, and of every style of the pass that finds experts."""
    found = []
    for one in passes:
        found.append(one.name)
        if isinstance(one, FindRegions):
            found += [f"{one.name}.{style.name}" for style in one.styles]
    return found


def _place(
    result: Sequence[GraphPass], one: GraphPass, own: Sequence[GraphPass], given: frozenset[Capability]
) -> int:
    have = given
    for index in range(len(result) + 1):
        ours_follows = index == len(result) or result[index] in own
        if one.requires <= standing(have) and ours_follows:
            return index
        if index < len(result):
            have |= result[index].provides
    raise ContractError(
        f"pass {one.name} requires {', '.join(sorted(one.requires))}, which never hold at one time; "
        "a capability ends where the next form of the graph begins (passes/contract.py)"
    )


def _load(name: str, load: object) -> GraphPass:
    try:
        found = load()  # type: ignore[operator]
        made = found() if isinstance(found, type) or not hasattr(found, "run") else found
    except Exception as error:
        raise InputError(
            f"pass {name!r} of entry point group {GROUP} cannot be loaded: {type(error).__name__}: {error}"
        ) from error
    missing = [part for part in ("name", "requires", "provides", "run") if not hasattr(made, part)]
    if missing:
        raise InputError(
            f"pass {name!r} of entry point group {GROUP} is no pass: {type(made).__name__} has no {', '.join(missing)}"
        )
    return made
