"""When a block's operator is made anew: at `start`, ever less often, then every so many steps.

Through a `warmup` it is made anew in every step, and counting begins after it.

Functions take `step`, how many gradients a block has seen, and `phase`, by how many steps its turn
is shifted.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from isokron.optim.blocks import Batch


def first(group: Mapping[str, Any]) -> int:
    return 1 if group["warmup"] else group["start"] or group["every"]


def due(step: int, phase: int, group: Mapping[str, Any]) -> bool:
    """Whether a refresh begins now: t = start, or t > start and t mod every = 0.

    Before t = every also at start·2, start·4, …: what is known of curvature changes fastest when
    little is. Delayed refreshes, which would overtake each other, do without.
    """
    turn, every = step - phase - group["warmup"], group["every"]
    start = group["start"] or every
    if turn <= 0:
        return step > phase
    if turn <= start:
        return turn == start
    if turn < every and not group["delay"]:
        times, rest = divmod(turn, start)
        return rest == 0 and times & (times - 1) == 0
    return turn % every == 0


def landing(step: int, phase: int, group: Mapping[str, Any]) -> bool:
    """Whether a refresh that began `delay` steps ago takes effect now."""
    return due(step - group["delay"], phase, group)


def unready(step: int, phase: int, group: Mapping[str, Any]) -> bool:
    """Whether there is no operator yet."""
    return step - phase - group["delay"] < first(group)


def take_turns_(batches: Sequence[Batch], group: Mapping[str, Any]) -> None:
    """Spread the rows of all batches over `every` steps, the costly ones first, by least load.

    A refresh costs about Σ dᵢ³, dᵢ the dimensions that have a factor. Equal batches give equal
    turns, so that a resumed run keeps them.
    """
    load = [0.0] * group["every"]
    longest = group["max_dim"] or max((max(batch.shape) for batch in batches), default=1)
    costs = [sum(float(d) ** 3 for d in batch.shape if d <= longest) for batch in batches]
    for batch, cost in sorted(zip(batches, costs, strict=True), key=lambda pair: -pair[1]):
        for row in range(len(batch.rows)):
            batch.phase[row] = load.index(min(load))
            load[batch.phase[row]] += cost


def check_cadence(group: Mapping[str, Any]) -> str | None:
    """What is wrong with `delay`, if anything: a refresh must land before the next begins."""
    if group["delay"] == 0:
        return None
    if group["warmup"]:
        return f"0 with a warmup, which is every step's own (warmup={group['warmup']})"
    gap = group["every"] - first(group) % group["every"]
    if group["delay"] < gap:
        return None
    return (
        f"below {gap}, the steps from one refresh to the next (every={group['every']}, "
        f"start={first(group)})"
    )
