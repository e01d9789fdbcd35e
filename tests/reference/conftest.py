"""Loads the slow twins."""

import importlib.util
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def twin():
    """Return the module of slow twins."""
    spec = importlib.util.spec_from_file_location("gradflow_test_twins", Path(__file__).with_name("twins.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
