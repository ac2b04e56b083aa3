"""The command line within this process."""

import sys

import pytest

from isokron.cli import main


@pytest.fixture
def inside(tmp_path, monkeypatch, capsys):
    """The same call within this process, which has torch loaded: exit code and stderr."""

    def call(*arguments):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["isokron", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as stopped:
            main()
        return stopped.value.code, capsys.readouterr().err

    return call
