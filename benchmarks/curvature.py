"""K-FAC and EK-FAC of an MLP and a GPT: isokron against kronfluence and curvlinops.

    python benchmarks/curvature.py [--model mlp,gpt] [--method kfac,ekfac] [--rounds 3] [--only ...]

All fit the same linear layers (weight and bias as one) of the same model to the same batches: the
empirical Fisher, one term a position (expand), in float32, eigendecompositions too. Every
contestant is a process of its own; they take turns, after one run each that is not timed (where
it takes 20 s it is the one that counts). "MB" is the peak of that process above what it held once
all was imported and the model built. Ratios are to the better of the two peers. Every result is
compared, in one convention, with the definition worked out in float64. "forward+backward" is one
pass over the data for plain gradients: K-FAC needs one such pass, EK-FAC two, the second in the
eigenbases of the first.
"""

import argparse
import gc
import importlib
import importlib.metadata
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from optimizers import peak_gemm
from records import recorded
from timing import conditions
from torch import Tensor, nn

# layer → {"input": A, "output": G} or {"eigenvalues": Λ}, with
# A = (1/NS) Σ āāᵀ, G = (1/M) Σ g̃g̃ᵀ, Λ = (1/M) Σ_n (Q_Gᵀ (Σ_s g̃āᵀ) Q_A)²;
# ā an input with its 1 for the bias, g̃ the gradient of one of the M loss terms
Factors: TypeAlias = dict[str, dict[str, Tensor]]
Batches: TypeAlias = list[tuple[Tensor, Tensor]]
PEERS = {"kronfluence": "kronfluence", "curvlinops": "curvlinops-for-pytorch"}
YARDSTICK, DEFINITION = "forward+backward", "definition"
LONG = 20.0  # seconds


