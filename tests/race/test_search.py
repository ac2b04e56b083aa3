"""The search for the best setting: on made-up losses, on records, and interrupted."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from isokron import race
from isokron.optimizers_by_name import resolve
from isokron.race.page import learning_rates
from isokron.race.search import CENTRE, Setting, quarter, search_for

STEPS = 100
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def searched(spec, loss, seeds=1):
    """A search that has ended, and its plans."""
    search = search_for(resolve(spec), STEPS, seeds, loss)
    return search, list(search.plans())


def bowl(best_lr, best_ratio):
    """Losses of a quadratic bowl in the logarithms of both rates; longer schedules end lower."""

    def loss(setting, steps, seed):
        x, y = math.log2(setting.lr / best_lr), math.log2(setting.ratio / best_ratio)
        return 1 + x * x + y * y - steps / 1e4 + (setting.decay or 0) - (setting.beta2 or 0)

    return loss


@pytest.mark.parametrize("spec", ["adamw", "muon", "torch.optim:SGD", "adamw(lr_scale=1.0)"])
@pytest.mark.parametrize("best_lr", [1e-4, 1e-3, 0.0141, 0.02, 0.3, 1.0])
@pytest.mark.parametrize("best_ratio", [1, 10])
def test_a_search_ends_at_the_bottom_of_a_bowl_between_two_rates(spec, best_lr, best_ratio):
    search, _ = searched(spec, bowl(best_lr, best_ratio))
    best = search.ranked(search.full, STEPS)[0]
    assert abs(math.log2(best.lr / best_lr)) <= 0.26  # rates are a factor of √2 apart
    assert best.ratio == (1 if "lr_scale" in spec else best_ratio)
    assert (best.decay, best.beta2) == ((0.01, 0.999) if "adamw" in spec else (None, None))
    for settings, steps in ((search.short, quarter(STEPS)), (search.full, STEPS)):
        lowest = search.ranked(settings, steps)[0]
        rates = [setting.lr for setting in settings if setting.ratio == lowest.ratio]
        assert min(rates) < lowest.lr < max(rates)
    assert len({*search.short}) == len(search.short) >= 4
    assert len({*search.full}) == len(search.full) >= 4


def test_settings_are_compared_at_a_quarter_of_the_length_at_the_earliest():
    _, plans = searched("adamw", bowl(0.01, 3), seeds=3)
    lengths = {steps for plan in plans for _, steps, _ in plan}
    assert lengths == {quarter(STEPS), STEPS} == {25, 100}
    assert [(steps, seed) for _, steps, seed in plans[-1]] == [(STEPS, 1), (STEPS, 2)]


@pytest.mark.parametrize(("best_lr", "end"), [(1e-9, CENTRE / 2**8), (1e9, CENTRE * 2**8)])
def test_a_search_ends_at_the_farthest_rates(best_lr, end):
    search, _ = searched("muon", bowl(best_lr, 1))
    assert search.ranked(search.full, STEPS)[0].lr == pytest.approx(end, rel=0.01)


@pytest.mark.parametrize(("bad", "count"), [(math.nan, 3), (math.inf, 10)])
def test_runs_that_all_fail_end_a_search_and_diverged_ones_lower_the_rate(bad, count):
    search, _ = searched("muon(lr_scale=1.0)", lambda *run: bad)
    assert len(search.short) == count
    assert search.full == []


def test_a_search_avoids_what_diverges_or_fails():
    def loss(setting, steps, seed):
        if setting.ratio == 3:
            return math.nan
        # the higher the better until it diverges, at full length earlier
        return math.inf if setting.lr > 0.1 - steps / 2000 else 1 / setting.lr

    search, _ = searched("muon", loss)
    best = search.ranked(search.full, STEPS)[0]
    assert best.lr == 0.04
    assert not any(setting.ratio == 3 for setting in search.full)


def test_the_next_best_is_taken_where_a_seed_diverges():
    bottom = bowl(0.01, 1)

    def loss(setting, steps, seed):
        return math.inf if seed == 2 and setting.lr == 0.01 else bottom(setting, steps, seed)

    search, plans = searched("muon", loss, seeds=3)
    first, second = (plan[0][0] for plan in plans[-2:])
    assert first == Setting("muon", 0.01)
    assert second == search.ranked(search.full, STEPS)[1]


@pytest.mark.parametrize(
    ("spec", "ratios", "decays", "betas"),
    [
        ("adamw", 3, {0.1, 0.01}, {0.95, 0.99, 0.999}),
        ("adamw(weight_decay=0.05)", 3, {None}, {0.95, 0.99, 0.999}),
        ("adamw(betas=(0.9,0.98))", 3, {0.1, 0.01}, {None}),
        ("soap(lr_scale={'matrices':0.5})", 1, {None}, {None}),
        ("soap(match_adamw=True)", 1, {None}, {None}),
        ("natural", 1, {None}, {None}),
        ("torch.optim:SGD(momentum=0.9)", 3, {None}, {None}),
        ("toy:whole_model", 1, {None}, {None}),
    ],
)
def test_what_the_user_chose_is_not_searched_over(spec, ratios, decays, betas):
    search, _ = searched(spec, bowl(0.01, 1))
    assert len({setting.ratio for setting in search.short}) == ratios
    assert {setting.decay for setting in search.short} == decays
    assert {setting.beta2 for setting in search.short} == betas


def test_a_setting_says_what_is_not_adamws_default():
    assert str(Setting("adamw", 0.005, 10, 0.1, 0.99)) == "0.005, rest × 10, β₂ 0.99, decay 0.1"
    assert str(Setting("adamw", 0.005, 1, 0.01, 0.999)) == "0.005"


WALK = """
import json, sys
sys.path.insert(0, {folder!r})
from tuned_races import ADAMW, ONE_RATE, OPTIMIZERS, Study, key_of

