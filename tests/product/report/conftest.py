"""The command line and projects of `tests/product/cli`, for tests of reports."""

from tests.product.cli.conftest import answer as answer
from tests.product.cli.conftest import flag as flag
from tests.product.cli.conftest import project as project
