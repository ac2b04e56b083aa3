"""When Triton kernels are used, and the reasons reported when they are not."""

import sys

import pytest
import torch

from isokron.kernels import verify


@pytest.fixture(autouse=True)
def forget() -> None:
    verify.verified.cache_clear()


@pytest.mark.parametrize("name", verify.CHECKS)
def test_on_the_cpu_nothing_is_launched(name: str) -> None:
    assert verify.verified(name, torch.device("cpu")) == (False, "no CUDA device")


def test_without_triton_torch_does_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)  # importing it raises
    usable, why = verify.verified("adamw", torch.device("cuda"))
    assert not usable
    assert "not installed" in why


def test_a_variable_switches_the_kernels_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ISOKRON_TRITON", "0")
    assert verify.verified("adamw", torch.device("cuda")) == (
        False,
        "switched off by ISOKRON_TRITON=0",
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_cannot_be_used_is_a_reason_and_no_error() -> None:
    pytest.importorskip("triton")
    usable, why = verify.verified("symmetric", torch.device("cuda"))
    assert not usable
    assert why