study = Study("speeches-tiny")
names = ("name", "lr", "ratio", "decay", "beta2", "steps", "seed")
recorded = [[run[name] for name in names] for run in study.records.runs]


def key(setting, steps, seed):
    values = dict(key_of(setting), steps=steps, seed=seed)
    return [values[name] for name in names]


asked = []
for optimizer in (ONE_RATE, ADAMW, *OPTIMIZERS):
    for plan in study.search(optimizer):
        keys = [key(*run) for run in plan]
        asked += keys
        if not all(key in recorded for key in keys):
            break
matched = [
    key(study.matched(optimizer, lr), study.steps, 0)
    for optimizer in (ADAMW, *OPTIMIZERS)
    for lr in study.rates()
]
print(json.dumps([recorded, asked, matched, study.steps]))
"""


def test_the_search_finds_the_runs_of_the_benchmark_in_their_order():
    # in a process of its own: names of benchmarks' modules would hide packages
    script = WALK.format(folder=str(BENCHMARKS))
    done = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True
    )
    recorded, asked, matched, full = json.loads(done.stdout)
    # the others are shorter schedules, and rates of match_adamw; optimizers may be run alone
    for name, *_, steps, _ in (key for key in recorded if key not in asked + matched):
        assert steps not in (quarter(full), full), name
    for name in {key[0] for key in asked}:
        searched = [repr(key) for key in recorded if key in asked and key[0] == name]
        unique = dict.fromkeys(repr(key) for key in asked if key in recorded and key[0] == name)
        assert searched == list(unique)
        assert searched or name not in ("adamw", "shampoo")


def tuned(task, out, **more):
    return race.run(task, ["sign"], **({"steps": 12, "seeds": 2, "out": out} | more))


@pytest.fixture(scope="module")
def whole(task, tmp_path_factory):
    """The folder and the result of a race that was not stopped."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, tuned(task, folder)


@pytest.mark.parametrize("n", [1, 30, 55])
def test_a_stopped_search_is_resumed_to_the_same_result(task, whole, tmp_path, n):
    def impatient(stage, done, total, note=""):
        if stage.startswith(f"run {n} of") and done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tuned(task, tmp_path, progress=impatient)
    folder = tmp_path / "runs"
    before = {path: path.read_bytes() for path in folder.iterdir()}
    assert len(before) == n - 1
    resumed, unstopped = tuned(task, tmp_path, resume=True), whole[1]
    assert [s.tried for s in resumed.standings] == [s.tried for s in unstopped.standings]
    assert [s.setting for s in resumed.standings] == [s.setting for s in unstopped.standings]
    assert {path: path.read_bytes() for path in before} == before
    names = {path.name for path in (whole[0] / "runs").iterdir()}
    assert {path.name for path in folder.iterdir()} == names


def test_everything_tried_is_told_in_json_and_on_the_page(whole):
    folder, result = whole
    saved = json.loads((folder / "race.json").read_text())["standings"][0]
    assert len(saved["tried"]) == len(result.standings[0].tried) > 24
    assert set(saved["tried"][0]) == {"setting", "steps", "seeds", "loss"}
    html = (folder / "index.html").read_text()
    assert html.count("<td>3 steps</td>") == sum(
        t.steps == 3 for s in result.standings for t in s.tried
    )
    assert "Tuned on the first seed, all in the same way" in html
    assert f"<td>{result.standings[0].setting}" in html


def test_the_plot_has_the_best_loss_at_each_rate_on_the_seed_of_the_search(whole):
    _, result = whole
    plot = learning_rates(result)
    rings = [(mark.colour, mark.x) for mark in plot.marks if mark.ring]
    assert rings == [(i, s.setting.lr) for i, s in enumerate(result.standings)]
    thick = [line for line in plot.lines if not line.thin]
    assert [line.thin for line in plot.lines] == [True, True, False, False]
    for i, line in enumerate(thick):
        runs = [run for run in result.runs_of(result.standings[i].optimizer) if run.seed == 0]
        rates = sorted({run.lr for run in runs})
        lowest = [min(run.final for run in runs if run.lr == lr) for lr in rates]
        assert line.points == list(zip(rates, lowest, strict=True))


def test_an_external_optimizer_gets_two_rates_on_a_real_model():
    options = "(weight_decay=0.0,betas=(0.9,0.99))"
    specs = [f"adamw{options}", f"torch.optim:AdamW{options}"]
    lr = {"adamw": [0.005], "*": [0.005, (0.005, 10)]}
    result = race.run("speeches-tiny", specs, steps=2, seeds=1, lr=lr)
    _, ours, theirs = result.standings
    losses = [
        [run.train_losses for run in sorted(result.runs_of(s.optimizer), key=lambda run: run.ratio)]
        for s in (ours, theirs)
    ]
    for mine, other in zip(*losses, strict=True):
        assert mine == pytest.approx(other, rel=1e-4)
    assert losses[0][0][1:] != losses[0][1][1:]


def test_tuning_is_not_taken_for_a_search_for_the_shortest_schedule(task, tmp_path):
    results = [
        race.run(task, ["muon"], steps=40, seeds=1, out=tmp_path, resume=True, shortest=shortest)
        for shortest in (False, True, False)
    ]
    assert [result.searched for result in results] == [False, True, True]
    assert {run.steps for run in results[0].probes} == {10}
    shortest = results[1].standings[1].shortest
    assert shortest == results[2].standings[1].shortest
    assert 10 < shortest.steps < 40
    settings = {run.setting for run in results[1].probes if run.steps != 10}
    assert settings == {results[1].standings[1].setting}
