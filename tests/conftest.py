"""What every test shares."""

import random

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

from gradflow_export import exporter, reports

# Small models wait for each other's threads where other work shares the cores; bits do not depend on the machine either.
torch.set_num_threads(1)

# The same examples everywhere and always, however slow the machine is: a failure is one of the code, and comes again.
settings.register_profile(
    "same", derandomize=True, database=None, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("same")

# How long the end of a run waits for its worker: on a slow machine with other work a test's steps may take long.
exporter.CLOSE_SECONDS = reports.CLOSE_SECONDS = 100.0


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Begin every test with the same random numbers, whatever ran before it in its process."""
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - what numpy's global generator gives is what has to be the same
    torch.manual_seed(0)
