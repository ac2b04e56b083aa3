"""Every optimizer on a second device: the contract, and that a step waits for it once at most.

In a process of its own, since a backend of torch stays registered.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def run(*arguments: str | Path) -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments],
        env={**environment, "ISOKRON_TEST_DEVICE": "npu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


@pytest.mark.usefixtures("second_device")
def test_every_optimizer_keeps_its_contract_there() -> None:
    # no compiler knows the device; its numbers, those of variants too, are compared with the CPU's
    # in the next test
    variants = ("amsgrad", "grafted", "kl", "old", "symmetric", "turns")
    left_out = ("compiles", "small_network", *variants)
    run(HERE / "test_contract.py", "-k", " and ".join(f"not {name}" for name in left_out))


@pytest.mark.usefixtures("second_device")
def test_steps_have_the_numbers_of_the_cpu_and_wait_once() -> None:
    run(HERE / "on_second_device.py")
