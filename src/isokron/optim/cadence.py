"""When a block's operator is made anew: at `start`, ever less often, then every so many steps.

Through a `warmup` it is made anew in every step, and counting begins after it.

Functions take `turn`: how many gradients a block has seen, less the steps its turn is shifted by.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from isokron.optim.blocks import Batch


def refresh_delay(group: Mapping[str, Any]) -> int:
    """Steps that a refresh takes on a thread of its own; 0: it is done within its step."""
    return 0 if isinstance(group["refresh"], str) else group["refresh"]


def first(group: Mapping[str, Any]) -> int:
    return 1 if group["warmup"] else group["start"] or group["every"]


def rows_where(asked: Callable[[int], bool], turns: Tensor) -> Tensor:
    """For every row, what is asked of its turn; rows in step with each other are asked once. [B]"""
    every = turns.tolist()
    answers = {turn: asked(int(turn)) for turn in set(every)}
    return torch.tensor([answers[turn] for turn in every], dtype=torch.bool, device="cpu")


def due(turn: int, group: Mapping[str, Any]) -> bool:
    """Whether a refresh begins now: t = start, or t > start and t mod every = 0.

    Before t = every also at start·2, start·4, …: what is known of curvature changes fastest when
    little is. Delayed refreshes, which would overtake each other, do without, and none begins until
    the first has landed.
    """
    if turn <= group["warmup"]:
        return turn > 0
    turn, every = turn - group["warmup"], group["every"]
    start = group["start"] or every
    if turn <= start:
        return turn == start
    delay = refresh_delay(group)
    if turn < every and not delay:
        times, rest = divmod(turn, start)
        return rest == 0 and times & (times - 1) == 0
    return turn % every == 0 and (not delay or turn > start + delay)


def landing(turn: int, group: Mapping[str, Any]) -> bool:
    """Whether a refresh that began `refresh` steps ago takes effect now."""
    return due(turn - refresh_delay(group), group)


def unready(turn: int, group: Mapping[str, Any]) -> bool:
    """Whether there is no operator yet."""
    return turn - refresh_delay(group) < first(group)


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
            phase = load.index(min(load))
            batch.phase[row] = phase
            load[phase] += cost


def check_cadence(group: Mapping[str, Any]) -> str | None:
    """What is wrong with a delay, if anything: a refresh must land before the next begins."""
    delay = refresh_delay(group)
    if delay and group["warmup"]:
        return f"a word with a warmup, whose steps refresh at once (warmup={group['warmup']})"
    if delay < group["every"]:
        return None
    return f"below every={group['every']}, the steps from one refresh to the next"