class Block(nn.Module):
    """x + attention(x), then x + perceptron(x), each of the normalised x: [N, S, width]."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_perceptron = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.before_attention(x)).unflatten(-1, (3, self.heads, -1))
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # [3, N, heads, S, width / heads]
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.mix(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.before_perceptron(x))))


class GPT(nn.Module):
    def __init__(self, vocabulary: int, positions: int, width: int, heads: int, depth: int) -> None:
        super().__init__()
        self.tokens, self.positions = (
            nn.Embedding(vocabulary, width),
            nn.Embedding(positions, width),
        )
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))  # [N, S, vocabulary]


@dataclass(frozen=True)
class Case:
    """layers: the names of those to fit. examples: N. shared: S, the loss terms of an example."""

    model: nn.Module
    batches: Batches
    layers: list[str]
    examples: int
    shared: int

    @property
    def terms(self) -> int:
        return self.examples * self.shared

    def shapes(self) -> list[tuple[int, int]]:
        """Outputs and inputs of every layer, the bias among the inputs."""
        layers = map(self.model.get_submodule, self.layers)
        linear = [layer for layer in layers if isinstance(layer, nn.Linear)]
        return [(each.out_features, each.in_features + (each.bias is not None)) for each in linear]


def build(name: str) -> Case:
    """Random weights and data, the same in every process."""
    torch.manual_seed(0)
    if name == "mlp":
        layers = [nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU()]
        model: nn.Module = nn.Sequential(*layers, nn.Linear(512, 10))
        inputs, targets, batch = torch.randn(2000, 784), torch.randint(10, (2000,)), 250
    else:
        model = GPT(vocabulary=2000, positions=64, width=128, heads=4, depth=4)
        inputs, targets = torch.randint(2000, (2, 256, 64))
        batch = 16
    names = [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]
    batches = list(zip(inputs.split(batch), targets.split(batch), strict=True))
    return Case(model, batches, names, len(targets), targets[0].numel())


def package(name: str) -> ModuleType:
    """Imported when first asked for, so that a missing peer costs only its own rows."""
    return importlib.import_module(name)


def loss(model: nn.Module, inputs: Tensor, targets: Tensor, reduction: str = "sum") -> Tensor:
    logits = model(inputs).flatten(0, -2)
    return F.cross_entropy(logits, targets.flatten(), reduction=reduction)


# A contestant: what is timed, and how its result reads in the convention of Factors.
Run: TypeAlias = Callable[[], Any]
Contestant: TypeAlias = tuple[Run, Callable[[Any], Factors]]


def isokron(case: Case, method: str) -> Contestant:
    curvature = package("isokron.curvature")

    def run() -> Any:
        return curvature.fit(
            case.model,
            case.batches,
            curvature.CrossEntropy(),
            method=method,
            fisher="empirical",
            sharing="expand",
            layers=case.layers,
            dtype=torch.float32,
        )

    def read(fitted: Any) -> Factors:
        # the convention is its own; every statistic has a leading dimension of blocks, here one
        wanted = ["eigenvalues"] if method == "ekfac" else ["input", "output"]
        return {
            layer: {side: fitted.layers[layer].statistics[side].squeeze(0) for side in wanted}
            for layer in case.layers
        }

    return run, read


def kronfluence(case: Case, method: str) -> Contestant:
    """Its three stages themselves: its Analyzer would write each result to disk and read it back.

    It wraps the layers once, here, and freezes the weights: its backward passes make no gradients
    of them. Its eigendecompositions would be in float64 by default.
    """
    covariance, eigen = (
        package("kronfluence.factor.covariance"),
        package("kronfluence.factor.eigen"),
    )
    base: Any = package("kronfluence.task").Task
    arguments = package("kronfluence.arguments").FactorArguments(
        strategy=method,
        use_empirical_fisher=True,
        eigendecomposition_dtype=torch.float32,
    )

    class Task(base):
        def compute_train_loss(self, batch: Any, model: nn.Module, sample: bool = False) -> Tensor:
            return loss(model, *batch)

        def compute_measurement(self, batch: Any, model: nn.Module) -> Tensor:
            raise NotImplementedError

        def get_influence_tracked_modules(self) -> list[str]:
            return case.layers

    task = Task()
    settings: dict[str, Any] = {
        "model": package("kronfluence.analyzer").prepare_model(case.model, task),
        "state": package("kronfluence.utils.state").State(cpu=True),
        "factor_args": arguments,
        "disable_tqdm": True,
    }
    data = {"task": task, "loader": case.batches}

    def run() -> Any:
        _, fitted = covariance.fit_covariance_matrices_with_loader(**settings, **data)
        if method == "kfac":
            return fitted
        bases = eigen.perform_eigendecomposition(fitted, **settings)
        _, corrected = eigen.fit_lambda_matrices_with_loader(
            **settings, **data, eigen_factors=bases
        )
        return {**fitted, **bases, **corrected}

    def read(fitted: Any) -> Factors:
        if method == "ekfac":
            # a sum over examples, which it divides by their number N where it is used; ours is a
            # mean over the M = NS loss terms: S times less
            lambdas = fitted["lambda_matrix"]
            return {layer: {"eigenvalues": lambdas[layer] / case.terms} for layer in case.layers}
        # sums too, and their counts beside them: positions seen, which are NS and here M. With
        # the loss summed the hooks see g̃ itself.
        read = {"input": "activation", "output": "gradient"}
        return {
            layer: {
                side: fitted[f"{its}_covariance"][layer]
                / fitted[f"num_{its}_covariance_processed"][layer]
                for side, its in read.items()
            }
            for layer in case.layers
        }

    return run, read


class Flat(nn.Module):
    """Logits [N·S, C]: curvlinops has the classes second, and its EK-FAC takes matrices only.

    Its hooks are on the layers, whose outputs stay [N, S, o], so that it still sees S.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor) -> Tensor:
        return self.model(inputs).flatten(0, -2)


