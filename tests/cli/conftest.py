"""The command line within this process, and in processes that start quickly."""

import io
import subprocess
import sys

import pytest

import forked
from isokron.cli import main


@pytest.fixture
def called(tmp_path, monkeypatch, capsys):
    """The same call within this process, which has torch loaded."""

    def call(*arguments, stdin=""):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["isokron", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        capsys.readouterr()
        with pytest.raises(SystemExit) as stopped:
            main()
        return subprocess.CompletedProcess(sys.argv, stopped.value.code, *capsys.readouterr())

    return call


@pytest.fixture
def inside(called):
    """Exit code and stderr of a call within this process."""

    def call(*arguments):
        done = called(*arguments)
        return done.returncode, done.stderr

    return call


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    """Starts processes of their own, which have torch loaded."""
    with forked.server(tmp_path_factory.mktemp("processes")) as server:
        yield server
