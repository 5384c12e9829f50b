from tests.spec.conftest import error_of as error_of
