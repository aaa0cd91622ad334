"""What transformers says of a model family without building a model: the fields of its config class, the configs nested in it,
the source of its code.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from disagmoe_compile.errors import InputError


@cache
def transformers_package() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise InputError(
            "hf: sources need transformers; install it with: pip install 'transformers>=5,<6' safetensors"
        ) from error
    return transformers


def config_class_of(family: str) -> Any:
    transformers_package()
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return CONFIG_MAPPING[family]


@cache
def fields_of(config_class: Any) -> frozenset[str]:
    if not dataclasses.is_dataclass(config_class):
        return frozenset()
    return frozenset(f.name for f in dataclasses.fields(config_class) if not f.name.startswith("_"))


@cache
def parts_of(config_class: Any) -> Mapping[str, Any]:
    """Nested configs by field: the text part, a vision tower, or a block of fields of their own."""
    if not getattr(config_class, "sub_configs", None):
        return {}
    default = config_class()
    parts = {name: type(getattr(default, name, None)) for name in config_class.sub_configs}
    return {name: part for name, part in parts.items() if dataclasses.is_dataclass(part)}


def text_class(config_class: Any) -> Any:
    return parts_of(config_class).get("text_config", config_class)


def text_config(config: Any) -> Any:
    return getattr(config, "text_config", None) or config


@cache
def code_of(config_class: Any) -> str:
    """Source of the family's config and model."""
    config_file = Path(inspect.getfile(config_class))
    modeling = config_file.with_name(config_file.name.replace("configuration_", "modeling_", 1))
    return "".join(file.read_text() for file in (config_file, modeling) if file.exists())


def named_kinds(config_class: Any) -> tuple[str, ...]:
    """Kinds of layer that the family's code names."""
    from transformers.configuration_utils import ALLOWED_ATTN_LAYER_TYPES

    return tuple(kind for kind in ALLOWED_ATTN_LAYER_TYPES if f'"{kind}"' in code_of(config_class))
