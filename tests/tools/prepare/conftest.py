"""Fixtures of the data that are prepared."""

from tests.data.conftest import make_config as make_config
from tests.data.conftest import make_folder as make_folder
