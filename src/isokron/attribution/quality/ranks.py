"""How well one set of numbers puts things in the order of another: Spearman's ρ, and the AUC."""

import torch
from torch import Tensor


def ranks(values: Tensor) -> Tensor:
    """Places in ascending order from 0, the mean of theirs for equals. [..., n], float64"""
    _check_ordered(values)
    ordered, order = values.sort(-1)
    count = values.size(-1)
    place = torch.arange(count, device=values.device).expand_as(order)
    differs = ordered[..., 1:] != ordered[..., :-1]
    edge = torch.ones_like(order[..., :1], dtype=torch.bool)
    begins = torch.cat([edge, differs], -1)
    ends = torch.cat([differs, edge], -1)
    first = torch.where(begins, place, 0).cummax(-1).values
    last = torch.where(ends, place, count).flip(-1).cummin(-1).values.flip(-1)
    mean = (first + last).double() / 2
    return torch.empty_like(mean).scatter_(-1, order, mean)


def spearman(x: Tensor, y: Tensor) -> Tensor:
    """Correlation of ranks along the last dimension, [..., n] → [...]; 0 where one is constant."""
    if x.shape != y.shape or x.ndim == 0 or x.size(-1) < 2:
        raise ValueError(
            "Spearman's ρ needs two tensors of one shape with at least 2 numbers in a row, got "
            f"{tuple(x.shape)} and {tuple(y.shape)}"
        )
    x, y = ranks(x), ranks(y)
    x, y = x - x.mean(-1, keepdim=True), y - y.mean(-1, keepdim=True)
    lengths = (x.square().sum(-1) * y.square().sum(-1)).sqrt()
    return torch.where(lengths > 0, (x * y).sum(-1) / lengths.clamp_min(1e-300), 0.0)


def auc(scores: Tensor, positive: Tensor) -> float:
    """How likely a positive has a larger score than one that is not, half for equals. [n], [n]"""
    if scores.shape != positive.shape or scores.ndim != 1 or positive.dtype != torch.bool:
        raise ValueError(
            "an AUC needs scores [n] and as many booleans, got "
            f"{tuple(scores.shape)} and {positive.dtype} {tuple(positive.shape)}"
        )
    found, rest = int(positive.sum()), int((~positive).sum())
    if not found or not rest:
        raise ValueError(f"an AUC needs both kinds, got {found} positive and {rest} others")
    # Mann–Whitney: the ranks of the positives, less those they have among themselves
    above = float(ranks(scores)[positive].sum()) - found * (found - 1) / 2
    return above / (found * rest)


def _check_ordered(values: Tensor) -> None:
    if bool(values.isnan().any()):
        raise ValueError("NaN has no rank; look for where the scores or losses come from")
