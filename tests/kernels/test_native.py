"""Code that is compiled on first use: whatever goes wrong, the bits are torch's."""

import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import isokron
from isokron.kernels import adamw_native, native, status
from isokron.kernels.adamw_native import NATIVE
from isokron.kernels.native import Native

# Train beside torch on lengths with every remainder, some large enough for several threads.
SHAPES = [(n,) for n in range(1, 40)] + [(70000 + n,) for n in range(3)] + [(64, 48)]


def assert_steps_are_torchs() -> None:
    values = [torch.randn(shape) for shape in SHAPES]
    mine, theirs = ([nn.Parameter(value.clone()) for value in values] for _ in range(2))
    ours = isokron.AdamW(mine, lr=0.1, amsgrad=True)
    reference = torch.optim.AdamW(theirs, lr=0.1, amsgrad=True, fused=True)
    for _ in range(3):
        for a, b in zip(mine, theirs, strict=True):
            a.grad = torch.randn(a.shape)
            b.grad = a.grad.clone()
        ours.step()
        reference.step()
    assert all(map(torch.equal, mine, theirs))


ABLE = NATIVE.status()[0] == "native"
needs_native = pytest.mark.skipif(not ABLE, reason=f"no native code: {NATIVE.status()[1]}")


Run = Callable[..., str]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Build as a fresh process would, check the bits of some steps, and tell path and reason."""

    def fresh(cache: Path, **environment: str) -> str:
        monkeypatch.setenv("ISOKRON_CACHE", str(cache))
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(adamw_native, "NATIVE", Native("adamw.c", NATIVE.check, NATIVE.defines))
        assert_steps_are_torchs()
        return ": ".join(status())

    return fresh


def started(cache: Path, **environment: str) -> subprocess.Popen[str]:
    code = """
from isokron.kernels import status
from test_native import assert_steps_are_torchs

assert_steps_are_torchs()
print(*status(), sep=": ")
"""
    here = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "ISOKRON_CACHE": str(cache), "PYTHONPATH": here, **environment},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def told(process: subprocess.Popen[str]) -> str:
    """What it printed, after equal bits: path and reason."""
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return out.strip()


def executable(path: Path, text: str) -> str:
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def kept(cache: Path) -> list[str]:
    return sorted(path.suffix for path in cache.iterdir())


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"), reason="not checked there"
)
def test_where_there_is_a_compiler_the_native_code_is_used() -> None:
    if "no C compiler" not in status()[1]:
        assert status()[0] == "native", status()[1]


@needs_native
def test_built_once_and_found_again(tmp_path: Path, run: Run) -> None:
    assert run(tmp_path).startswith("native: compiled by")
    (built,) = tmp_path.iterdir()
    before = built.stat()
    assert run(tmp_path).startswith("native: compiled by")
    assert [*tmp_path.iterdir()] == [built]
    assert built.stat().st_mtime_ns == before.st_mtime_ns


@needs_native
def test_processes_that_build_at_once_do_not_disturb_each_other(tmp_path: Path) -> None:
    processes = [started(tmp_path, OMP_NUM_THREADS=threads) for threads in ("1", "2")]
    assert all(told(process).startswith("native") for process in processes)
    assert kept(tmp_path) == [".so"]


@needs_native
@pytest.mark.parametrize("damage", ["cut", "empty", "text", "changed"])
def test_a_damaged_file_in_the_cache_is_built_anew(tmp_path: Path, damage: str, run: Run) -> None:
    run(tmp_path)
    (built,) = tmp_path.iterdir()
    code = built.read_bytes()
    flipped = bytes([code[5000] ^ 255])
    damaged = {
        "cut": code[: len(code) // 2],
        "empty": b"",
        "text": b"not code at all, but longer than a digest",
        "changed": code[:5000] + flipped + code[5001:],
    }
    built.unlink()  # this process has loaded it
    built.write_bytes(damaged[damage])
    assert run(tmp_path).startswith("native")
    assert native._whole(built)


@needs_native
def test_a_cache_that_cannot_be_written_is_done_without(tmp_path: Path, run: Run) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_text("")
    answer = run(in_the_way / "cache")
    assert answer.startswith("native")
    assert str(tmp_path) not in answer


def test_a_directory_nobody_may_write_to_is_done_without(tmp_path: Path, run: Run) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    cache.chmod(0o500)
    run(cache)  # root may write all the same; the bits are right either way


@needs_native
def test_without_a_place_for_any_file_torch_steps(tmp_path: Path, run: Run) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_text("")
    nowhere = executable(tmp_path / "cc", "#!/bin/sh\necho compiler 1\nexit 0\n")
    assert run(in_the_way / "cache", CC=nowhere).startswith("torch: ")


def test_a_compiler_that_fails_leaves_it_to_torch(tmp_path: Path, run: Run) -> None:
    assert run(tmp_path, CC="/bin/false").startswith("torch: /bin/false")
    compiler = executable(
        tmp_path / "cc",
        '#!/bin/sh\n[ "$1" = --version ] && echo 1 && exit 0\necho no >&2\nexit 1\n',
    )
    cache = tmp_path / "cache"
    assert run(cache, CC=compiler) == f"torch: {compiler} failed: no"
    assert not cache.exists()


def test_a_compiler_that_is_not_there_leaves_it_to_torch(tmp_path: Path, run: Run) -> None:
    assert "cannot be run" in run(tmp_path, CC="/nonexistent/cc")
    assert run(tmp_path, CC="", PATH="/nonexistent").startswith("torch: no C")


def test_a_compiler_that_hangs_is_given_up(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = executable(tmp_path / "cc", "#!/bin/sh\nexec sleep 100\n")
    monkeypatch.setattr(native, "TIMEOUT", 0.5)
    answer = run(tmp_path / "cache", CC=compiler)
    assert answer == f"torch: {compiler} took longer than 0.5 seconds"


def test_a_compiler_that_writes_nonsense_leaves_it_to_torch(tmp_path: Path, run: Run) -> None:
    compiler = executable(
        tmp_path / "cc",
        '#!/bin/sh\nfor last; do :; done\n[ "$1" = --version ] && echo 1 || echo no > "$last"\n',
    )
    assert run(tmp_path / "cache", CC=compiler).startswith("torch: ")


@needs_native
@pytest.mark.parametrize("flag", ["-DFUSED=0", "-DWIDTH=32", "-ffp-contract=fast"])
def test_code_with_other_bits_is_noticed_and_not_used(tmp_path: Path, flag: str, run: Run) -> None:
    name = flag[2:].split("=")[0]
    undone = f"-U{name} {flag}" if flag.startswith("-D") else flag
    compiler = executable(tmp_path / "cc", f'#!/bin/sh\nexec cc "$@" {undone}\n')
    answer = run(tmp_path / "cache", CC=compiler)
    if flag.startswith("-D"):
        assert answer.startswith("torch: compiled, but its bits are not torch's")


def test_it_can_be_switched_off(tmp_path: Path, run: Run) -> None:
    answer = run(tmp_path, ISOKRON_NATIVE="0")
    assert answer == "torch: switched off by ISOKRON_NATIVE=0"
    assert kept(tmp_path) == []


def lines_of(code: str, cache: Path, **environment: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "ISOKRON_CACHE": str(cache), **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_nothing_is_built_before_the_first_step(tmp_path: Path) -> None:
    code = "import torch, isokron; isokron.AdamW([torch.nn.Parameter(torch.ones(3))])"
    lines_of(code, tmp_path)
    assert kept(tmp_path) == []


@needs_native
def test_building_draws_no_random_numbers(tmp_path: Path) -> None:
    code = (
        "import torch; from isokron.kernels import status; before = torch.get_rng_state()\n"
        "status(); print(torch.equal(before, torch.get_rng_state()))"
    )
    assert lines_of(code, tmp_path) == ["True"]


@needs_native
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
def test_no_second_openmp_runtime_and_no_second_pool_of_threads(tmp_path: Path) -> None:
    code = """
