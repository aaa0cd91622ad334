"""First values from the model's own initialisation, module by module, without ever holding the model.

Each module in turn gets storage for its own parameters, initialises them, and keeps the rows that are asked for. Modules come in
the order of `model.apply(init)`, and each draws all of its random numbers, so the values are those of the whole model in the same
state of torch's generator, however it is spread. A weight that transformers ties to another has the other's values, as there.
"""

from __future__ import annotations

import hashlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn

from disagmoe_compile.errors import DisagMoEError, UnsupportedModelError
from disagmoe_compile.runtime.loading.hf_names import is_pretrained
from disagmoe_compile.runtime.pending import check_unwritten
from disagmoe_compile.runtime.placement import Rows

Init = Callable[[nn.Module], None]
_ADVICE = (
    "pass init=..., a function that writes all parameters and buffers of the one module that it is given"
)


@dataclass(frozen=True, slots=True)
class InitialValues:
    """`generator_state`: of torch's CPU generator when the initialisation was asked for. `init`: None for the model's own."""

    root: weakref.ref[nn.Module]
    init: Init | None
    generator_state: torch.Tensor = field(repr=False)

    @property
    def identity(self) -> str:
        state = hashlib.sha256(bytes(self.generator_state.tolist())).hexdigest()
        how = "its own" if self.init is None else getattr(self.init, "__qualname__", type(self.init).__name__)
        return f"initialisation {how} {state}"

    def read(self, wanted: Mapping[str, Rows | None]) -> dict[str, torch.Tensor]:
        """Raises UnsupportedModelError naming what a module's initialisation leaves without a value."""
        root = self.root()
        if root is None:
            raise DisagMoEError("the model is gone: keep it alive while its compiled form is used")
        first_names = {id(parameter): name for name, parameter in root.named_parameters()}
        copies = set(getattr(root, "all_tied_weights_keys", None) or ())
        places = root.named_parameters(remove_duplicate=False)
        times_kept = Counter(id(parameter) for name, parameter in places if name not in copies)
        found: dict[str, torch.Tensor] = {}
        # of parameters that several modules initialise, the last one for good
        shared: dict[int, torch.Tensor] = {}
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.set_rng_state(self.generator_state)
            for prefix, module, init in in_order(root, self.init):
                with _own_storage(module, shared) as own:
                    _run(prefix, module, init)
                while own:  # or a module's storage would be there beside the next one's
                    name, parameter, value = own.pop()
                    if _join(prefix, name) in copies:
                        continue
                    if value.isnan().any():
                        raise _untouched(prefix, module, f"parameter {name}", "no value")
                    if times_kept[id(parameter)] > 1:
                        shared[id(parameter)] = value
                    first_name = first_names[id(parameter)]
                    if first_name in wanted:
                        rows = wanted[first_name]
                        found[first_name] = value if rows is None else value[rows[0] : rows[1]].clone()
                    del value
        return found


def initialise_buffers(root: nn.Module, init: Init | None) -> None:
    """Gives the buffers of `root` that are on the meta device their values, on the CPU.

    Raises UnsupportedModelError for a buffer that the module's initialisation leaves alone, or draws at random.
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        for prefix, module, init_one in in_order(root, init):
            names = [
                name for name, buffer in module._buffers.items() if buffer is not None and buffer.is_meta
            ]
            if not names:
                continue
            values = []
            for fill in (0, 1):  # what the initialisation writes does not depend on what was there
                for name in names:
                    module._buffers[name] = torch.full_like(module._buffers[name], fill, device="cpu")
                with _own_storage(module, {}):
                    _run(prefix, module, init_one)
                values.append({name: module._buffers[name] for name in names})
            for name in names:
                if not torch.equal(*(one[name] for one in values)):
                    raise _untouched(prefix, module, f"buffer {name}", "no value, or a random one,")


def in_order(
    module: nn.Module, init: Init | None, prefix: str = "", around: Init | None = None
) -> Iterator[tuple[str, nn.Module, Init]]:
    """Every module with its name and what initialises it, children first, as `module.apply` goes.

    That is `init` if one was given; else the nearest model of transformers (`around`) that the module is or belongs to; else
    torch's convention.
    """
    nearest = module._init_weights if is_pretrained(module) else around
    for name, child in module.named_children():
        yield from in_order(child, init, _join(prefix, name), nearest)
    yield prefix, module, init or nearest or _reset_parameters


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _reset_parameters(module: nn.Module) -> None:
    """torch's convention, for a module that has parameters or buffers itself."""
    own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
    if not own:
        return
    reset = getattr(module, "reset_parameters", None)
    if reset is None:
        raise UnsupportedModelError(f"{type(module).__name__} has no reset_parameters()")
    reset()


@contextmanager
def _own_storage(
    module: nn.Module, shared: Mapping[int, torch.Tensor]
) -> Iterator[list[tuple[str, nn.Parameter, torch.Tensor]]]:
    """While the context is open the module's own parameters have storage, of NaN (or their values in `shared`)."""
    own = []
    before = [(parameter, parameter.data) for parameter in module.parameters(recurse=False)]
    for name, parameter in module.named_parameters(recurse=False):
        whole = shared.get(id(parameter))
        if whole is None:
            nothing = float("nan") if parameter.dtype.is_floating_point else 0
            whole = torch.full(parameter.shape, nothing, dtype=parameter.dtype, device=parameter.device)
        parameter.data = whole
        own.append((name, parameter, whole))
    try:
        yield own
        own[:] = [(name, parameter, parameter.data) for name, parameter, _ in own]
    finally:
        for parameter, data in before:
            parameter.data = data


def _run(prefix: str, module: nn.Module, init: Init) -> None:
    try:
        init(module)
        check_unwritten()
    except Exception as error:  # a function of the model's author
        where = f"{prefix or 'the model'} ({type(module).__name__})"
        message = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise UnsupportedModelError(f"{where} cannot be initialised alone: {message}; {_ADVICE}") from error


def _untouched(prefix: str, module: nn.Module, what: str, how: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{what} of {prefix or 'the model'} gets {how} from the initialisation of {type(module).__name__}: {_ADVICE}"
    )
