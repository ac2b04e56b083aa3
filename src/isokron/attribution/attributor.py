"""Training-data attribution for a trained model: fit curvature, score queries, write a page."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from isokron.attribution.arguments import check_folder, plain_numbers, with_task
from isokron.attribution.bad_examples import finite_pairs, without_bad
from isokron.attribution.data import Data, Subject, show_example, spread, to_device
from isokron.attribution.fingerprint import Fingerprints
from isokron.attribution.fit_stage import FitStage, check_fit
from isokron.attribution.memory import Budget, MemoryPlan
from isokron.attribution.queries import Query, as_queries
from isokron.attribution.refinement import RefinedScorer
from isokron.attribution.results import Explanation, Scores, check_finite, default_name, token_table
from isokron.attribution.run_folder import RunFolder
from isokron.attribution.scorers import (
    DAMPING,
    ExactScorer,
    StoreScorer,
    check_build,
    check_settings,
    projected_layers,
)
from isokron.attribution.store import Store
from isokron.attribution.task_run import UnrolledScorer
from isokron.attribution.unroll import TrainingRun
from isokron.curvature import Curvature, find_layers
from isokron.curvature import fit as fit_curvature
from isokron.curvature.check import check_layers
from isokron.curvature.losses import Likelihood, Loss
from isokron.distributed import Ranks
from isokron.files import check_same
from isokron.report.attribution import write_report
from isokron.tasks import Shown, Task
from isokron.training import Progress, silent


class Attributor:
    """Scores the influence of training examples on queries; all results are kept in a folder.

    ```python
    a = isokron.Attributor("runs/mine", model, train_set, loss=isokron.losses.CrossEntropy())
    a.fit("ekfac")
    scores = a.score(queries)
    a.report("report.html")
    ```

    If the process is killed, the same calls continue from the last finished step. The model is
    used in eval mode and is not changed. If it was trained on after results were computed, they are
    not used with it: a new folder and a new Attributor are needed.

    Args:
        folder: where the run is kept: a new folder, or one with a run of the same model, data, loss
            and collate function.
        model: a trained model.
        train_set: a map-style Dataset, DataLoader, list of tuples or dicts, `datasets.Dataset` or
            `isokron.tasks.Examples`.
        loss: one of `isokron.losses`, or a function (model, batch) → loss per example.
        task: an `isokron.Task` instead of train_set and loss; it also displays its examples.
        collate: list of examples → batch; default: the DataLoader's, or torch's.
        batch_size: examples in a batch; default: the DataLoader's, or 2,048 tokens, or up to 256
            images or other vectors of numbers.
        lengths: tokens of every example, to batch examples of similar length.
        ids: a name for every example; default: its index.
        device: the model is moved there; default: it stays where it is.
        layers: patterns of layer names, `!pattern` to exclude; default: all linear, convolution and
            norm layers whose sides are at most max_side.
        head: "lowrank" includes an output head larger than max_side, "skip" leaves it out.
        max_side: largest number of inputs or outputs of a layer that is included by default.
        memory: bytes that each rank may use; default: half of the free memory, shared by ranks.
        examples: use only this many training examples, evenly spaced.
        on_bad: "raise" refuses examples whose loss is not finite, by name; "skip" goes on without
            examples whose loss or gradient is not finite, after a pass that looks for them:
            scores have no column for them, and `skipped` has the reasons by id.
        strict: refuse layers whose gradients on the first two examples are not those of autograd;
            default: they are left out, and `selection.summary()` gives the reasons.
        source: JSON-able; where model and data come from, recorded in run.json.
        ranks: processes that share the work; all must see the folder.
        progress: called with the stage, the examples done and their number.
    """

    @plain_numbers
    def __init__(
        self,
        folder: str | Path,
        model: nn.Module,
        train_set: Any = None,
        *,
        loss: Loss | Likelihood | None = None,
        task: Task | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        batch_size: int | None = None,
        lengths: Sequence[int] | None = None,
        ids: Sequence[str] = (),
        device: torch.device | str | None = None,
        layers: str | Iterable[str] | None = None,
        head: str = "skip",
        max_side: int = 8192,
        memory: int | None = None,
        examples: int | None = None,
        on_bad: str = "raise",
        strict: bool = False,
        source: Mapping[str, Any] | None = None,
        ranks: Ranks | None = None,
        progress: Progress = silent,
    ) -> None:
        check_folder(folder, model)
        model = model if device is None else model.to(device)
        self.task, self.source = task, dict(source or {})
        patterns = [layers] if isinstance(layers, str) else layers
        self.patterns = None if patterns is None else list(patterns)
        selection = find_layers(model, self.patterns, max_side=max_side, head=head)
        train_set, loss, ids, lengths = with_task(task, train_set, loss, ids, lengths)
        self.data = Data(train_set, collate, batch_size, lengths, ids, examples)
        on = next(model.parameters()).device
        for numbers in finite_pairs(model, self.data, loss, on_bad):
            two = to_device(self.data.batch(numbers), on)
            self.selection = check_layers(model, two, loss, selection, strict=strict)
            if self.selection.compared:  # the first ones may have no loss that counts
                break
        chosen = self.selection.layers
        # for a large head, gradients are stored instead of their covariance
        self.lowrank = [x.name for x in chosen if x.kind == "dense" and x.shape[1] > max_side]
        self.subject = Subject(model, chosen, loss, self.data, on, ranks, progress)
        origin: dict[str, Any] = {"given": self.source, "layers": self.patterns, "head": head}
        self.skipped: dict[str, str] = {}
        if on_bad == "skip":
            self.subject, self.skipped = without_bad(self.subject, Path(folder))
            self.data, origin["skipped"] = self.subject.data, self.skipped
        self.budget = Budget(self.subject, self.lowrank, memory)
        self.exact = ExactScorer(self.subject, self.inverse)
        self.fingerprints = Fingerprints(self.subject)
        origin |= {"max_side": max_side, "examples": len(self.data)}
        self.folder = RunFolder(Path(folder), origin, self.fingerprints, ranks)
        self.fit_stage = FitStage(self.subject, self.folder, self.fingerprints)

    @plain_numbers
    def fit(
        self,
        method: str | None = "kfac",
        *,
        fisher: str = "empirical",
        sharing: str = "expand",
        examples: int | None = None,
        seed: int = 0,
        optimizer: Any = None,
        run: TrainingRun | None = None,
    ) -> Self:
        """Fit the curvature of the model on its training data, or load it if it was fitted before.

        Args:
            method: "kfac", "ekfac", "tkfac" or "shampoo"; None fits nothing: H is the identity,
                and scores are products of gradients; "unroll" fits nothing either: scores are
                derivatives through the training run, see docs/unroll.md.
            fisher: labels from the data ("empirical"), sampled from the model ("sampled"), or all
                labels weighted by their probability ("exact").
            sharing: how positions that share a weight are treated: one by one ("expand"), or
                summed per example ("reduce").
            examples: fit to this many training examples, evenly spaced; default: all.
            seed: random seed of sampled labels.
            optimizer: take the curvature from this Shampoo, SOAP, Katie, NaturalGradient or AdamW
                of isokron that has trained the model, from its state_dict(), or from the path of a
                checkpoint with that, instead of from the data; the other arguments do not count.
            run: for "unroll": the training run that made the model.
        """
        subject = self.subject
        if run is not None and (method != "unroll" or optimizer is not None):
            raise ValueError("run is for fit('unroll', run=…) alone; leave it out")
        self.folder.claim()
        if optimizer is not None:
            self.memory_plan("ekfac").check()
            self._forget()
            self.fit_stage.from_optimizer(optimizer)
            return self
        if method in (None, "none", "unroll"):
            self._fit_nothing(method or "none", run)
            return self
        settings: dict[str, Any] = {"method": method, "fisher": fisher, "sharing": sharing}
        check_fit({**settings, "examples": examples}, len(self.data), subject.loss)
        numbers = spread(len(self.data), examples or len(self.data))
        self.budget.check_head(numbers)
        self.memory_plan(method).check()
        compute = partial(
            fit_curvature,
            subject.model,
            subject.batches(self.data.plan(numbers), "fit"),
            subject.loss,
            selection=self.selection,
            policy=dict.fromkeys(self.lowrank, "all") or "dense",
            seed=seed,
            ranks=subject.ranks,
            **settings,
        )
        self._forget()
        self.fit_stage.run({**settings, "examples": examples, "seed": seed}, compute)
        return self

    def _fit_nothing(self, method: str, run: TrainingRun | None) -> None:
        """Enter a method without curvature: "none" or "unroll"."""
        scorer, limit = ExactScorer(self.subject, self.inverse), self.budget.limit
        if method == "unroll":
            scorer = UnrolledScorer.checked(self.subject, self.inverse, self.task, run, limit)
        self.fit_stage.enter({"method": method})
        self._forget()
        with self.folder.finish("fit", {"method": method}):
            self.exact = scorer

    def _forget(self) -> None:
        """Cached values may belong to an earlier fit."""
        self.exact = ExactScorer(self.subject, self.inverse)
        self.__dict__.pop("store", None)

    @property
    def is_unrolled(self) -> bool:
        """Whether scores are derivatives through the training run."""
        return self.fit_stage.method == "unroll"

    @property
    def curvature(self) -> Curvature | None:
        """The result of `fit`. None after `fit(None)` or without it: H is then the identity."""
        if self.is_unrolled and not isinstance(self.exact, UnrolledScorer):
            raise ValueError(
                f"scores of {self.folder.path} are derivatives through a training run, which "
                "is not saved; call fit('unroll', run=…) first"
            )
        return self.fit_stage.curvature

    def inverse(self, damping: float = DAMPING) -> Curvature | None:
        """H⁻¹, damped by `damping` of each layer's mean eigenvalue."""
        return None if self.curvature is None else self.fit_stage.inverse(damping)

    def memory_plan(
        self, method: str | None = None, queries: Sequence[Query] = (), *, refine: int = 0
    ) -> MemoryPlan:
        """What a run with this curvature and these queries needs, computed before any pass."""
        stage = self.folder.stage("fit") or {"method": "kfac"}
        # layers of an optimizer may be of several kinds, of which EK-FAC takes most memory
        stage = {**stage, "method": "ekfac"} if "optimizer" in stage else stage
        return self.budget.plan(method or stage["method"], queries, refine=bool(refine))

    def choose(self, queries: Sequence[Query]) -> tuple[bool, str]:
        """Whether a store is cheaper than exact scores for these queries, and why."""
        return self.budget.choose(self.memory_plan(queries=queries), len(queries))

    def _store_scorer(self, store: Store | None = None) -> StoreScorer:
        layers = projected_layers(self.subject.layers, self.lowrank)
        subject = replace(self.subject, layers=layers)
        return StoreScorer(subject, self.inverse, self.exact, store, self.budget.limit // 4)

    @plain_numbers
    def build(
        self,
        dim: int | None = None,
        *,
        damping: float = DAMPING,
        dtype: str = "float32",
        seed: int = 0,
        queries: Any = None,
    ) -> Self:
        """Store projected gradients of all training examples, to score without the data.

        Args:
            dim: a row has dim × dim entries per layer, or the full gradient of a smaller layer.
                Default: a small power of two, at least 16, whose scores have a rank correlation
                of 0.9 with exact ones, measured on a sample.
            damping: damping of H, as a multiple of each layer's mean eigenvalue.
            dtype: "float32", "bfloat16" or "float16".
            seed: random seed of the examples on which the entries are chosen.
            queries: the default `dim` is chosen for these; default: some training examples.
        """
        if self.is_unrolled:
            raise ValueError(f"{self.folder.path} is unrolled and has no gradients to store")
        settings: dict[str, Any] = {"dim": dim, "damping": damping, "dtype": dtype, "seed": seed}
        check_build(settings)
        self.folder.claim()
        limit, scorer = self.budget.limit, self._store_scorer()
        asked = [] if queries is None else self.queries(queries)
        plan = self.memory_plan(queries=asked)
        # rows are whitened by matrices of the size of the statistics, and every entry is measured
        shares = 4 * sum(layer.parameters for layer in scorer.subject.layers)
        parts = {**plan.parts, "whitening": plan.parts.get("statistics", 0) + shares}
        replace(plan, parts=parts).check()
        if dim is None:
            # a store that was begun with these settings is continued
            earlier = self.folder.begun_store() or {}
            settings["dim"] = earlier.get("dim")
            if earlier != settings:
                # several copies of the sample's rows are in memory while they are compared
                settings["dim"] = scorer.chosen_dim(settings, asked, limit // 8, plan.block)
        self.folder.check_stage("build", settings)
        self.__dict__.pop("store", None)
        is_new = self.folder.stage("build") is None
        scorer.build(self.folder.gradients, settings, self._recorded(settings), limit, is_new)
        with self.folder.finish("build", settings):
            return self

    def _recorded(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """All settings that the numbers in a store depend on."""
        fit = self.folder.stage("fit")
        return {"build": dict(settings), "fit": fit, "fingerprint": self.folder.fingerprint}

    @cached_property
    def store(self) -> Store:
        """The result of `build`, checked to be of this model and these settings."""
        settings = self.folder.stage("build")
        if settings is None:
            path = self.folder.path
            raise ValueError(f"{path} has no store; build one, or score exactly (store=False)")
        store, path = Store.open(self.folder.gradients), self.folder.gradients
        stored, wanted = dict(store.schema.settings), self._recorded(settings)
        wanted.pop("fingerprint")
        self.fingerprints.check(path, "store", stored.pop("fingerprint", {}))
        check_same(path, "store", stored, wanted)
        return store

    @plain_numbers
    def score(
        self,
        queries: Any,
        *,
        mode: str = "individual",
        unit: bool = False,
        by_layer: bool = False,
        damping: float | None = None,
        store: bool | None = None,
        refine: int = 0,
        top: int = 10,
        verify: bool = False,
        name: str | None = None,
        why: str | None = None,
        save: bool = True,
    ) -> Scores:
        """Score all training examples for queries, and write the results into the run's folder.

        A positive score means that training on the example lowers the query's loss.

        Args:
            queries: a list or data set of examples; each is a query.
            mode: score for each query ("individual"), for the mean of their gradients ("mean"), or
                the largest score over all queries ("nearest").
            unit: score by cosine, which ignores the norms of gradients.
            by_layer: also write the scores of every layer.
            damping: damping of H, as a multiple of each layer's mean eigenvalue; default: 0.1, 10
                with `refine`, or that of the store.
            store: score with the store (True) or exactly (False); default: with the store if there
                is one.
            refine: passes over the data to replace H by the exact Gauss–Newton matrix, by
                conjugate gradients; 0: none. Needs one of `isokron.losses`, and exact scores.
            top: number of proponents and of opponents to write per query.
            verify: take a real training step on the top examples and measure the query's loss.
            name: file name of the results; default: a hash of queries and settings.
            why: one sentence on the choice between exact scores and the store, for the page.
            save: whether to write files.
        """
        use_store = self.folder.stage("build") is not None if store is None else store
        settings: dict[str, Any] = {"mode": mode, "unit": unit, "by_layer": by_layer}
        settings |= {"top": top, "verify": verify, "refine": refine, "store": use_store}
        settings["damping"] = damping
        check_settings({**settings, "name": name})
        self.folder.claim()
        asked, exact = self.queries(queries), self._exact_scorer(refine)
        settled, scorer = exact.settled(settings), exact
        if use_store:
            scorer = self._store_scorer(self.store)
            settled = scorer.settled(settings)
        if save and name is None:  # before any work, since queries may have no digest
            name = default_name(asked, settled)
        plan = self.memory_plan(queries=asked, refine=refine)
        scored, noise = scorer.answer(asked, settled, plan)
        check_finite(scored.scores, asked, self.data.ids)
        result = scored.scores.as_subclass(Scores)
        result.ids, result.noise, result.answers = self.data.ids, noise, []
        result.skipped = self.skipped
        result.layers = tuple(layer.name for layer in scorer.subject.layers)
        result.coverage = scorer.coverage(self.selection)
        result.why = why or ("the run has a store" if use_store else "the default")
        layered = {**settled, "by_layer": True}
        later = self._later
        result.compute_by_layer = later(lambda: scorer.answer(asked, layered, plan)[0].by_layer)
        result.compute_tokens = later(lambda: token_table(exact, asked, result, settled))
        result.refinement = exact.record() if isinstance(exact, RefinedScorer) else None
        if scored.by_layer is not None:
            result.by_layer = scored.by_layer
        if save:
            assert scored.losses is not None
            assert name is not None
            explanation = Explanation(self, asked, result, settled, scored.losses, exact)
            result.answers = explanation.write(name)
        return result

    def _later(self, compute: Callable[[], Any]) -> Callable[[], Any]:
        """The same, if the model has not been trained on by then."""

        def checked() -> Any:
            self.folder.claim()
            return compute()

        return checked

    def _exact_scorer(self, refine: int) -> ExactScorer:
        if not refine or self.is_unrolled:
            return self.exact
        stage = self.folder.stage("fit")
        # refused by the scorer, without a warning before it
        curvature = None if stage is None else self.curvature
        from_optimizer = "optimizer" in (stage or {})
        return RefinedScorer(self.subject, self.inverse, curvature, refine, from_optimizer)

    def queries(self, queries: Any) -> list[Query]:
        """The argument `queries` of `score` as a list of `Query`."""
        return as_queries(queries, self.data, self.show)

    def show(self, batch: Any) -> list[Shown]:
        """How to display the examples of a batch."""
        if self.task is not None and self.task.show is not None:
            return self.task.show(batch)
        return [show_example(batch)]

    def projected_scores(self, queries: Sequence[Query], dim: int, **settings: Any) -> Tensor:
        """Scores [Q, N] as a store with these settings of `build` would give them."""
        self.folder.claim()
        settings = {"seed": 0, "damping": DAMPING, **settings, "dim": dim}
        return self._store_scorer().computed_scores(settings, queries, range(len(self.data)))

    def self_influence(self, damping: float | None = None, store: bool | None = None) -> Tensor:
        """⟨∇, H⁻¹∇⟩ of every training example, [N]; large for rare and mislabelled examples.

        They are read from a store that has all layers, or with store=True of those it has;
        otherwise it takes a pass.
        """
        self.folder.claim()
        built = self.folder.stage("build") is not None
        if store or (store is None and built and self._store_scorer().is_complete):
            self._store_scorer(self.store).settled({"damping": damping})
            return self.store.extra("square")
        self.memory_plan().check()
        return self.exact.self_influence(self.exact.settled({"damping": damping})["damping"])

    def report(self, path: str | Path | None = None, *, all: bool = False) -> Path:
        """Write an HTML page of the last scores, or of all of the run, and return its path."""
        return write_report(self.folder.path, None if path is None else Path(path), all=all)
