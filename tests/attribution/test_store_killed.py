"""Killed at any moment, on a full disk, by many at once: the same command, the same bytes."""

import errno
import os
import random
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from small_store import begin, build, contents, fill

from isokron.attribution.store import Store

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
LARGER = {"columns": {"fc": 4000}, "examples": 24}  # six shards of 64 kB


def started(work: Callable[[], object]) -> int:
    """A process of its own that does the work: exits with 0, or with 1 after an error."""
    number = os.fork()
    if number == 0:
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    return number


def ended(number: int) -> int:
    """Exit code, or −signal."""
    return os.waitstatus_to_exitcode(os.waitpid(number, 0)[1])


def dying_at(event: int, work: Callable[[], object]) -> Callable[[], object]:
    """The work, with a SIGKILL at the n-th time that a file is opened, renamed, locked, removed."""

    def run() -> object:
        left = event

        def hook(name: str, _arguments: object) -> None:
            nonlocal left
            if name in ("open", "os.rename", "os.remove", "os.mkdir", "fcntl.flock"):
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        return work()

    return run


def test_killed_at_every_step_and_resumed_it_is_the_same_to_the_byte(tmp_path: Path) -> None:
    two = {"examples": 6}  # shards
    build(tmp_path / "straight", **two)
    wanted = contents(tmp_path / "straight")
    for event in range(1, 1000):
        folder = tmp_path / f"killed-{event}"
        code = ended(started(dying_at(event, lambda folder=folder: build(folder, **two))))
        if code == 0:
            break
        assert code == -signal.SIGKILL
        assert ended(started(lambda folder=folder: build(folder, **two))) == 0
        assert contents(folder) == wanted, f"killed at event {event}"
    assert event > 15  # all of it was gone through


def test_killed_again_and_again_it_comes_to_the_same_end(tmp_path: Path) -> None:
    build(tmp_path / "straight", **LARGER)
    wanted, folder = contents(tmp_path / "straight"), tmp_path / "killed"
    event, kills = 1, 0
    while ended(started(dying_at(event, lambda: build(folder, **LARGER)))) != 0:
        kills += 1
        event += 1  # each attempt comes a little further, whatever it finds
    assert kills > 8
    assert contents(folder) == wanted


def test_killed_at_random_times_it_is_the_same_to_the_byte(tmp_path: Path) -> None:
    build(tmp_path / "straight", **LARGER)
    wanted, chance = contents(tmp_path / "straight"), random.Random(0)
    start = time.perf_counter()
    build(tmp_path / "timed", **LARGER)
    taken, killed = time.perf_counter() - start, 0
    for attempt in range(12):
        folder = tmp_path / f"store-{attempt}"
        number = started(lambda folder=folder: build(folder, **LARGER))
        time.sleep(chance.uniform(0, 1.2 * taken))
        os.kill(number, signal.SIGKILL)
        if ended(number) == -signal.SIGKILL:
            killed += 1
        else:
            taken *= 0.5  # it was quicker than the one that was timed
        assert ended(started(lambda folder=folder: build(folder, **LARGER))) == 0
        assert contents(folder) == wanted
    assert killed > 2


def test_finished_shards_are_kept_and_not_written_again(tmp_path: Path) -> None:
    fill(begin(tmp_path), [0, 2])
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("shard-*.safetensors")}
    (tmp_path / ".shard-00001.safetensors.tmp").write_bytes(b"killed while it was written")
    assert begin(tmp_path).missing() == [(1, 4, 8)]
    build(tmp_path)
    after = {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("shard-*.safetensors")}
    assert len(after) == 3
    assert {name: after[name] for name in before} == before


@pytest.mark.parametrize("shared", [False, True], ids=["a share each", "all of it each"])
def test_several_processes_build_one_store(tmp_path: Path, shared: bool) -> None:
    build(tmp_path / "straight", **LARGER)
    folder = tmp_path / "store"

    def work(rank: int) -> None:
        store = begin(folder, **LARGER)
        fill(store, None if shared else range(rank, 6, 4))
        if shared:
            store.finish()

    for _ in range(3):
        numbers = [started(lambda rank=rank: work(rank)) for rank in range(4)]
        assert [ended(number) for number in numbers] == [0] * 4
        if not shared:
            begin(folder, **LARGER).finish()
        assert contents(folder) == contents(tmp_path / "straight")
        for path in folder.iterdir():
            path.unlink()


def test_several_processes_some_of_them_killed(tmp_path: Path) -> None:
    build(tmp_path / "straight", **LARGER)
    folder, chance = tmp_path / "store", random.Random(1)
    for _ in range(3):
        for _ in range(3):
            numbers = [started(lambda: build(folder, **LARGER)) for _ in range(3)]
            time.sleep(chance.uniform(0, 0.03))
            for number in numbers:
                os.kill(number, signal.SIGKILL)
                ended(number)
        assert ended(started(lambda: build(folder, **LARGER))) == 0
        assert contents(folder) == contents(tmp_path / "straight")
        for path in folder.iterdir():
            path.unlink()


def test_a_full_disk_is_one_clear_line_and_finished_shards_stay(tmp_path: Path) -> None:
    folder, said = tmp_path / "store", tmp_path / "said"
    sizes = {"columns": {"fc": 4000}, "examples": 9}
    extra = [1, 9000, 1]  # the second shard is larger than a file may be

    def work() -> None:
        store = begin(folder, **sizes)
        for number, first, last in store.missing():
            names = ["x" * extra[number] for _ in range(first, last)]
            store.write(number, torch.ones(last - first, 4000), names, {})
        store.finish()

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        try:
            work()
        except OSError as error:
            said.write_text(str(error))
            raise

    assert ended(started(limited)) == 1
    message = said.read_text()
    path = folder / "shard-00001.safetensors"
    assert message.startswith(
        f"[Errno {errno.EFBIG}] could not write {str(path)!r}: File too large; "
    )
    assert "MB are free there; free some space" in message
    assert "run the same command again" in message
    assert "\n" not in message
    assert sorted(contents(folder)) == ["schema.json", "shard-00000.safetensors"]
    before = (folder / "shard-00000.safetensors").stat().st_mtime_ns
    assert ended(started(work)) == 0
    assert (folder / "shard-00000.safetensors").stat().st_mtime_ns == before
    assert len(Store.open(folder, verify=True)) == 9


def test_a_file_in_the_place_of_the_folder_is_told(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("a file")
    with pytest.raises(FileExistsError, match=r"File exists: '.*store'"):
        begin(tmp_path / "store")


def test_what_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / ".schema.json.tmp").mkdir()
    wrong = r"could not write '.*/schema.json': Is a directory; make its"
    with pytest.raises(IsADirectoryError, match=wrong) as caught:
        begin(tmp_path)
    assert caught.value.errno == errno.EISDIR
