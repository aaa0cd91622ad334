"""Which families of the installed transformers are mixtures of experts, and the class of each one's language model.

No list of names: a family has experts if its config says how many there are and how many a token has.
"""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from disagmoe_compile.errors import InputError
from disagmoe_compile.models.config_names import ALIASES
from disagmoe_compile.models.hf_configs import (
    config_class_of,
    fields_of,
    parts_of,
    text_class,
    transformers_package,
)


@cache
def families() -> tuple[str, ...]:
    """Every family of the installed transformers that `build` accepts, sorted. Takes seconds."""
    causal, both = model_names()
    names = sorted({*causal, *both})
    return tuple(name for name in names if _names_experts(name) and language_model(name) is not None)


def resolve(family: str) -> str:
    """The model type of a family, a folder or a family whose MoE is in its text part."""
    for name in (family, f"{family}_text"):
        if language_model(name) is not None:
            return name
    causal, both = model_names()
    if family in causal:
        raise InputError(f"hf:{family} has no experts: {causal[family]} is not a mixture-of-experts model")
    near = difflib.get_close_matches(family, {*causal, *both}, n=12, cutoff=0.5)
    near = [name for name in near if language_model(name) is not None][:5]
    raise InputError(
        f"unknown MoE family {family!r} in transformers {transformers_package().__version__}; "
        f"near names: {', '.join(near) if near else 'qwen3_moe, gpt_oss, mixtral, olmoe, deepseek_v3'}"
    )


@cache
def language_model(family: str) -> str | None:
    """The class that is the language model of an MoE family, None for any other name.

    A causal-LM class where there is one; else the model of images and text, unless the text part is a family itself.
    """
    causal, both = model_names()
    if family in causal and _has_experts(family):
        return causal[family]
    if family not in both:
        return None
    text = text_class(config_class_of(family))
    if text is config_class_of(family) or not _routes(fields_of(text)):
        return None
    from transformers.models.auto.configuration_auto import model_type_to_module_name

    folder = model_type_to_module_name(family)
    same_folder = [n for n in causal if model_type_to_module_name(n) == folder or n == text.model_type]
    return None if any(_has_experts(name) for name in same_folder) else both[family]


@cache
def model_names() -> tuple[Mapping[str, str], Mapping[str, str]]:
    """(model type -> causal-LM class, model type -> class of images and text), dense architectures included."""
    transformers_package()
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )

    causal = {name: _first(found) for name, found in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()}
    both = {name: _first(found) for name, found in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.items()}
    # Some causal LMs are registered beside the models of images and text alone.
    causal |= {n: found for n, found in both.items() if n not in causal and found.endswith("ForCausalLM")}
    known = set(CONFIG_MAPPING_NAMES)
    return (
        {name: found for name, found in causal.items() if name in known},
        {
            name: found
            for name, found in both.items()
            if name in known and found.endswith("ForConditionalGeneration")
        },
    )


@cache
def _has_experts(family: str) -> bool:
    """Whether the config itself, not a text part of it, says how many experts there are and how many a token has."""
    try:
        config_class = config_class_of(family)
    except (ImportError, KeyError):
        return False
    fields = fields_of(config_class)
    if "text_config" not in fields and "text_config" not in (
        getattr(config_class, "sub_configs", None) or ()
    ):
        fields = fields.union(*(fields_of(part) for part in parts_of(config_class).values()))
    return _routes(fields)


def _routes(fields: Collection[str]) -> bool:
    return all(any(name in fields for name in ALIASES[common]) for common in ("num_experts", "top_k"))


def _names_experts(family: str) -> bool:
    """Whether the text of its config has what `_routes` asks for, or takes fields from another family's: importing the configs
    of all the others would cost more than everything else here."""
    from transformers.models.auto.configuration_auto import model_type_to_module_name

    folder = (
        Path(inspect.getfile(transformers_package())).parent / "models" / model_type_to_module_name(family)
    )
    text = "".join(file.read_text() for file in folder.glob("configuration_*.py"))
    if re.search(r"^class \w+\((?!Pre[Tt]rained)\w+Config\)", text, re.MULTILINE):
        return True
    return all(
        any(re.search(rf"\b{name}\b", text) for name in ALIASES[common])
        for common in ("num_experts", "top_k")
    )


def _first(names: Any) -> str:
    return names if isinstance(names, str) else names[0]
