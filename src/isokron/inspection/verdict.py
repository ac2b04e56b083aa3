"""The answer in words, and its circumstances."""

from __future__ import annotations

import math

from isokron.inspection.memory import by_policy
from isokron.inspection.results import Inspection, LayerFacts
from isokron.pages.numbers import memory


def verdict(result: Inspection) -> list[str]:
    """Conditions, directions that matter, where diagonal scaling is not enough, and memory."""
    alive = [f for f in result.layers if f.trace > 0]
    if not alive:
        return ["No layer has any curvature: all gradients are zero."]
    return [
        sentence
        for sentence in (_conditions(result, alive), _ranks(alive), _scaling(alive), _cost(result))
        if sentence
    ]


def worst(layers: list[LayerFacts]) -> LayerFacts:
    """By largest over mean eigenvalue: the smallest is often rounding, and damping hides it."""
    return max(layers, key=lambda f: f.largest / f.mean)


def _conditions(result: Inspection, alive: list[LayerFacts]) -> str:
    facts = worst(alive)
    damping = result.settings["damping"]
    peak = (
        f"The largest eigenvalue of {called(facts)} is {number(facts.largest / facts.mean)} times"
    )
    words = "" if len(alive) == 1 else f", the most of {len(alive)} layers"
    if not damping:
        return f"{peak} its mean{words}."
    return (
        f"{peak} its mean{words}; damped by {damping:g} of the mean, its condition "
        f"number is {number(facts.condition_damped)}."
    )


def _ranks(alive: list[LayerFacts]) -> str:
    rank, dimension = sum(f.effective_rank for f in alive), sum(f.dimension for f in alive)
    low, high = min(alive, key=lambda f: f.share), max(alive, key=lambda f: f.share)
    between = (
        f", from {percent(low.share)} in {called(low)} to {percent(high.share)} in {called(high)}"
        if len(alive) > 1
        else ""
    )
    return (
        f"About {rank:,.0f} of {dimension:,} directions matter ({percent(rank / dimension)})"
        f"{between}."
    )


def _scaling(alive: list[LayerFacts]) -> str:
    known = [(f.scaled_share, f) for f in alive if f.scaled_share is not None]
    if not known:
        return ""
    share, facts = min(known, key=lambda both: both[0])
    return (
        f"A Kronecker preconditioner has most room in {called(facts)}: with its diagonal made "
        f"even, its curvature still lies in {percent(share)} of the directions."
    )


def _cost(result: Inspection) -> str:
    found = {p.policy: p for p in by_policy(result.layers, result.settings["examples"])}
    none, auto = found["none"], found["auto"]
    ratio = f"{none.total / (2 * result.model_bytes):.2g}× AdamW's two states"
    text = f"K-FAC's statistics take {memory(none.total)}, {ratio}"
    if auto.total < none.total:
        return f"{text}; under policy auto, {memory(auto.total)}."
    examples = f"{result.settings['examples']:,} examples"
    return f"{text}; keeping the gradients of {examples} instead would not make them smaller."


def circumstances(result: Inspection) -> str:
    """What was inspected, in one sentence."""
    s = result.settings
    weights = f"{s['parameters']:,} parameters, {_trained(s['weights'], s['training'])}"
    return (
        f"{weights}, evaluation loss {result.loss:.4f} {s['unit']}. "
        f"{s['method']} of {s['examples']:,} examples ({result.terms:,} loss terms), "
        f"{s['fisher']} Fisher."
    )


def _trained(weights: str, training: str) -> str:
    given = weights if weights.startswith("made") else f"from {weights}"
    return f"{given}, untrained" if training == "none" else f"{given}, after {training}"


def number(value: float) -> str:
    """A condition number: three digits, thousands apart, powers of ten where it is large."""
    if not math.isfinite(value):
        return "infinite"
    return f"{value:.1e}" if value >= 1e6 else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def percent(share: float) -> str:
    return f"{100 * share:.2g} %" if share < 0.1 else f"{100 * share:.0f} %"


def called(facts: LayerFacts) -> str:
    """A layer in a sentence; the parts of nn.Sequential are numbers."""
    return f"layer {facts.name}" if facts.name.isdecimal() else facts.name or "the model"