def curvlinops(case: Case, method: str) -> Contestant:
    """The checks and the passes to count the data are off; its backward passes need weights."""
    library = package("curvlinops")
    operator = {"kfac": library.KFACLinearOperator, "ekfac": library.EKFACLinearOperator}[method]
    params = [p for layer in case.layers for p in case.model.get_submodule(layer).parameters()]
    batches = [(inputs, targets.flatten()) for inputs, targets in case.batches]

    def run() -> Any:
        fitted = operator(
            Flat(case.model),
            nn.CrossEntropyLoss(),
            params,
            batches,
            check_deterministic=False,
            fisher_type="empirical",
            kfac_approx="expand",
            num_per_example_loss_terms=case.shared,
            separate_weight_and_bias=False,
            num_data=case.examples,
        )
        fitted.compute_kronecker_factors()
        if method == "ekfac":
            fitted.compute_eigenvalue_correction()
        return fitted

    def read(fitted: Any) -> Factors:
        # Told S and given the mean loss, it has our convention: the hooks see g̃/M_b, and G and Λ
        # are multiplied by M_b²/(NS); A is divided by NS. Of a summed loss G and Λ would be sums.
        sides = {"input": fitted._input_covariances, "output": fitted._gradient_covariances}
        if method == "ekfac":  # the factors are gone, their eigenvectors left
            sides = {"eigenvalues": fitted._corrected_eigenvalues}
        named = {
            layer: {s: of[f"model.{layer}"] for s, of in sides.items()} for layer in case.layers
        }
        # without a bias the eigenvalues are listed by parameter
        return {
            layer: {s: next(iter(v.values())) if isinstance(v, dict) else v for s, v in of.items()}
            for layer, of in named.items()
        }

    return run, read


def forward_backward(case: Case, method: str) -> Contestant:
    """One pass over the data, gradients of all weights: what no method can do without."""

    def run() -> None:
        for inputs, targets in case.batches:
            case.model.zero_grad()
            loss(case.model, inputs, targets, "mean").backward()

    return run, lambda _: {}


Visit: TypeAlias = Callable[[str, Tensor, Tensor], None]


