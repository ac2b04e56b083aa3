"""Examples that are not finite, on 2 and 3 processes: named by all, or skipped by all."""

import sys
import warnings
from pathlib import Path

import torch
from torch import Tensor
from torch import distributed as dist

from isokron.attribution import Attributor
from isokron.distributed import Ranks
from processes import outcomes, run

sys.path.insert(0, str(Path(__file__).parents[1] / "attribution"))
from test_bad_examples import BAD, GOOD, IDS, begun, pairs


def world() -> Ranks | None:
    return Ranks(dist.group.WORLD, 60.0) if dist.is_initialized() else None


def opened(folder: Path, on_bad: str) -> Attributor:
    warnings.simplefilter("ignore", UserWarning)
    # batches of one example: every rank has some
    return begun(folder, pairs(), on_bad=on_bad, batch_size=1, ranks=world())


def scored(folder: Path) -> dict[str, Tensor]:
    a = opened(folder, "skip").fit()
    exact = a.score(pairs()[:2])
    stored = opened(folder, "skip").build(dim=4).score(pairs()[:2])
    assert exact.skipped == {IDS[number]: reason for number, reason in BAD.items()}
    return {"exact": exact.as_subclass(Tensor), "stored": stored.as_subclass(Tensor)}


def fitted(folder: Path) -> str:
    opened(folder, "raise").fit()
    return "fitted"


def test_all_ranks_skip_the_same_examples(tmp_path: Path) -> None:
    right = scored(tmp_path / "alone")
    assert right["exact"].shape == (2, len(GOOD))
    for count in (2, 3):
        for results in run(count, scored, tmp_path / f"{count}"):
            for name, scores in results.items():
                torch.testing.assert_close(scores, right[name], rtol=1e-3, atol=1e-4)


def test_one_rank_names_the_example_and_the_others_end(tmp_path: Path) -> None:
    errors = [str(result) for result in outcomes(2, fitted, tmp_path)]
    assert len([error for error in errors if "example 'row 5' has a loss of nan" in error]) == 1
    assert len([error for error in errors if "failed in a pass over the data" in error]) == 1
