"""What runs amount to: reaching, best learning rate, standings."""

import pytest

from isokron.race.results import first_crossing, summarize


def result_of(runs, seeds=1):
    names = list(dict.fromkeys(run.optimizer for run in runs))
    return summarize({"optimizers": names, "seeds": seeds, "steps": 20}, runs)


def standings(runs, seeds=1):
    return result_of(runs, seeds).standings


@pytest.mark.parametrize(
    ("losses", "target", "crossing"),
    [
        ((4, 2, 1), 3, 5.0),  # half way down the first line
        ((4, 2, 1), 1.25, 17.5),
        ((4, 2, 1), 2, 10.0),  # exactly at a point
        ((4, 2, 1), 0.5, None),  # never
        ((4, 2, 1), 5, 0.0),  # from the start
        ((4, 1, 3, 0), 2, 20 / 3),  # the first of two crossings
    ],
)
def test_first_crossing_is_interpolated(losses, target, crossing):
    found = first_crossing([0, 10, 20, 30][: len(losses)], losses, target)
    assert found == (None if crossing is None else pytest.approx(crossing))


def test_a_learning_rate_with_one_diverged_seed_is_never_best(make_run):
    runs = [
        make_run(lr=0.1, seed=0, losses=(3, 1.0)),
        make_run(lr=0.1, seed=1, losses=(3, 1.2)),
        make_run(lr=0.3, seed=0, losses=(3, 0.1)),
        make_run(lr=0.3, seed=1, losses=(3,), status="diverged"),
    ]
    (standing,) = standings(runs, seeds=2)
    assert (standing.setting.lr, standing.final) == (0.1, pytest.approx(1.1))


def test_no_learning_rate_is_best_if_all_diverged(make_run):
    (standing,) = standings([make_run(lr=lr, status="diverged") for lr in (0.1, 0.3)])
    assert (standing.setting, standing.diverged) == (None, 2)


def test_reaching_is_measured_against_adamws_final_loss(make_run):
    runs = [
        make_run("adamw", losses=(5, 3, 2, 1), seed=0),
        make_run("adamw", losses=(5, 3, 2, 1), seed=1),
        make_run("quick", losses=(5, 1.5, 0.5, 0.2), seed=0, optimizer_seconds=0.014),
        make_run("quick", losses=(5, 1.5, 0.5, 0.4), seed=1, optimizer_seconds=0.014),
        make_run("slow", losses=(5, 4, 3, 2), seed=0),
        make_run("slow", losses=(5, 4, 3, 2), seed=1),
    ]
    adamw, quick, slow = standings(runs, seeds=2)
    assert (adamw.steps_to_reach, adamw.steps_share, adamw.time_share) == (30, 1, 1)
    assert quick.steps_to_reach == pytest.approx(15)
    assert quick.steps_share == pytest.approx(1 / 2)
    assert quick.seconds_to_reach == pytest.approx(15 * 0.024)
    assert quick.time_share == pytest.approx(15 * 0.024 / (30 * 0.012))
    assert quick.final == pytest.approx(0.3)
    assert quick.spread == pytest.approx(0.1414, abs=1e-4)
    assert slow.steps_to_reach is slow.time_share is None


def test_edge_is_flagged_only_at_the_ends_of_the_sweep(make_run):
    runs = [make_run(lr=lr, losses=(3, loss)) for lr, loss in ((0.1, 2), (0.3, 1), (1.0, 2))]
    (standing,) = standings(runs)
    assert (standing.setting.lr, standing.edge) == (0.3, False)
    (standing,) = standings(runs[:2])
    assert (standing.setting.lr, standing.edge) == (0.3, True)


def test_learning_rates_that_lack_seeds_are_not_compared(make_run):
    runs = [make_run(seed=0), make_run(seed=1), make_run(lr=0.3, seed=0, losses=(3, 0.1))]
    (standing,) = standings(runs, seeds=2)
    assert standing.setting.lr == 0.1


def test_winner_is_the_lowest_final_loss_and_none_without_finishers(make_run):
    runs = (make_run(), make_run("muon", losses=(3, 2, 0.5)))
    assert result_of(runs).winner.optimizer == "muon"
    assert result_of([make_run(status="diverged")]).winner is None
