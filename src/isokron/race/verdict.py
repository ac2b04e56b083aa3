"""The outcome of a race, and its circumstances, in a sentence each."""

from __future__ import annotations

from isokron.race.results import Result, Shortest, Standing


def verdict(result: Result) -> str:
    """Who ends lowest, and what was gained on AdamW: by own schedules where those were tried."""
    winner = result.winner
    if winner is None:
        return "No optimizer has finished a run at any learning rate yet."
    lowest = f"{winner.optimizer} ends lowest, at {winner.final:.4f} {result.settings['unit']}"
    name, gain = _by_schedule(result) if result.searched else _by_crossing(result.standings)
    if not gain:
        return f"{lowest}."
    who = " and" if name == winner.optimizer else f"; {name}"
    return f"{lowest}{who} reaches AdamW's final loss {gain}."


def _by_schedule(result: Result) -> tuple[str, str]:
    found = [(s.shortest, s.optimizer) for s in result.standings if s.shortest is not None]
    shorter = [both for both in found if both[0].share < 1]
    if not shorter:
        return "no optimizer", "on a shorter schedule" if result.complete else ""
    best, name = min(shorter, key=lambda both: both[0].share)
    return name, f"on a schedule of {best.steps} steps, {_shares(best)}"


def _shares(shortest: Shortest) -> str:
    time = shortest.time_share
    return f"{shortest.share:.2f}× AdamW's" + (f", in {time:.2f}× its time" if time else "")


def _by_crossing(standings: tuple[Standing, ...]) -> tuple[str, str]:
    quick = [s for s in standings if s.fewer_steps and s.fewer_steps > 1.005]
    if not quick:
        return "", ""
    best = max(quick, key=lambda s: s.fewer_steps or 0)
    ratio = best.less_time or 1.0
    time = f"{ratio:.2f}× less time" if ratio >= 1 else f"{1 / ratio:.2f}× more time"
    return best.optimizer, f"in {best.fewer_steps:.2f}× fewer steps and {time}"


def circumstances(result: Result) -> str:
    """Size and length of the race in one sentence."""
    s = result.settings
    seeds = "one seed" if s["seeds"] == 1 else f"{s['seeds']} seeds"
    return (
        f"{s['parameters']:,} parameters, {s['training examples']:,} training examples, "
        f"{s['steps']:,} steps of {s['batch size']}, {seeds}. All optimizers start from the same "
        "weights and see the same batches under the same schedule; each is shown at its own best "
        "learning rate."
    )
