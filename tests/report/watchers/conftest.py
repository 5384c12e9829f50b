"""A project and the command line."""

from tests.cli.conftest import flag, project

__all__ = ["flag", "project"]
