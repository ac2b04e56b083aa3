"""Leaves that `stacked` seems to be wrong for, told from their shapes."""

import warnings
from collections.abc import Sequence
from typing import Any

import jax

from isokron.block_layout import is_matrix, merge_dims
from isokron.jax.settings import values_by_path

Leaf = tuple[Any, tuple[int, ...]]  # path and shape
KERNELS = (3, 5, 7, 9)  # lengths of convolution kernels


def warn_of_stacks(optimizer: str, tree: Any, stacked: Any) -> None:
    """Warn of matrices that are taken for stacks of vectors, and of stacks taken for matrices."""
    leaves = [(path, tuple(leaf.shape)) for path, leaf in jax.tree.leaves_with_path(tree)]
    lost = _lost_matrices(leaves, values_by_path("stacked", tree, stacked))
    if lost:
        warnings.warn(
            f"{optimizer}: stacked takes the matrices {_named(lost)} for stacks of vectors; if "
            "their first dimension counts no layers, give stacked a tree with 0 for them",
            stacklevel=3,
        )
    mixed = _mixed_stacks(leaves) if isinstance(stacked, int) and not stacked else []
    if mixed:
        warnings.warn(
            f"{optimizer}: {_named(mixed)} share their first dimension, which is merged with the "
            "next; if it counts layers (as under scan) or experts, give stacked a tree with 1 for "
            "them, or else with 0",
            stacklevel=3,
        )


def _lost_matrices(leaves: Sequence[Leaf], depths: Sequence[int | None]) -> list[Leaf]:
    """Matrices that `stacked` leaves no matrix of; not biases [layers, n] of stacked matrices."""
    pairs = [(leaf, depth or 0) for leaf, depth in zip(leaves, depths, strict=True)]
    stacks = {leaf[1][:depth] for leaf, depth in pairs if is_matrix(leaf[1], depth)}
    return [
        leaf
        for leaf, depth in pairs
        if is_matrix(leaf[1]) and not is_matrix(leaf[1], depth) and leaf[1][:depth] not in stacks
    ]


def _mixed_stacks(leaves: Sequence[Leaf]) -> list[Leaf]:
    """The leaves of subtrees in which all have one first dimension, as layers under scan have."""
    subtrees: dict[Any, list[Leaf]] = {}
    for leaf in leaves:
        for length in range(len(leaf[0])):
            subtrees.setdefault(leaf[0][:length], []).append(leaf)
    mixed: dict[Any, Leaf] = {}
    for members in subtrees.values():
        if len(members) > 1 and len({shape[:1] for _, shape in members}) == 1:
            vectors = any(len(shape) == 2 for _, shape in members)
            mixed |= {path: (path, s) for path, s in members if _is_mixed(s, vectors)}
    return list(mixed.values())


def _is_mixed(shape: tuple[int, ...], vectors: bool) -> bool:
    """Whether the first dimension is merged with others, and is not that of a kernel."""
    if sum(size != 1 for size in shape) < 3 or merge_dims(shape, order=2)[0] == shape[0]:
        return False
    kernel = len(shape) > 3 and shape[0] == shape[1]
    return not kernel and (vectors or shape[0] not in KERNELS)


def _named(leaves: Sequence[Leaf]) -> str:
    texts = [f"{jax.tree_util.keystr(path)} {shape}" for path, shape in leaves]
    more = f" and {len(texts) - 3} more" if len(texts) > 3 else ""
    return ", ".join(texts[:3]) + more
