"""What every test may use."""

import os
import signal
import sys
from pathlib import Path

import pytest

from isokron.bfloat16 import bfloat16_environment

# Before torch is imported: on some machines a bfloat16 product would end the tests.
# Workers of pytest-xdist inherit what the first process has found.
if "PYTEST_XDIST_WORKER" not in os.environ:
    os.environ |= bfloat16_environment()

import torch

torch.set_num_threads(1)  # tiny tensors: a second thread only waits, and longer on a busy machine
sys.path.insert(0, str(Path(__file__).parent))  # cases.py and naive.py, by name
# a shell makes what it runs in the background ignore it, and so would all that tests start
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def second_device() -> None:
    """For tests whose process of its own imports second_device.py."""
    from torch.utils import backend_registration

    if not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"):
        pytest.skip(f"torch {torch.__version__} has no backend in Python")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
