"""Output where characters are missing: ASCII in place of mojibake or an error."""

import io
import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from isokron.cli import main
from isokron.cli.encoding import spelling

TESTS = Path(__file__).parents[1]
TOY, LETTERS = TESTS / "race" / "toy.py", TESTS / "attribution" / "letters.py"
COMMANDS = [
    f"race --task {TOY}:task --seeds 1 --lr 0.003,0.01 --steps 3 --optimizers sign --out race",
    f"inspect --task {TOY}:task --steps 3 --out inspect",
    f"attribute run --task {LETTERS}:task --steps 3 --query eval:0 --verify",
    "evaluate run --subsets 3 --queries 2 --flipped 0",
    "plan --model gpt2 --ranks 8 --flops 1 --eigh-flops 1 --optimizers adamw,soap",
    "tasks",
]


@pytest.fixture
def plain(tmp_path, monkeypatch):
    """Exit code, stdout and stderr, as bytes, of a call with ASCII streams."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str, encoding: str = "ascii", stdin: str = "") -> tuple[int, bytes, bytes]:
        streams = [io.TextIOWrapper(io.BytesIO(), encoding=encoding) for _ in range(2)]
        monkeypatch.setattr(sys, "stdout", streams[0])
        monkeypatch.setattr(sys, "stderr", streams[1])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        monkeypatch.setattr(sys, "argv", ["isokron", *arguments])
        with pytest.raises(SystemExit) as stopped:
            main()
        for stream in streams:
            stream.flush()
        out, err = (stream.buffer.getvalue() for stream in streams)
        return int(stopped.value.code or 0), out, err

    return call


def test_all_tables_are_printed_in_ascii(plain) -> None:
    for command in COMMANDS:
        code, out, err = plain(*command.split())
        assert code == 0, err
        for text in (out, err):
            assert text.isascii()
            assert b"?" not in text.replace(b"; ? is", b"")
        # rows of a table are equally long, whatever stands for a missing character
        rows = [len(line) for line in out.splitlines() if line.startswith(b"|")]
        assert len(set(rows)) <= 1, out.decode()


def test_json_keeps_characters_that_the_encoding_lacks(plain, tmp_path) -> None:
    text = LETTERS.read_text()
    assert 'title="a < b"' in text
    (tmp_path / "letters.py").write_text(text.replace('title="a < b"', 'title="a ≤ 語"'), "utf-8")
    code, _, err = plain(*["fit", "run", "--task", "letters.py:task", "--steps", "2"])
    assert code == 0, err
    code, out, _ = plain(*["query", "run", "--json", "--top", "1"], stdin="eval:0\n")
    assert code == 0
    assert json.loads(out)["proponents"][0]["text"].startswith("a ≤ 語")
    shown = plain(*["query", "run", "--top", "1"], stdin="eval:0\n")[1]
    assert b"a <= ?" in shown
    # an encoding with some of the characters keeps those
    assert "±".encode("latin-1") in plain(*COMMANDS[3].split(), encoding="latin-1")[1]


def test_characters_are_spelled() -> None:
    assert "".join(map(spelling, "1.5× é d³ – 10 µs ± 2 → 語")) == "1.5x e d^3 - 10 us +/- 2 -> ?"


@pytest.mark.parametrize("plain_by", [{"TERM": "dumb"}, {"LC_ALL": "C"}, {}])
def test_a_plain_terminal_gets_ascii(plain_by, tmp_path) -> None:
    controller, terminal = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "LC_ALL": "C.UTF-8", **plain_by}
    environment.pop("PYTHONIOENCODING", None)
    script = "from isokron.cli.encoding import *; configure_output(); echo('1.5×')"
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=terminal, stderr=terminal, env=environment
    ) as process:
        os.close(terminal)
        text = b""
        try:
            while part := os.read(controller, 1000):
                text += part
        except OSError:  # how Linux ends a terminal
            pass
        os.close(controller)
    assert process.returncode == 0, text
    assert text.decode().strip() == ("1.5x" if plain_by else "1.5×")
