from tests.plugins.conftest import install as install
