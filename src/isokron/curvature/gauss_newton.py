"""Exact Gauss–Newton products over a data set, for many vectors at once.

    G = Σ_t w_t J_tᵀ H_t J_t / Σ_t w_t

over loss terms t of weight w_t, J_t the derivative of the model's outputs in the weights of some
layers and H_t the Hessian of the term in the outputs: the Fisher matrix of the model's own
distribution, with all blocks between layers, in the scale of `fit`. Schraudolph 2002, Martens 2010.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp, vjp
from torch.nn.attention import SDPBackend, sdpa_kernel

from isokron.curvature.backward import unchanged
from isokron.curvature.layers import Layer, pack, unpack
from isokron.curvature.losses import BinaryCrossEntropy, CrossEntropy, Likelihood, SquaredError
from isokron.distributed.process_group import Ranks
from isokron.distributed.rank_tasks import together

Vectors = dict[str, Tensor]  # the parts of Q vectors by layer: [B, Q, o, i]
TRANSFORMS = ("forward AD", "forward mode", "functorch", "torch.func", "vmap", "jvp")  # in errors


class WithWeights:
    """A model with other weights, callable like the model.

    tied: weights that the model has under several names change under all of them.
    """

    def __init__(self, module: nn.Module, weights: Mapping[str, Tensor], tied: bool = True) -> None:
        self.module, self.weights, self.tied = module, dict(weights), tied

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return functional_call(self.module, self.weights, args, kwargs, tie_weights=self.tied)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)


@dataclass(frozen=True, eq=False)
class GaussNewton:
    """Products with G of some layers of a model. batches: those of this rank.

    A weight that two layers share counts in both, if both are observed.
    """

    model: nn.Module
    layers: Sequence[Layer]
    loss: Likelihood
    batches: Iterable[Any]
    ranks: Ranks | None = None

    def product(self, vectors: Vectors) -> Vectors:
        """G v of Q vectors, by one pass over the data: [B, Q, o, i] by layer."""
        sums = {name: torch.zeros_like(value) for name, value in vectors.items()}
        terms = 0.0
        model = getattr(self.model, "_orig_mod", self.model)  # that torch.compile has wrapped
        paths = parameter_paths(model, self.layers)
        with (
            together(self.ranks, "products over the data"),
            unchanged(model),
            _with_forward_derivatives(model),
        ):
            for batch in self.batches:
                with _named_errors():
                    terms += self._add_batch_(sums, model, paths, batch, vectors)
        if self.ranks is not None:
            terms = self._add_ranks_(sums, terms)
        return {name: value / max(terms, 1.0) for name, value in sums.items()}

    def _add_batch_(
        self,
        sums: Vectors,
        model: nn.Module,
        paths: Mapping[str, Mapping[str, str]],
        batch: Any,
        vectors: Vectors,
    ) -> float:
        """Add Σ w JᵀHJv of a batch, and return Σ w."""
        aliases = tied_paths(model, self.layers, paths)
        params = {path: model.get_parameter(path) for of in paths.values() for path in of.values()}

        def forward(weights: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
            shared = {place: weights[path] for place, path in aliases.items()}
            network: Any = WithWeights(model, {**weights, **shared}, tied=False)
            outputs, targets = self.loss.forward(network, batch)
            return outputs, self.loss.weights(targets)

        linear: Any = vjp(forward, params, has_aux=True)
        outputs, pull_back, weights = linear
        count = float(weights.sum())
        if not count:
            return 0.0
        times = hessian_product(self.loss, outputs.detach())

        def through(vector: Vectors) -> Vectors:
            tangents = _by_path(self.layers, paths, params, vector)
            moved = jvp(lambda w: forward(w)[0], (params,), (tangents,))[1]
            slopes = times(moved) * weights.reshape(*moved.shape[:-1], 1)
            (grads,) = pull_back(slopes.to(outputs.dtype))
            return _by_layer(self.layers, paths, grads)

        images = torch.vmap(through, in_dims=1, out_dims=1)(vectors)
        for name, image in images.items():
            sums[name] += image
        return count

    def _add_ranks_(self, sums: Vectors, terms: float) -> float:
        """Add up the sums of all ranks in float64, and return all terms."""
        assert self.ranks is not None
        like = next(iter(sums.values()))
        total = torch.tensor([terms], dtype=torch.float64, device=self.ranks.near(like.device))
        self.ranks.all_reduce_(total, what="the number of loss terms")
        for name, value in sums.items():
            wide = value.to(total)
            sums[name] = self.ranks.all_reduce_(wide, what=f"products of {name!r}").to(value)
        return float(total)


def parameter_paths(model: nn.Module, layers: Sequence[Layer]) -> dict[str, dict[str, str]]:
    """By layer, the names of "weight" and "bias" within its own module.

    They differ from those of the layout where a weight is shared: these name its first owner.
    """
    names = {module: name for name, module in model.named_modules()}
    by_name = dict(model.named_parameters())
    paths: dict[str, dict[str, str]] = {}
    for layer in layers:
        inside = dict(layer.module.named_parameters(remove_duplicate=False))
        prefix = names[layer.module]
        paths[layer.name] = {}
        for key, name in layer.layout.params.items():
            place = next(place for place, value in inside.items() if value is by_name[name])
            paths[layer.name][key] = f"{prefix}.{place}".removeprefix(".")
    return paths


def tied_paths(
    model: nn.Module, layers: Sequence[Layer], paths: Mapping[str, Mapping[str, str]]
) -> dict[str, str]:
    """The names of weights in layers whose uses count as those of another, and there."""
    return {
        place: paths[owner.name][key]
        for owner in layers
        for of_tied in parameter_paths(model, owner.tied).values()
        for key, place in of_tied.items()
    }


def _by_path(
    layers: Sequence[Layer],
    paths: Mapping[str, Mapping[str, str]],
    params: Mapping[str, Tensor],
    vector: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """Matrices of layers as tensors shaped like parameters, 0 in rows that no layer covers."""
    tensors: dict[str, Tensor] = {}
    for layer in layers:
        for key, value in unpack(layer.layout, vector[layer.name]).items():
            path = paths[layer.name][key]
            param = params[path]
            value = value.reshape(layer.layout.part(key, param).shape).to(param.dtype)
            if key in layer.layout.rows:
                first, last = layer.layout.rows[key]
                sides = [0, 0] * (param.ndim - 1) + [first, len(param) - last]
                value = nn.functional.pad(value, sides)
            tensors[path] = tensors[path] + value if path in tensors else value
    return tensors


def _by_layer(
    layers: Sequence[Layer], paths: Mapping[str, Mapping[str, str]], grads: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Tensors shaped like parameters as matrices of layers."""
    return {
        layer.name: pack(
            layer.layout,
            {name: grads[paths[layer.name][key]] for key, name in layer.layout.params.items()},
        )
        for layer in layers
    }


