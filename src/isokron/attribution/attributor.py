"""Which training examples made a model say this: fit curvature, score queries, write a page."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from isokron.attribution.data import Data, Subject, hash_of, show_example, spread, to_device
from isokron.attribution.evaluate import Noise
from isokron.attribution.exact import ExactScorer, Scored
from isokron.attribution.gradients import SPEARMAN, StoreScorer
from isokron.attribution.memory import Budget, MemoryPlan
from isokron.attribution.queries import Query, as_queries
from isokron.attribution.results import Explanation, Scores, check_finite, token_table
from isokron.attribution.run_folder import RunFolder, check_same
from isokron.attribution.store import DTYPES, Store
from isokron.curvature import Curvature, find_layers
from isokron.curvature import fit as fit_curvature
from isokron.curvature.backward import probe_layers
from isokron.curvature.fit import FISHERS, METHODS, SHARINGS
from isokron.curvature.losses import CrossEntropy, Likelihood, Loss
from isokron.distributed import Ranks
from isokron.distributed.team import in_turn
from isokron.tasks import Shown, Task
from isokron.training import Progress, silent

DAMPING = 0.1
MODES = ("individual", "mean", "nearest")
PASSES = 4  # over the data, above which a store is cheaper than exact scores


class Attributor:
    """Explains a trained model by its training data, in a folder that keeps all results.

    ```python
    a = isokron.Attributor("runs/mine", model, train_set, loss=isokron.losses.CrossEntropy())
    a.fit("ekfac")
    scores = a.score(queries)
    a.report("report.html")
    ```

    A killed process loses nothing that was finished: the same calls go on from there. The model is
    used in eval mode and is not changed.

    Args:
        folder: of the run; a new one, or one of the same model and data.
        model: a trained model.
        train_set: a map-style Dataset, DataLoader, list of tuples or dicts, `datasets.Dataset` or
            `isokron.tasks.Examples`.
        loss: one of `isokron.losses`, or a function (model, batch) → loss per example.
        task: in the place of train_set and loss, an `isokron.Task`, which also shows its examples.
        device: where the model is moved to; default: where it is.
        layers: patterns of layer names, `!pattern` to exclude; default: all linear, convolution and
            norm layers whose sides are at most max_side.
        head: "lowrank" takes an output head larger than max_side in.
        max_side: largest number of inputs or outputs of a layer that is taken in by default.
        memory: bytes that may be used, by every rank; default: half of what is free, shared.
        examples: use only so many training examples, evenly spaced.
        source: JSON-able; where model and data come from, kept in run.json.
        ranks: processes that share the work, in a folder that they all see.
        progress: called with the stage, the examples done and their number.
        data: further arguments of `isokron.attribution.Data`: collate, batch_size, lengths, ids.
    """

    def __init__(
        self,
        folder: str | Path,
        model: nn.Module,
        train_set: Any = None,
        *,
        loss: Loss | Likelihood | None = None,
        task: Task | None = None,
        device: torch.device | str | None = None,
        layers: str | Iterable[str] | None = None,
        head: str = "skip",
        max_side: int = 8192,
        memory: int | None = None,
        examples: int | None = None,
        source: Mapping[str, Any] | None = None,
        ranks: Ranks | None = None,
        progress: Progress = silent,
        **data: Any,
    ) -> None:
        model = model if device is None else model.to(device)
        self.task, self.source = task, dict(source or {})
        patterns = [layers] if isinstance(layers, str) else layers
        self.patterns = None if patterns is None else list(patterns)
        selection = find_layers(model, self.patterns, max_side=max_side, head=head)
        if task is not None:
            if loss is None:
                loss = task.losses if task.logits is None else CrossEntropy(task.logits)
            if train_set is None:
                train_set = task.train
                data = {"ids": task.ids, "lengths": task.lengths, **data}
        if train_set is None:
            raise ValueError("train_set must be a data set, got None; give one, or a task")
        if loss is None:
            raise ValueError(
                "loss must be one of isokron.losses or a function (model, batch) → loss per "
                "example, got None; give loss=isokron.losses.CrossEntropy()"
            )
        self.data = Data(train_set, examples=examples, **data)
        on = next(model.parameters()).device
        # two examples show which layers mix them
        two = to_device(self.data.batch(range(min(2, len(self.data)))), on)
        self.selection = probe_layers(model, two, loss, selection)
        chosen = self.selection.layers
        # of a large head the gradients are kept in the place of a covariance
        self.lowrank = [x.name for x in chosen if x.kind == "dense" and x.shape[1] > max_side]
        self.subject = Subject(model, chosen, loss, self.data, on, ranks, progress)
        self.budget = Budget(self.subject, self.lowrank, memory)
        self.exact = ExactScorer(self.subject, self.inverse)
        self._inverses: dict[float, Curvature] = {}
        self.weights = hash_of(model.state_dict())[:16]
        # another model, or other data, are refused in the same folder
        origin = {
            "given": self.source,
            "layers": self.patterns,
            "head": head,
            "max_side": max_side,
            "examples": len(self.data),
            "weights": self.weights,
            "data": self.data.digest(),
        }
        self.folder = RunFolder(Path(folder), origin, ranks)

    def fit(
        self,
        method: str = "kfac",
        *,
        fisher: str = "empirical",
        sharing: str = "expand",
        examples: int | None = None,
        seed: int = 0,
    ) -> "Attributor":
        """Fit the curvature of the model on its training data; load it where it is there.

        Args:
            method: "kfac", "ekfac", "tkfac" or "shampoo".
            fisher: labels of the data ("empirical"), drawn from the model ("sampled"), or all of
                them ("exact").
            sharing: positions that share a weight count one by one ("expand") or together
                ("reduce").
            examples: fit to so many of the training examples, evenly spaced; default: all.
            seed: of sampled labels.
        """
        settings: dict[str, Any] = {"method": method, "fisher": fisher, "sharing": sharing}
        for name, choices in (("method", METHODS), ("fisher", FISHERS), ("sharing", SHARINGS)):
            if settings[name] not in choices:
                raise ValueError(f"{name} must be one of {choices}, got {settings[name]!r}")
        count = len(self.data) if examples is None else examples
        if not 1 <= count <= len(self.data):
            raise ValueError(
                f"examples to fit must be from 1 to the {len(self.data)} of the run, got {examples}"
            )
        numbers = spread(len(self.data), count)
        # what is recorded cannot be taken back: all checks come before
        if fisher != "empirical" and not isinstance(self.subject.loss, Likelihood):
            raise ValueError(
                f"fisher {fisher!r} needs a loss that knows its distribution, such as "
                "isokron.losses.CrossEntropy(), or a task with logits; use 'empirical'"
            )
        self.budget.check_head(numbers)
        self.memory_plan(method).check()
        self.folder.enter("fit", {**settings, "examples": examples, "seed": seed})
        # another curvature, or none, may be in memory
        self.__dict__.pop("curvature", None)
        self.__dict__.pop("store", None)
        self._inverses.clear()
        if self._is_fitted():
            return self
        self.curvature = fit_curvature(
            self.subject.model,
            self.subject.batches(self.data.plan(numbers), "fit"),
            self.subject.loss,
            selection=self.selection,
            policy=dict.fromkeys(self.lowrank, "all") or "none",
            seed=seed,
            ranks=self.subject.ranks,
            **settings,
        )
        with in_turn(self.subject.ranks, "saving the curvature"):
            if self.folder.leads:
                self.curvature.save(self.folder.curvature)
        return self

    def _is_fitted(self) -> bool:
        fitted = (self.folder.curvature / "curvature.json").exists()
        if self.subject.ranks is not None:
            self.subject.ranks.agree("whether the curvature is there", fitted)
        return fitted

    @cached_property
    def curvature(self) -> Curvature | None:
        """The result of `fit`; None if it was never called, and H is the identity."""
        if self.folder.stage("fit") is None:
            return None
        if not self._is_fitted():
            path = self.folder.path
            raise ValueError(f"the curvature of {path} is not finished; run: isokron fit {path}")
        return Curvature.load(self.folder.curvature, self.subject.model)

    def inverse(self, damping: float = DAMPING) -> Curvature | None:
        """H⁻¹, damped by `damping` of each layer's mean eigenvalue."""
        if self.curvature is None:
            return None
        # Cholesky factors take no longer to compute than to read from disk
        if damping not in self._inverses:
            self._inverses[damping] = self.curvature.damped_inverse(damping)
        return self._inverses[damping]

    def memory_plan(self, method: str | None = None, queries: Sequence[Query] = ()) -> MemoryPlan:
        """What a run with this curvature and these queries needs, computed before any pass."""
        stage = self.folder.stage("fit") or {"method": "kfac"}
        return self.budget.plan(method or stage["method"], queries)

    def choose(self, queries: Sequence[Query]) -> tuple[bool, str]:
        """Whether a store pays for these queries, and why."""
        # exact scores take a pass over the data for each block of queries that fits the memory, a
        # store takes one pass and then a product for each query
        passes = -(-len(queries) // self.memory_plan(queries=queries).block)
        count = f"{len(queries)} queries need" if len(queries) > 1 else "1 query needs"
        takes = f"{passes} pass{'es' if passes > 1 else ''} over the data"
        return passes > PASSES, f"{count} {takes}, and a store pays above {PASSES} passes"

    def _store_scorer(self) -> StoreScorer:
        # embeddings and low-rank heads never enter a projection
        small = [layer for layer in self.subject.layers if layer.name not in self.lowrank]
        layers = [layer for layer in small if layer.kind != "index"]
        if not layers:
            raise ValueError(
                "a store needs a linear, convolution or norm layer, and layers= selects none; "
                "score exactly (--no-store)"
            )
        subject = replace(self.subject, layers=layers)
        return StoreScorer(subject, ExactScorer(subject, self.inverse))

    def build(
        self,
        dim: int | None = None,
        *,
        damping: float = DAMPING,
        dtype: str = "float32",
        seed: int = 0,
        queries: Any = None,
    ) -> "Attributor":
        """Store the gradients of all training examples, to answer queries without the data.

        Args:
            dim: a row has dim × dim numbers of every layer, or all of a smaller layer. Default:
                a small power of two from 16 on whose scores have a rank correlation of 0.9 with
                exact ones, measured on a sample.
            damping: of H, as a multiple of each layer's mean eigenvalue.
            dtype: "float32", "bfloat16" or "float16".
            seed: of the random signs of the projection.
            queries: for which the default dimension is chosen; default: some training examples.
        """
        if dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {tuple(DTYPES)}, got {dtype!r}")
        if dim is not None and (type(dim) is not int or dim < 1):
            raise ValueError(f"dim must be a whole number of at least 1, got {dim!r}")
        settings: dict[str, Any] = {"dim": dim, "damping": check_damping(damping)}
        settings |= {"dtype": dtype, "seed": seed}
        limit, scorer = self.budget.limit, self._store_scorer()
        asked = [] if queries is None else self.queries(queries)
        plan = self.memory_plan(queries=asked)
        # rows are whitened by matrices of the size of the statistics
        parts = {**plan.parts, "whitening": plan.parts["statistics"]}
        replace(plan, parts=parts).check()
        earlier = self.folder.stage("build")
        if dim is None and earlier is not None:
            settings["dim"] = earlier["dim"]
        elif dim is None:
            # rows of the sample are in memory several times while they are compared
            settings["dim"] = scorer.chosen_dim(settings, asked, limit // 8, plan.block)
            if self.subject.ranks is not None:
                self.subject.ranks.agree("the dimension of the store", settings["dim"])
        if settings["dim"] is None:
            raise ValueError(
                f"no store within {limit // 8} bytes has a rank correlation of {SPEARMAN} with "
                "exact scores; score exactly (--no-store), or give --dim or more --memory"
            )
        self.folder.enter("build", settings)
        self.__dict__.pop("store", None)
        scorer.build(self.folder.gradients, settings, self._recorded(settings), limit)
        return self

    def _recorded(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """What decides the numbers of a store."""
        fit = self.folder.stage("fit")
        return {"build": dict(settings), "fit": fit, "weights": self.weights}

    @cached_property
    def store(self) -> Store:
        """The result of `build`, checked to be of this model and these settings."""
        settings = self.folder.stage("build")
        if settings is None:
            path = self.folder.path
            raise ValueError(f"{path} has no store; build one, or score exactly (--no-store)")
        store = Store.open(self.folder.gradients)
        wanted = self._recorded(settings)
        check_same(self.folder.gradients, "store", store.schema.settings, wanted)
        return store

    def score(
        self,
        queries: Any,
        *,
        mode: str = "individual",
        unit: bool = False,
        by_layer: bool = False,
        damping: float | None = None,
        store: bool | None = None,
        top: int = 10,
        verify: bool = False,
        name: str | None = None,
        why: str | None = None,
        save: bool = True,
    ) -> Scores:
        """Score all training examples for queries, and write the answers into the run's folder.

        Positive: training on the example lowers the query's loss.

        Args:
            queries: a list or data set of examples, each a query.
            mode: each query by itself ("individual"), their mean gradient ("mean"), or the largest
                score that any of them has ("nearest").
            unit: cosines, in which the lengths of gradients do not count.
            by_layer: write down the score of every layer too.
            damping: of H, as a multiple of each layer's mean eigenvalue; default: 0.1, or that of
                the store.
            store: score with the store (True) or exactly (False); default: with a store if there
                is one.
            top: proponents and opponents to write down for every query, each.
            verify: take a real training step on the top examples and measure the query's loss.
            name: of the files; default: one that queries and settings determine.
            why: one sentence on the choice between exact and store, for the page.
            save: False writes nothing.
        """
        if mode not in MODES:
            raise ValueError(f"mode must be one of {MODES}, got {mode!r}")
        if top < 1:
            raise ValueError(f"top must be at least 1, got {top}")
        if verify and mode != "individual":
            raise ValueError(f"verify needs mode='individual', got {mode!r}; leave one of them out")
        asked = self.queries(queries)
        use_store = self.folder.stage("build") is not None if store is None else store
        settings: dict[str, Any] = {"mode": mode, "unit": unit, "by_layer": by_layer}
        settings |= {"damping": self._damping(damping, use_store), "store": use_store}
        settings |= {"top": top, "verify": verify}
        scored, noise = self._scored(asked, settings)
        check_finite(scored.scores, asked, self.data.ids)
        scorer = self._store_scorer() if use_store else self.exact
        result = scored.scores.as_subclass(Scores)
        result.ids, result.noise, result.answers = self.data.ids, noise, []
        result.layers = tuple(layer.name for layer in scorer.subject.layers)
        result.why = why or ("the run has a store" if use_store else "the default")
        layered = {**settings, "by_layer": True}
        result.compute_by_layer = lambda: self._scored(asked, layered)[0].by_layer
        result.compute_tokens = lambda: token_table(self.exact, asked, result, settings)
        if scored.by_layer is not None:
            result.by_layer = scored.by_layer
        if save:
            assert scored.losses is not None
            explanation = Explanation(self, asked, result, settings, scored.losses)
            result.answers = explanation.write(name)
        return result

    def _scored(
        self, queries: list[Query], settings: Mapping[str, Any]
    ) -> tuple[Scored, Noise | None]:
        mean, damping = settings["mode"] == "mean", settings["damping"]
        options = {"mean": mean, "by_layer": settings["by_layer"], "unit": settings["unit"]}
        plan, noise = self.memory_plan(queries=queries), None
        if settings["store"]:
            store, scorer, memory = self.store, self._store_scorer(), self.budget.limit // 4
            build = store.schema.settings["build"]
            scored = scorer.scores(store, build, queries, memory=memory, **options)
            noise = scorer.noise(queries, scored, damping, plan.block, mean)
        else:
            plan.check()
            scored = self.exact.scores(queries, damping, block=plan.block, **options)
        scores, layered, lengths, losses = scored.comparable(), *scored[1:]
        if lengths is not None:
            layered = None if layered is None else layered / lengths[:, None]
        if settings["mode"] == "nearest":
            if noise is not None:
                noise = replace(noise, standard_error=[max(noise.standard_error)])
            # the layers too are those of the query with the largest score
            best = scores.argmax(0, keepdim=True)
            scores = scores.gather(0, best)
            if layered is not None:
                layered = layered.gather(0, best[:, None].expand(-1, layered.size(1), -1))
        return Scored(scores, layered, None, losses), noise

    def _damping(self, damping: float | None, use_store: bool) -> float:
        build = self.folder.stage("build") if use_store else None
        if damping is None:
            return float(DAMPING if build is None else build["damping"])
        if build is not None and damping != build["damping"]:
            raise ValueError(
                f"damping {damping:g} differs from that of the store, {build['damping']:g}, by "
                "which its rows are whitened; leave it out, or score exactly (--no-store)"
            )
        return check_damping(damping)

    def queries(self, queries: Any) -> list[Query]:
        """What `score` takes, as a list of `Query`."""
        return as_queries(queries, self.data.collate, self.show)

    def show(self, batch: Any) -> list[Shown]:
        """What a person sees of the examples of a batch."""
        if self.task is not None and self.task.show is not None:
            return self.task.show(batch)
        return [show_example(batch)]

    def projected_scores(self, queries: Sequence[Query], dim: int, **settings: Any) -> Tensor:
        """Scores [Q, N] of a store with these settings of `build`, computed without one."""
        settings = {"seed": 0, "damping": DAMPING, **settings, "dim": dim}
        return self._store_scorer().computed_scores(settings, queries, range(len(self.data)))

    def self_influence(self, damping: float | None = None, store: bool | None = None) -> Tensor:
        """⟨∇, H⁻¹∇⟩ of every training example, [N]: large for what is rare or mislabelled.

        A store has it as the squared lengths of its rows; else it takes a pass.
        """
        use_store = self.folder.stage("build") is not None if store is None else store
        damping = self._damping(damping, use_store)
        if use_store:
            return self._store_scorer().self_influence(self.store, self.budget.limit // 4)
        self.memory_plan().check()
        return self.exact.self_influence(damping)

    def report(self, path: str | Path | None = None) -> Path:
        """Write a page of all scores of the run; it needs neither the model nor the data."""
        from isokron.report.attribution import write_report

        return write_report(self.folder.path, None if path is None else Path(path))


def check_damping(damping: float) -> float:
    if not 0 <= damping < float("inf"):
        raise ValueError(f"damping must be a finite number of at least 0, got {damping!r}")
    return damping
