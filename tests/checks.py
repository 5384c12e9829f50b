"""What tests of all packages check: that a key of a spec is refused, and that there is a value."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import pytest

from flagcore.errors import SpecError

Value = TypeVar("Value")


@contextmanager
def refuses(key: str, *value: object, match: str | None = None) -> Iterator[pytest.ExceptionInfo[SpecError]]:
    """Assert that a key is refused, with this value if one is given."""
    with pytest.raises(SpecError, match=match) as error:
        yield error
    assert (error.value.key, *[error.value.value for _ in value]) == (key, *value)


def given(value: Value | None) -> Value:
    """Return a value that must not be None."""
    assert value is not None
    return value