def hessian_product(loss: Likelihood, outputs: Tensor) -> Callable[[Tensor], Tensor]:
    """u → H u, H the Hessian of every term in its outputs."""
    wide = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
    # subclasses may have terms of their own
    if type(loss) is CrossEntropy:
        p = wide.softmax(-1)
        return lambda u: p * (u - (p * u).sum(-1, keepdim=True))
    if type(loss) is SquaredError or type(loss) is BinaryCrossEntropy:
        second = loss.second(wide)
        return lambda u: second * u
    roots = list(loss.roots(wide))
    return lambda u: sum(
        (root * (root * u).sum(-1, keepdim=True) for root in roots), torch.zeros_like(u)
    )


@contextmanager
def _named_errors() -> Iterator[None]:
    """Say what to do about a model that cannot be differentiated forward."""
    try:
        yield
    except RuntimeError as error:  # of which NotImplementedError is one
        if not any(word in str(error) for word in TRANSFORMS):
            raise
        raise ValueError(
            "the model has an operation that torch.func cannot differentiate forward "
            f"({str(error).splitlines()[0]:.160}); score without refine"
        ) from error


@contextmanager
def _with_forward_derivatives(model: nn.Module) -> Iterator[None]:
    """Attention and GroupNorm by operators that have forward derivatives.

    Fused attention has none, and GroupNorm none for channels-last inputs.
    """
    norms = [module for module in model.modules() if isinstance(module, nn.GroupNorm)]
    hooks = [norm.register_forward_pre_hook(_contiguous) for norm in norms]
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)
        for hook in hooks:
            hook.remove()


def _contiguous(norm: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(x.contiguous() for x in inputs)
