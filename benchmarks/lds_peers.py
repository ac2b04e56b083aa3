"""Scores by kronfluence or dattri, from one file of tensors to another.

    python benchmarks/lds_peers.py {kronfluence,dattri} SETTING IN.safetensors OUT.safetensors

The peers of benchmarks/lds_table.py, run where one of the two is installed. SETTING is a name in
its `SETTINGS`, whose model is built. IN has `train.x`, `train.y`, `query.x`, `query.y` (inputs of
the model, and classes: one for every example, or for every position), and the weights of several
models as `NUMBER.NAME`; model 0 was trained on all examples, the others on halves of them. OUT has
scores [queries, examples] by method; its metadata has the CPU seconds of every method and the bytes
that it keeps to score further queries.
"""

import argparse
import importlib
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import DataLoader, TensorDataset

BATCH, SMALL_BATCH = 1000, 250  # of perceptrons, and of models with more activations
REGULARIZATIONS = (1.0, 0.1, 0.01, 0.005)  # some of those that dattri's own study searches
SMALL = 50_000  # parameters; conjugate gradients take many minutes for larger models
# name, scores, bytes stored; computed one at a time, so that each can be timed
Results = Iterator[tuple[str, Tensor, int]]


def package(name: str) -> Any:
    """An optional dependency, whose types are not known where it is not installed."""
    return importlib.import_module(name)


def load_models(setting: str, tensors: dict[str, Tensor]) -> list[nn.Module]:
    """All models of a file."""
    create = package("lds_table").SETTINGS[setting].task().model
    models: list[nn.Module] = []
    while any(name.startswith(f"{len(models)}.") for name in tensors):
        prefix, model = f"{len(models)}.", create()
        weights = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
        model.load_state_dict(weights)
        models.append(model.eval())
    return models


def is_perceptron(model: nn.Module) -> bool:
    return not any(isinstance(part, nn.Conv2d | nn.Embedding) for part in model.modules())


def batch_size_of(model: nn.Module) -> int:
    return BATCH if is_perceptron(model) else SMALL_BATCH


def cross_entropy(logits: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """logits: [..., classes], targets: [...]"""
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction=reduction)


def kronfluence(models: list[nn.Module], train: TensorDataset, query: TensorDataset) -> Results:
    """EK-FAC with its default Fisher matrix (drawn labels) and damping, and with isokron's."""
    arguments, analyzer = package("kronfluence.arguments"), package("kronfluence.analyzer")
    base: Any = package("kronfluence.task").Task

    class Classes(base):
        def compute_train_loss(self, batch: Any, model: nn.Module, sample: bool = False) -> Tensor:
            inputs, targets = batch
            logits = model(inputs)
            if sample:
                chances = logits.detach().flatten(0, -2).softmax(-1)
                targets = torch.multinomial(chances, 1).view(targets.shape)
            return cross_entropy(logits, targets, "sum")

        def compute_measurement(self, batch: Any, model: nn.Module) -> Tensor:
            return self.compute_train_loss(batch, model)

    task, batch_size = Classes(), batch_size_of(models[0])
    model = analyzer.prepare_model(models[0], task)
    for fisher, damping in (("sampled", 1e-8), ("sampled", None), ("empirical", None)):
        torch.manual_seed(0)
        # every method pays for its own factors
        with tempfile.TemporaryDirectory() as folder:
            run = analyzer.Analyzer("lds", model, task, cpu=True, output_dir=folder)
            settings = arguments.FactorArguments(
                strategy="ekfac", use_empirical_fisher=fisher == "empirical"
            )
            run.fit_all_factors("f", train, per_device_batch_size=batch_size, factor_args=settings)
            stored = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())
            run.compute_pairwise_scores(
                "s",
                "f",
                query_dataset=query,
                train_dataset=train,
                per_device_query_batch_size=len(query),
                per_device_train_batch_size=batch_size,
                score_args=arguments.ScoreArguments(damping_factor=damping),
            )
            scores = run.load_pairwise_scores("s")["all_modules"].float()
        # None is 0.1 of the mean eigenvalue
        shown = "1e-8" if damping else "0.1 of the mean"
        yield f"kronfluence EK-FAC, {fisher}, damping {shown}", scores, stored


