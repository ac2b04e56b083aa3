"""What every test may use."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # cases.py, by name, from every folder


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
