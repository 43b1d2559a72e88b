import pytest

from tests.integration.commands import Command


@pytest.fixture(scope="session")
def command(data_dir, compilation_cache):
    return Command(data_dir, compilation_cache)