def dattri(models: list[nn.Module], train: TensorDataset, query: TensorDataset) -> Results:
    """TRAK of 1 and of 10 models; for perceptrons influence by conjugate gradients, and LoGra."""
    algorithm, tasks = package("dattri.algorithm"), package("dattri.task")
    model, weights = models[0], [model.state_dict() for model in models]

    def margins(params: Any, example: Any) -> Tensor:
        """log p/(1 − p) of every label, in a form that stays finite where p is close to 1."""
        inputs, label = example
        logits = torch.func.functional_call(model, params, inputs[None])[0]
        is_label = torch.arange(logits.size(-1)) == label[..., None]
        others = torch.where(is_label, -torch.inf, logits).logsumexp(-1)
        return torch.where(is_label, logits, 0.0).sum(-1) - others

    def margin(params: Any, example: Any) -> Tensor:
        return margins(params, example).mean()

    def probability(params: Any, example: Any) -> Tensor:
        return margins(params, example).sigmoid().mean()[None]

    def loss(params: Any, batch: Any) -> Tensor:
        inputs, labels = batch
        return cross_entropy(torch.func.functional_call(model, params, inputs), labels)

    def module_loss(module: nn.Module, batch: Any, device: str) -> Tensor:
        inputs, labels = batch
        return cross_entropy(module(inputs), labels)

    batch_size = batch_size_of(model)
    parts, full_batch = DataLoader(train, batch_size), DataLoader(train, len(train))
    for count in (1, 10):
        task = tasks.AttributionTask(margin, model, weights[1 : count + 1])
        run = algorithm.TRAKAttributor(task, probability)
        # vmap would go through fused attention one example after another
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
            run.cache(parts)
            scores = run.attribute(DataLoader(query, batch_size)).T
        stored = sum(matrix.nbytes for matrix in run.inv_XTX_XT_list) + run.Q.nbytes
        stored += sum(value.nbytes for value in weights[0].values()) * (count - 1)
        yield f"dattri TRAK, {count} model{'s' if count > 1 else ''}", scores, stored
    if not is_perceptron(model):
        return
    size = sum(value.numel() for value in weights[0].values())
    for regularization in REGULARIZATIONS if size < SMALL else ():
        task = tasks.AttributionTask(loss, model, weights[0])
        run = algorithm.IFAttributorCG(task, max_iter=10, regularization=regularization)
        run.cache(full_batch)
        with torch.no_grad():
            scores = run.attribute(parts, DataLoader(query, 10)).T
        yield f"dattri influence by CG, regularization {regularization:g}", scores, 0
    # LoGra probes a single example, which must come out of the model as a batch of one
    flat = nn.Sequential(nn.Flatten(), model)
    task = tasks.AttributionTask(module_loss, flat, flat.state_dict())
    run = algorithm.LoGraAttributor(
        task, damping=5e-3, proj_dim=1024, offload="cpu", cache_dir=tempfile.mkdtemp()
    )
    rows, asked = (
        DataLoader(TensorDataset(data.tensors[0].flatten(1)[:, None], data.tensors[1]), batch_size)
        for data in (train, query)
    )
    run.cache(rows)
    scores = run.attribute(rows, asked).T
    yield "dattri LoGra, 1,024 numbers a layer", scores, 4 * run.total_proj_dim * len(train)


PEERS: dict[str, Callable[..., Results]] = {"kronfluence": kronfluence, "dattri": dattri}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("peer", choices=list(PEERS))
    parser.add_argument("setting")
    parser.add_argument("inputs", type=Path)
    parser.add_argument("outputs", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    tensors = load_file(args.inputs)
    models = load_models(args.setting, tensors)
    train, query = (
        TensorDataset(tensors[f"{part}.x"], tensors[f"{part}.y"]) for part in ("train", "query")
    )
    scores: dict[str, Tensor] = {}
    facts: dict[str, Any] = {}
    start = time.process_time()
    for name, values, stored in PEERS[args.peer](models, train, query):
        seconds = time.process_time() - start
        scores[name] = values.detach().float().contiguous()
        facts[name] = {"seconds": round(seconds, 2), "bytes": stored}
        print(name, facts[name], flush=True)
        start = time.process_time()
    save_file(scores, args.outputs, metadata={"facts": json.dumps(facts)})


if __name__ == "__main__":
    main()
