"""A FAISS index finds what products with all rows find."""

import sys
from pathlib import Path

import pytest
import torch
from letters import subject

from isokron.attribution import Ask, Asker, Build, Run, build, fit, read_queries
from isokron.attribution.ranking import Faiss, top


@pytest.mark.parametrize("unit", [False, True])
def test_an_index_finds_what_products_find(unit: bool, tmp_path: Path) -> None:
    pytest.importorskip("faiss")
    run = Run.begin(tmp_path / "run", subject())
    fit(run)
    store = build(run, Build(dim=4))
    asker = Asker(run, Ask(unit=unit))
    index = Faiss(store, 2**20, unit)
    for query in read_queries(run.subject.task, ["eval:0-2", "abcabc"]):
        found, right = index.top(asker.rows([query]), 5), top(asker.scores([query]).of[0], 5)
        for mine, theirs in zip(found, right, strict=True):
            assert mine[0].tolist() == theirs[0].tolist()
            torch.testing.assert_close(mine[1], theirs[1])


def test_without_faiss_one_is_told_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "faiss", None)
    run = Run.begin(tmp_path / "run", subject())
    store = build(run, Build(dim=4, whiten=False))
    with pytest.raises(ModuleNotFoundError, match="pip install faiss-cpu"):
        Faiss(store, 2**20)
