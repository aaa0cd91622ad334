"""`SOURCE` of the command line: a model with example arguments, from transformers or from a user's file.

hf:FAMILY                 a tiny random model of that transformers family, trained as a causal language model
style:NAME                a tiny language model whose MoE layers are hand-written in that style (`models/styles`)
path/to/file.py:factory   `factory()` returns `(model, args, kwargs)`
"""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from disagmoe_compile.errors import InputError

EXAMPLE_BATCH_SIZE = 4
EXAMPLE_SEQ_LENGTH = 32
TEXT_VOCAB_SIZE = 256  # one token a byte


@dataclass(frozen=True, slots=True)
class Source:
    """A model and one example call of it.

    `vocab_size` is the number of token ids where the model reads tokens (`input_ids` and `labels`), so that
    it can be trained on text; None where it reads something else.
    """

    name: str
    model: torch.nn.Module
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    vocab_size: int | None = None


def load_source(source: str, *, seed: int = 0) -> Source:
    """Builds the model of `source` with that seed. Raises InputError that says what is wrong with it, and
    where.
    """
    kind, _, rest = source.partition(":")
    if kind == "hf" and rest:
        return _from_transformers(source, rest, seed)
    if kind == "style" and rest:
        return _from_styles(source, rest, seed)
    path, separator, function = source.rpartition(":")
    if not separator or not path or not function:
        raise InputError(
            f"source {source!r} is not one of hf:FAMILY (e.g. hf:qwen3_moe), style:NAME (e.g. style:where_loop) or "
            "path/to/file.py:factory"
        )
    return _from_file(source, Path(path), function, seed)


def _from_transformers(source: str, family: str, seed: int) -> Source:
    from disagmoe_compile.models.hf import build

    model, config = build(family, seed=seed)
    return _language_source(source, model, config.get_text_config().vocab_size, seed)


def _from_styles(source: str, style: str, seed: int) -> Source:
    from disagmoe_compile.models.styles import build

    model = build(style, seed=seed, vocab=TEXT_VOCAB_SIZE)
    return _language_source(source, model, TEXT_VOCAB_SIZE, seed)


def _language_source(source: str, model: torch.nn.Module, vocab_size: int, seed: int) -> Source:
    shape = (EXAMPLE_BATCH_SIZE, EXAMPLE_SEQ_LENGTH)
    ids = torch.randint(3, vocab_size, shape, generator=torch.Generator().manual_seed(seed))
    return Source(source, model, (), {"input_ids": ids, "labels": ids.clone()}, vocab_size)


def _from_file(source: str, path: Path, function: str, seed: int) -> Source:
    if not path.is_file():
        raise InputError(f"source {source!r}: no such file: {path}")
    factory = getattr(_import(source, path), function, None)
    if not callable(factory):
        raise InputError(
            f"source {source!r}: {path} has no function {function!r} that returns (model, args, kwargs)"
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        result = _located(source, path, factory)
    is_triple = isinstance(result, tuple) and len(result) == 3
    if not is_triple or not _is_call(*result):
        shape = f"{type(result).__name__}" + (f" of {len(result)}" if isinstance(result, tuple) else "")
        raise InputError(
            f"source {source!r}: {function}() must return (model, args, kwargs) with an nn.Module, a tuple and a "
            f"dict, got {shape}"
        )
    model, args, kwargs = result
    return Source(source, model, tuple(args), dict(kwargs), _vocab_size(model, kwargs))


def _vocab_size(model: torch.nn.Module, kwargs: dict[str, Any]) -> int | None:
    if not {"input_ids", "labels"} <= set(kwargs):
        return None
    embeddings = [m.num_embeddings for m in model.modules() if isinstance(m, torch.nn.Embedding)]
    return max(embeddings, default=None)


def _is_call(model: object, args: object, kwargs: object) -> bool:
    return isinstance(model, torch.nn.Module) and isinstance(args, tuple | list) and isinstance(kwargs, dict)


def _import(source: str, path: Path) -> ModuleType:
    name = f"_disagmoe_source_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise InputError(f"source {source!r}: {path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and Dynamo look modules up by name
    folder = str(path.resolve().parent)
    sys.path.insert(0, folder)  # as `python file.py` does, so that the file finds its neighbours
    loader = spec.loader
    try:
        _located(source, path, lambda: loader.exec_module(module))
    finally:
        sys.path.remove(folder)
    return module


def _located(source: str, path: Path, call: Callable[[], Any]) -> Any:
    """`call()`, with the user's own errors turned into one line that names the line of their file."""
    try:
        return call()
    except InputError:
        raise
    except SyntaxError as error:
        where = f"{error.filename}:{error.lineno}"
        raise InputError(f"source {source!r}: {where}: SyntaxError: {error.msg}") from error
    except Exception as error:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename) == path]
        where = f"{path}:{frames[-1].lineno}" if frames else str(path)
        raise InputError(f"source {source!r}: {where}: {type(error).__name__}: {error}") from error
