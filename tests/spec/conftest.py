from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flagcore.domain.spec import Spec
from flagcore.errors import SpecError
from flagcore.spec.convert import parse_spec
from flagcore.spec.plain_data import spec_as_data
from tests.tasks import ENGINES

MODEL = "model: {num_layers: 4, hidden_size: 64, ffn_hidden_size: 128, num_attention_heads: 4, vocab_size: 1000}\n"
TRAIN = "train: {engine: toy, seq_length: 128, global_batch_size: 8, precision: bf16}\n"


def read_spec(path: Path) -> Spec:
    """Read a spec file. Paths in it are relative to its folder."""
    return parse_spec(spec_as_data(path), file=str(path), base=path.parent, engines=ENGINES)


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., Spec]:
    """Read a spec of a small model and job, and what is given."""

    def write_and_read(more: str = "", *, model: str = MODEL, train: str = TRAIN) -> Spec:
        path = tmp_path / "spec.yaml"
        path.write_text(model + train + more)
        return read_spec(path)

    return write_and_read


@pytest.fixture
def error_of() -> Callable[..., SpecError]:
    """Call a function that must refuse and return its error: one short line a problem, with no exception behind it."""

    def call(function: Callable[..., object], *args: Any, **kwargs: Any) -> SpecError:
        with pytest.raises(SpecError) as caught:
            function(*args, **kwargs)
        for problem in caught.value.problems:
            assert "\n" not in str(problem)
            assert len(str(problem)) < 800
        assert type(caught.value.__context__).__module__ == "builtins"
        return caught.value

    return call


@pytest.fixture
def read_error(read: Callable[..., Spec], error_of: Callable[..., SpecError]) -> Callable[..., SpecError]:
    """Read like `read` and return the error."""
    return lambda *args, **kwargs: error_of(read, *args, **kwargs)
