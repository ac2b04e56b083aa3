"""Imports a CUDA build of torch on a CPU without NVIDIA's libraries, which are gigabytes.

`python cuda_stubs.py FOLDER_OF_TORCH` compiles one small library in which every CUDA function
returns 0, so that torch counts 0 devices, and puts it under the name of each library that is
missing. A CPU build of torch is left as it is.
"""

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path


def elf(option: str, library: Path) -> str:
    command = ["readelf", "--wide", option, str(library)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def main(folder: Path) -> None:
    missing: set[str] = set()
    versions: dict[str, set[str]] = {}
    for library in folder.glob("lib*.so*"):
        names = re.findall(r"\(NEEDED\).*\[(lib(?:cu|nv|nccl).+)\]", elf("--dynamic", library))
        missing.update(name for name in names if not (folder / name).exists())
        undefined = r" UND ((?:__)?(?:cu|nv|nccl)\w+)(?:@(\S+))?"
        for function, version in re.findall(undefined, elf("--dyn-syms", library)):
            versions.setdefault(version, set()).add(function)
    if not missing:
        return
    with tempfile.TemporaryDirectory() as scratch:
        source, script, stub = (Path(scratch, f"stub.{suffix}") for suffix in ("c", "map", "so"))
        functions = sorted(set().union(*versions.values()))
        source.write_text("".join(f"void *{name}(void) {{ return 0; }}\n" for name in functions))
        versions.pop("", None)
        script.write_text(
            "".join(f"{v} {{ {'; '.join(sorted(n))}; }};\n" for v, n in versions.items())
        )
        command = ["gcc", "-shared", "-fPIC", "-w", f"-Wl,--version-script={script}"]
        subprocess.run([*command, "-o", str(stub), str(source)], check=True)
        for name in missing:
            shutil.copy(stub, folder / name)


if __name__ == "__main__":
    main(Path(sys.argv[1]) / "lib")
