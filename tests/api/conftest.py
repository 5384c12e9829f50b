from tests.cli.conftest import with_toy as with_toy
