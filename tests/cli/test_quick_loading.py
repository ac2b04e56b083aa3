"""Garbage is collected again when packages have been loaded."""

import gc

import pytest

from isokron.cli.loading import loading


def test_collection_is_off_within_and_on_after_it_even_when_loading_fails() -> None:
    def fail() -> None:
        with loading():
            with loading():
                assert not gc.isenabled()
            assert not gc.isenabled()
            raise ImportError

    assert gc.isenabled()
    with pytest.raises(ImportError):
        fail()
    assert gc.isenabled()
