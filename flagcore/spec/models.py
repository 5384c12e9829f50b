"""Models of a spec: inline shapes, and the files and public names that the installed catalogue of models knows."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any, Protocol

from pydantic import WrapValidator

from flagcore.domain.model import Model
from flagcore.errors import SpecError
from flagcore.i18n import _
from flagcore.loading.entry_points import installed, load_checked, with_methods
from flagcore.spec.plain_data import plain, spec_error
from flagcore.spec.shapes import Shape, model_of_shape
from flagcore.spec.validate import Context, ModelPath, Section, checked, rule


class Catalogue(Protocol):
    """Reads model files and knows public models: the module of the entry point `catalogue` in `flagcore.models`."""

    def read(self, path: Path) -> Model:
        """Return the model in a file or directory that exists. Raises SpecError, or NoDevice without its reader."""

    def of_keys(self, keys: Mapping[str, Any], name: str) -> Model:
        """Return the model that the keys of a model file describe. Raises SpecError."""

    def public_name(self, name: str) -> str | None:
        """Return the public model whose shape a name has, or None. The organization does not matter."""

    def public_model(self, name: str) -> Model | None:
        """Return the public model `organization/name` or the one that it is a variant of, or None."""

    def similar_models(self, name: str) -> list[str]:
        """Return up to three public models that a name may mean. The organization does not matter."""


@cache
def catalogue() -> Catalogue:
    """Return the catalogue of models. Raises SpecError if none is installed, NoDevice if it cannot be loaded."""
    if points := installed("flagcore.models").get("catalogue"):
        found: Catalogue = load_checked("catalogue of models", points, partial(with_methods, Catalogue))
        return found
    problem = "is not an inline shape, and no catalogue of models is installed"
    raise spec_error("", problem, fix="pip install flagcore-models")


def model_from(source: object, *, base: Path, file: str = "") -> Model:
    """Return the model that `source` describes: a path, which may be relative to `base`, or an inline shape.

    The inline shape is plain data, and `file` the file that errors name. Raises SpecError.
    """
    data = plain({"model": str(source) if isinstance(source, Path) else source})
    model: Any = checked(_Holder, data, Context(base=base, file=file)).model
    return model  # type: ignore[no-any-return]


def model_of(source: str | Shape | Mapping[str, Any], context: Context) -> Model:
    """Return the model that `source` describes: a path, a validated inline shape, or keys of a config.json.

    Raises SpecError.
    """
    if isinstance(source, Mapping):
        keys = {key: value for key, value in source.items() if key != "name"}
        return catalogue().of_keys(keys, str(source.get("name", "inline")))
    return model_of_shape(source) if isinstance(source, Shape) else _model_at(source, context.base)


ModelSource = Annotated[
    ModelPath | Shape,
    WrapValidator(
        lambda value, validate: value if isinstance(value, Mapping) and "model_type" in value else validate(value),
        json_schema_input_type=ModelPath | dict[str, Any] | Shape,
    ),
]
"""The type of a key with a path, an inline shape, or keys of a config.json."""
ModelInput = Annotated[ModelSource, rule(model_of)]
"""The same, which validation replaces with a `Model`."""


class _Holder(Section):
    model: ModelInput


def _model_at(source: str, base: Path) -> Model:
    """Return the model at a path or with a public name. Raises SpecError."""
    fix = _("give a directory with a config.json, a GGUF file, the name of a public model, or an inline shape")
    path = base / source
    try:
        if os.path.exists(path):
            return catalogue().read(path)
        if public := catalogue().public_model(source):
            return public
        if near := catalogue().similar_models(source):
            names = " or ".join(near)
            fix = _("did you mean {name}? flag models lists the known names; {fix}", name=names, fix=fix)
        is_path = source.startswith((".", "/", "~")) or source.count("/") > 1
        problem = _("does not exist") if is_path else _("is neither a path nor a model that is known here")
    except OSError as error:
        problem = _("cannot be read ({why})", why=error.strerror)
    raise spec_error("", problem, value=source, fix=fix)


def public_name(name: str) -> str | None:
    """Return the public model `organization/name`, or the one that it is a variant of, or None."""
    try:
        return catalogue().public_name(name) if name.count("/") == 1 else None
    except SpecError:
        return None


def absolute_model(source: str, base: Path) -> str:
    """Return the absolute path of a model, or the name itself of a public model that is not a file or directory."""
    path = base / source
    return source if public_name(source) and not os.path.exists(path) else str(path.resolve())