@contextmanager
def visiting(case: Case, visit: Visit) -> Iterator[None]:
    """In every backward pass give each layer's ā [N, S, i] and g̃ [N, S, o]."""

    def watch(name: str, module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        given = inputs[0].detach().flatten(1, -2) if output.ndim > 2 else inputs[0][:, None]
        if module.bias is not None:
            given = F.pad(given.detach(), (0, 1), value=1.0)
        output.register_hook(lambda grad: visit(name, given, grad.reshape(*given.shape[:2], -1)))

    modules = {name: case.model.get_submodule(name) for name in case.layers}
    hooks = [each.register_forward_hook(partial(watch, name)) for name, each in modules.items()]
    yield
    for hook in hooks:
        hook.remove()


def definition(case: Case, method: str) -> Contestant:
    """The equations of Factors term by term in float64, whatever they cost."""

    def sums(visit: Visit) -> None:
        with visiting(case, visit):
            for inputs, targets in case.batches:
                inputs = inputs.double() if inputs.is_floating_point() else inputs
                loss(case.model, inputs, targets).backward()

    def run() -> Factors:
        case.model.double()
        found: Factors = {
            name: {"input": torch.zeros(i, i).double(), "output": torch.zeros(o, o).double()}
            for name, (o, i) in zip(case.layers, case.shapes(), strict=True)
        }

        def covariances(name: str, given: Tensor, grad: Tensor) -> None:
            for side, rows in (("input", given.flatten(0, 1)), ("output", grad.flatten(0, 1))):
                found[name][side] += rows.T @ rows / case.terms

        sums(covariances)
        if method == "kfac":
            return found
        bases = {
            name: {side: torch.linalg.eigh(factor).eigenvectors for side, factor in sides.items()}
            for name, sides in found.items()
        }
        corrected: Factors = {
            name: {"eigenvalues": torch.zeros(o, i).double()}
            for name, (o, i) in zip(case.layers, case.shapes(), strict=True)
        }

        def squares(name: str, given: Tensor, grad: Tensor) -> None:
            rotated = (grad @ bases[name]["output"]).mT @ (given @ bases[name]["input"])
            corrected[name]["eigenvalues"] += rotated.square().sum(0) / case.terms

        sums(squares)
        return corrected

    return run, lambda factors: factors


CONTESTANTS: dict[str, Callable[[Case, str], Contestant]] = {
    YARDSTICK: forward_backward,
    "isokron": isokron,
    "kronfluence": kronfluence,
    "curvlinops": curvlinops,
}


def differences(factors: Factors, exact: Factors, method: str) -> dict[str, float]:
    """The largest relative difference of any layer, by what is compared.

    The order of the eigenvalues, and the basis where two are equal, is everyone's own: Λ is
    compared by its sum, which is the trace in any basis, by its norm, and sorted.
    """
    worst: dict[str, float] = {}

    def compare(what: str, value: Tensor, right: Tensor) -> None:
        difference = ((value.double() - right).norm() / right.norm()).item()
        worst[what] = max(worst.get(what, 0.0), difference)

    for layer, sides in exact.items():
        for side, right in sides.items():
            value = factors[layer][side]
            if method == "kfac":
                compare({"input": "A", "output": "G"}[side], value, right)
                continue
            compare("trace", value.double().sum(), right.sum())
            compare("norm", value.double().norm(), right.norm())
            compare("sorted", value.flatten().sort().values, right.flatten().sort().values)
    return worst


def phases(case: Case, method: str) -> dict[str, float]:
    """FLOPs over the data set at their least for products of whole matrices.

    Covariances are by half (they are symmetric). Rotations take each side's vectors or the
    per-example gradients, whichever are fewer; eigh is the 9n³ of the QR iteration.
    """
    shapes, n, s = case.shapes(), case.examples, case.shared
    weights = sum(o * i for o, i in shapes)
    needed = {
        "forward": 2 * case.terms * weights,
        "backward": 2 * case.terms * weights,  # of activations; as much again for the weights
        "A": case.terms * sum(i * i for _, i in shapes),
        "G": case.terms * sum(o * o for o, _ in shapes),
    }
    if method == "ekfac":
        needed["forward"] *= 2
        needed["backward"] *= 2
        needed["eigh"] = 9 * sum(o**3 + i**3 for o, i in shapes)
        needed["rotation"] = 2 * n * sum(min(s, i) * o * o + min(s, o) * i * i for o, i in shapes)
        needed["Λ"] = 2 * case.terms * weights
    return {phase: float(flops) for phase, flops in needed.items()}


def memory(field: str) -> int:
    """Bytes of this process by the kernel's VmRSS (now) or VmHWM (at most).

    ru_maxrss, where there is no /proc, also counts the process that started this one.
    """
    status = Path("/proc/self/status")
    if not status.is_file():
        return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    line = next(line for line in status.read_text().splitlines() if line.startswith(field))
    return 1024 * int(line.split()[1])


def serve(contestant: str, model: str, method: str) -> None:
    """A contestant's process: it fits when told "run" and writes its factors when told where."""
    replies, sys.stdout = sys.stdout, sys.stderr  # what a library prints is no reply
    warnings.simplefilter("ignore")

    def reply(**values: object) -> None:
        print(json.dumps(values), file=replies, flush=True)

    case = build(model)
    try:
        run, read = (CONTESTANTS | {DEFINITION: definition})[contestant](case, method)
    except ImportError as error:
        return reply(missing=str(error))
    reply(flops=phases(case, method))
    gc.collect()
    refs = Path("/proc/self/clear_refs")
    if refs.exists():
        refs.write_text("5")  # the peak of importing is forgotten
    held, result = memory("VmRSS"), None
    for line in sys.stdin:
        if line.strip() != "run":
            torch.save(read(result), line.strip())
            reply(saved=True)
            continue
        result = None
        gc.collect()
        wall, cpu = time.perf_counter(), time.process_time()
        result = run()
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        reply(cpu=cpu, wall=wall, peak=memory("VmHWM") - held)
    return None


class Worker:
    """A contestant in a process of its own, and what its runs took."""

    def __init__(self, contestant: str, model: str, method: str) -> None:
        command = [sys.executable, __file__, "--serve", contestant]
        command += ["--model", model, "--method", method]
        command += ["--threads", str(torch.get_num_threads())]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.ready = self.hear()
        self.runs: list[dict[str, float]] = []

    def hear(self) -> dict[str, Any]:
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.process.args!r} ended with {self.process.wait()}")
        return json.loads(line)

    def ask(self, command: str) -> dict[str, Any]:
        assert self.process.stdin
        print(command, file=self.process.stdin, flush=True)
        return self.hear()

    def factors(self) -> Factors:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "factors.pt"
            self.ask(str(path))
            return torch.load(path, weights_only=True)

    def took(self, what: str) -> float:
        """The median of "cpu" or "wall" seconds, or the peak over all runs."""
        if what == "peak":
            return max(run[what] for run in self.runs)
        timed = self.runs[1:] or self.runs
        return statistics.median(run[what] for run in timed)

    def close(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait()


def line_up(model: str, method: str, only: list[str]) -> dict[str, Worker]:
    """The contestants that can be imported here; each that cannot is named with its reason."""
    ready: dict[str, Worker] = {}
    for name in CONTESTANTS:
        if only and not any(word.lower() in name for word in only):
            continue
        worker = Worker(name, model, method)
        if missing := worker.ready.get("missing"):
            print(f"{name} is left out: {missing}", file=sys.stderr)
            worker.close()
        else:
            ready[name] = worker
    return ready


def race(workers: dict[str, Worker], rounds: int) -> None:
    """One run to warm up, then the rounds; one that takes LONG has run enough."""
    for turn in range(1 + rounds):
        for name, worker in workers.items():
            if worker.runs and worker.runs[0]["wall"] > LONG:
                continue
            worker.runs.append(worker.ask("run"))
            print(f"  {turn}/{rounds} {name}: {worker.runs[-1]['wall']:.2f} s", file=sys.stderr)


def report(workers: dict[str, Worker], method: str, exact: Factors) -> None:
    columns = {"cpu": ("CPU s", 1.0, 2), "wall": ("wall s", 1.0, 2), "peak": ("MB", 1e6, 0)}
    print(f"{'':18}" + "".join(f"{title:>9}{'ratio':>7}" for title, *_ in columns.values()))
    peers = [worker for name, worker in workers.items() if name in PEERS]
    for name, worker in workers.items():
        row = f"{name:18}"
        for what, (_, unit, digits) in columns.items():
            best = min((peer.took(what) for peer in peers), default=None)
            ratio = f"{worker.took(what) / best:.2f}" if best else "–"
            row += f"{worker.took(what) / unit:9.{digits}f}{ratio:>7}"
        print(row)
    print("largest relative difference of a layer from the definition in float64:")
    for name, worker in workers.items():
        if name != YARDSTICK:
            worst = differences(worker.factors(), exact, method)
            print(f"  {name:16}" + ", ".join(f"{what} {by:.1e}" for what, by in worst.items()))


def versions() -> str:
    found = []
    for name in ("isokron", *PEERS.values()):
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"{name} not installed")
    return ", ".join(found)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="mlp,gpt")
    parser.add_argument("--method", default="kfac,ekfac")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--threads", type=int, help="1 where others share the cores: waiting threads burn CPU time"
    )
    parser.add_argument("--only", default="", help="contestants whose name has one of these words")
    parser.add_argument("--serve", choices=[*CONTESTANTS, DEFINITION], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.serve:
        return serve(args.serve, args.model, args.method)
    only = [word for word in args.only.split(",") if word]
    with recorded("curvature"):
        print(f"{conditions()}\n{versions()}")
        peak = peak_gemm()
        for model in args.model.split(","):
            for method in args.method.split(","):
                workers = line_up(model, method, only)
                race(workers, args.rounds)
                reference = Worker(DEFINITION, model, method)
                reference.ask("run")
                flops = reference.ready["flops"]
                parts = ", ".join(f"{phase} {each / 1e9:.1f}" for phase, each in flops.items())
                total = sum(flops.values())
                print(f"\n{method} of {model}: GFLOP of {parts}")
                print(
                    f"together {total / 1e9:.0f}: {total / peak:.2f} s at {peak / 1e9:.0f} GFLOP/s"
                )
                report(workers, method, reference.factors())
                for worker in (*workers.values(), reference):
                    worker.close()
    return None


if __name__ == "__main__":
    main()
