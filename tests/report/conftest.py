"""The command line and projects of `tests/cli`, for tests of reports."""

from tests.cli.conftest import answer as answer
from tests.cli.conftest import flag as flag
from tests.cli.conftest import project as project
