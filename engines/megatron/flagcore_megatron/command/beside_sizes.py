"""The arguments of Megatron-LM for what a model has beside its sizes: rotary embeddings, epsilon, the router."""

import ast
from collections.abc import Iterator, Mapping
from typing import Any

from flagcore.domain.model import Model
from flagcore.spec.plain_data import package_yaml
from flagcore_megatron.program.arguments import release_table

REFERENCE: Mapping[str, Any] = package_yaml(__package__, "reference.yaml")
"""The arguments of a job without a command."""
NEEDED = ("rms_norm_eps", "rope_theta")
"""The keys without which Megatron-LM's defaults are those of another model."""
USUAL = {"hidden_act": "silu", "mlp_bias": "False"}
"""The values of keys that the layers of all families here have, unless a config.json says otherwise."""


def flag_of(name: str) -> str:
    """Return the argument for a name of `reference.yaml`."""
    return f"--{REFERENCE['spellings'].get(name, name).replace('_', '-')}"


def arguments_beside_sizes(model: Model, release: str | None) -> tuple[list[str], str]:
    """Return the arguments for the values of a model's config.json that are no sizes, and what they lack, in words.

    `release`: that of Megatron-LM. None is the newest one. A model without a family is an inline shape, without such
    values.
    """
    if not model.family:
        return [], ""
    if model.family not in REFERENCE["families"]:
        return [], REFERENCE["missing_layers"].format(model=model.name, names=model.family)
    keys = {name.removeprefix("text_config."): value for name, value in model.unread}
    rope = {**_mapping(keys.get("rope_scaling")), **_mapping(keys.get("rope_parameters"))}
    keys = {**{key: str(value) for key, value in rope.items()}, **keys}
    words = [*REFERENCE["families"][model.family], *_words(REFERENCE["values"], keys)]
    lacks, scaling = [key for key in NEEDED if key not in keys], str(rope.get("rope_type", rope.get("type", "default")))
    unless = {} if lacks else REFERENCE["unless"].get(model.family, {})
    words += (word for key, word in unless.items() if key not in keys)
    lacks += [key for key, value in USUAL.items() if keys.get(key, value) != value]
    row = REFERENCE["scalings"].get("default" if scaling == "mrope" else scaling)
    if row is None or (scaling == "yarn" and not model.multi_latent_attention):
        lacks.append("rope_scaling")
    else:
        words += [*row.get("switches", ()), *_words(row.get("values", {}), keys)]
        same = row.get("same", {}).items()
        lacks += [f"rope_scaling.{key}" for key, value in same if float(keys.get(key, value)) != value]
    table = release_table(release)
    known = [word for word in words if table.find(word.partition(" ")[0])]
    lacks += [word for word in words if word not in known]
    text = REFERENCE["missing_values"].format(model=model.name, names=", ".join(lacks)) if lacks else ""
    return " ".join(known).split(), text


def _words(table: Mapping[str, str], keys: Mapping[str, str]) -> Iterator[str]:
    """Yield the arguments, with their values, of the keys that are given. Rotary bases are integers in Megatron-LM."""
    for key, name in table.items():
        if key in keys:
            yield f"{flag_of(name)} {int(float(keys[key])) if key == 'rope_theta' else float(keys[key])}"


def _mapping(text: str | None) -> Mapping[str, Any]:
    """Return the mapping that a value of `Model.unread` is, or an empty one."""
    try:
        found = ast.literal_eval(text or "")
    except (ValueError, SyntaxError):
        return {}
    return found if isinstance(found, Mapping) else {}
