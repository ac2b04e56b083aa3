"""Python processes for tests that start in milliseconds: forked from one with the heavy imports.

Each is a process of its own, to be killed or interrupted as any other, and it does with its
arguments what `python` does with them: `-m module`, `-c code` or a script. isokron is not among
what it has imported.
"""

import atexit
import contextlib
import gc
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

SECONDS = 120.0
TORCH = ("torch", "torch._dynamo")  # every optimizer's constructor imports the latter


class Process:
    """A running one. Its output goes to files, so that it never waits for a reader."""

    def __init__(self, server: "Server", arguments: list[str], folder: Path) -> None:
        self._server, self._code = server, None
        self._output = Path(tempfile.mkdtemp(dir=server.folder))
        for stream in "12":
            (self._output / stream).touch()
        self.pid = server.ask(
            {"arguments": arguments, "folder": str(folder), "output": str(self._output)}
        )

    @property
    def out(self) -> str:
        return (self._output / "1").read_text()

    @property
    def err(self) -> str:
        return (self._output / "2").read_text()

    def poll(self) -> int | None:
        """The exit code, −signal of one that was killed, or None of one that still runs."""
        if self._code is None:
            self._code = self._server.ask({"ended": self.pid})
        return self._code

    def kill(self, how: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, how)  # one that has just ended keeps its number until it is asked

    def wait(self, seconds: float = SECONDS) -> int:
        end = time.monotonic() + seconds
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                os.kill(self.pid, signal.SIGKILL)
                raise TimeoutError(f"not ended within {seconds} s; it wrote: {self.err}")
            time.sleep(0.005)
        return code


class Server:
    def __init__(self, process: "subprocess.Popen[str]", folder: Path) -> None:
        self.folder = folder
        assert process.stdin is not None
        assert process.stdout is not None
        self._asked, self._answers = process.stdin, process.stdout

    def ask(self, question: dict[str, Any]) -> Any:
        print(json.dumps(question), file=self._asked, flush=True)
        return json.loads(self._answers.readline())

    def start(self, *arguments: object, folder: Path) -> Process:
        return Process(self, [str(each) for each in arguments], folder)

    def run(self, *arguments: object, folder: Path) -> Process:
        """The same, once it has ended well."""
        process = self.start(*arguments, folder=folder)
        assert process.wait() == 0, process.err
        return process


@contextlib.contextmanager
def server(folder: Path, modules: tuple[str, ...] = TORCH, **environment: str) -> Iterator[Server]:
    """Ends, and what it has started is killed, with the block."""
    with subprocess.Popen(
        [sys.executable, __file__, *modules],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    ) as process:
        yield Server(process, folder)  # on leaving, the end of its input tells it to end


def serve(questions: TextIO, answers: TextIO) -> dict[str, Any] | None:
    """Answer until there are no questions; in a child, what it is asked to be."""
    running = set()
    for line in questions:
        question = json.loads(line)
        if "ended" in question:
            number, status = os.waitpid(question["ended"], os.WNOHANG)
            running.discard(number)
            answer = os.waitstatus_to_exitcode(status) if number else None
        elif (answer := os.fork()) == 0:
            return question
        else:
            running.add(answer)
        print(json.dumps(answer), file=answers, flush=True)
    for number in running:
        os.kill(number, signal.SIGKILL)
        os.waitpid(number, 0)
    return None


def ended_with(**asked: Any) -> int:
    """The exit code, once its errors are printed as the interpreter does."""
    try:
        become(**asked)
    except SystemExit as stopped:
        if isinstance(stopped.code, str):
            print(stopped.code, file=sys.stderr)
        return stopped.code if isinstance(stopped.code, int) else int(stopped.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def finish(code: int) -> None:
    """End without taking thousands of inherited modules apart, which takes seconds."""
    threading._shutdown()  # waits for threads
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def become(arguments: list[str], folder: str, output: str) -> None:
    """What `python *arguments` is, in this folder, with its output in files 1 and 2."""
    for stream in (1, 2):
        file = os.open(f"{output}/{stream}", os.O_WRONLY | os.O_APPEND)
        os.dup2(file, stream)
        os.close(file)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.chdir(folder)
    what, *rest = arguments
    if what == "-m":
        sys.path[0], sys.argv = folder, rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif what == "-c":
        sys.path[0], sys.argv = "", ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.path[0], sys.argv = str(Path(folder, what).parent), arguments
        runpy.run_path(what, run_name="__main__")


if __name__ == "__main__":
    for name in sys.argv[1:]:
        with contextlib.suppress(ImportError):  # which is for those to tell that need it
            __import__(name)
    gc.freeze()
    with os.fdopen(os.dup(0)) as questions, os.fdopen(os.dup(1), "w") as answers:
        asked = serve(questions, answers)
    if asked is not None:
        finish(ended_with(**asked))