import os, torch
from torch import nn
import isokron

torch.ones(1 << 20).add_(1)
before = len(os.listdir("/proc/self/task"))
param = nn.Parameter(torch.ones(1 << 18))
param.grad = torch.ones(1 << 18)
isokron.AdamW([param]).step()
maps = open("/proc/self/maps").read().split()
print(len(os.listdir("/proc/self/task")) - before, len({m for m in maps if "gomp" in m}))
"""
    assert lines_of(code, tmp_path, OMP_NUM_THREADS="2") == ["0", "1"]


def test_torchs_number_of_threads_is_left_as_it_was(tmp_path: Path) -> None:
    code = """
import torch
from torch import nn
import isokron

params = [nn.Parameter(torch.ones(n)) for n in (7, 64, 100000)]
for param in params:
    param.grad = torch.ones_like(param)
isokron.AdamW(params).step()
print(torch.get_num_threads())
"""
    for off in "01":
        assert lines_of(code, tmp_path, OMP_NUM_THREADS="2", ISOKRON_NATIVE=off) == ["2"]


@needs_native
def test_a_forked_child_may_build_and_step(tmp_path: Path) -> None:
    code = """
import os, torch
from torch import nn
import isokron

def step():
    param = nn.Parameter(torch.ones(100))
    param.grad = torch.ones(100)
    isokron.AdamW([param]).step()
    return float(param.detach().sum())

def child():
    pid = os.fork()
    if pid == 0:
        step()
        os._exit(0)
    return os.waitpid(pid, 0)[1]

print(child(), step() < 100, child())
"""
    assert lines_of(code, tmp_path) == ["0", "True", "0"]


@needs_native
def test_arguments_of_a_compiler_make_other_code(tmp_path: Path, run: Run) -> None:
    assert run(tmp_path, CC="cc").startswith("native")
    assert run(tmp_path, CC="cc -DNOTHING=1").startswith("native")
    assert len(kept(tmp_path)) == 2


@needs_native
def test_a_full_disk_is_replaced_by_a_temporary_directory(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep = native._keep

    def full(code: bytes, path: Path) -> None:
        if path.parent == tmp_path:
            raise OSError(28, "No space left on device")
        keep(code, path)

    monkeypatch.setattr(native, "_keep", full)
    assert run(tmp_path).startswith("native")
    assert kept(tmp_path) == []


@needs_native
def test_a_user_without_a_home_has_a_temporary_directory(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(native.Path, "home", homeless)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert run(Path(), ISOKRON_CACHE="").startswith("native")


def test_a_relative_cache_is_one_of_this_directory(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(Path()) == run(Path())
    assert len(kept(tmp_path)) == int(ABLE)
