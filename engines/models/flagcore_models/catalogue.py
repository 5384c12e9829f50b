"""What the core asks of this package: `flagcore.spec.models.Catalogue`."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from flagcore.domain.model import Model
from flagcore.i18n import _
from flagcore.spec.models import model_from
from flagcore.spec.plain_data import read_mapping, spec_error
from flagcore_models.config import model_of_config
from flagcore_models.gguf import gguf_shape, with_layers
from flagcore_models.keys import context_of
from flagcore_models.public import find_public, public_models, public_name, similar_models
from flagcore_models.quantized import format_of_weights, is_mxfp4
from flagcore_models.vision import vision_of

__all__ = ["of_keys", "public_model", "public_name", "read", "similar_models", "table"]


def read(path: Path) -> Model:
    """Return the model in a directory with a config.json, in such a file, or in a GGUF file. Raises SpecError."""
    if path.is_dir():
        folder, path = path, path / "config.json"
        if not path.exists():
            fix = _("give a directory with a config.json, a GGUF file, the name of a public model, or an inline shape")
            raise spec_error("", _("is a directory without a config.json"), value=str(folder), fix=fix)
    file, absolute = str(path), path.absolute()
    name = (absolute.parent.name if path.name == "config.json" else path.stem) or "model"
    if path.suffix == ".gguf":
        sizes = {key: value for key, value in gguf_shape(file).items() if value is not None}
        return with_layers(model_from({**sizes, "name": name}, base=path.parent, file=file), file)
    data = read_mapping(path, file=file, key="model")
    model = model_of_config(data, name=name, file=file)
    sizes_file = path.with_name("preprocessor_config.json")
    pixels = read_mapping(sizes_file, file=str(sizes_file), key="model") if sizes_file.is_file() else {}
    return replace(model, vision=vision_of(data, pixels))


def of_keys(keys: Mapping[str, Any], name: str) -> Model:
    """Return the model that the keys of a config.json describe. Raises SpecError."""
    return replace(model_of_config(keys, name=name, file=""), vision=vision_of(keys, {}))


@lru_cache(maxsize=256)
def public_model(name: str) -> Model | None:
    """Return the public model `organization/name` or the one that it is a variant of, or None."""
    if (found := find_public(name)) is None:
        return None
    tower = found[0].get("vision_config")
    vision = vision_of(found[0], tower) if isinstance(tower, Mapping) else None
    return replace(model_of_config(found[0], name=name, file=""), vision=vision)


def table(words: Iterable[str]) -> list[dict[str, Any]]:
    """Return one record per public model whose name contains all words, in any case. `context` may be None."""
    records = list[dict[str, Any]]()
    for name, config in public_models().items():
        if all(word.lower() in name.lower() for word in words):
            model = model_of_config(config, name=name, file="")
            records.append(
                {
                    "model": name,
                    "layers": model.num_layers,
                    "hidden": model.hidden_size,
                    "experts": model.experts or None,
                    "context": context_of(config),
                    "weights": "mxfp4" if is_mxfp4(config) else format_of_weights(config) or "bf16",
                }
            )
    return records
