"""What every test may use."""

import sys
from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)  # tiny tensors: a second thread only waits, and longer on a busy machine
sys.path.insert(0, str(Path(__file__).parent))  # cases.py and naive.py, by name


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
