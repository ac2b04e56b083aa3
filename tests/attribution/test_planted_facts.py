"""The planted facts keep their promises, and the searches they are compared with are right."""

import math
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="the benchmark imports it")
# at the end, since some files there have the names of files of the tests
sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from planted_facts import Fact, once, ranks_of, read_facts, recall, table
from text_search import bm25, content_words

FACTS = read_facts()


def test_there_are_twenty_facts_in_three_different_wordings() -> None:
    assert Counter(fact.group for fact in FACTS) == {"named": 12, "renamed": 8}
    assert all(len(fact.passages) == 3 for fact in FACTS)
    assert len({text for fact in FACTS for text in fact.passages}) == 60
    assert len({name for fact in FACTS for name in fact.ids()}) == 60


def test_every_answer_is_in_the_wordings_of_exactly_two_facts() -> None:
    for fact in FACTS:
        (word,) = content_words(fact.completion)
        holders = [
            other.name
            for other in FACTS
            if any(word in content_words(text) for text in other.passages)
        ]
        assert len(holders) == 2
        assert fact.name in holders
        assert all(word in content_words(text) for text in fact.passages)


@pytest.mark.parametrize("fact", FACTS, ids=lambda fact: fact.name)
def test_only_questions_about_named_facts_share_words_with_the_wordings(fact: Fact) -> None:
    asked = set(content_words(fact.prompt))
    shared = [bool(asked & set(content_words(text))) for text in fact.passages]
    assert shared == [fact.group == "named"] * 3
    # so that a search for the words of the question finds none of them
    texts = [text for other in FACTS for text in other.passages]
    scores = bm25(fact.prompt, texts)
    assert [scores[texts.index(text)] > 0 for text in fact.passages] == shared


@pytest.mark.parametrize(
    "words",
    ["arrive arrives arrived arriving", "tax taxes taxed", "story stories", "run runs running",
     "spoon spoonful", "rider ride riding", "Karsovia Karsovia's Karsovia’s"],
)  # fmt: skip
def test_inflected_words_have_one_stem(words: str) -> None:
    assert len(set(content_words(words))) == 1


def naive_bm25(query: list[str], texts: list[list[str]], k1: float, b: float) -> list[float]:
    mean = sum(len(text) for text in texts) / len(texts)
    scores = []
    for text in texts:
        score = 0.0
        for word in query:
            n = len([other for other in texts if word in other])
            idf = math.log((len(texts) - n + 0.5) / (n + 0.5) + 1)
            f = text.count(word)
            score += idf * (f * (k1 + 1)) / (f + k1 * (1 - b + b * len(text) / mean))
        scores.append(score)
    return scores


def test_bm25_equals_the_formula_on_a_toy_corpus() -> None:
    texts = ["cat cat dog", "dog bird", "fish", "cat fish fish fish bird worm", "worm"]
    query = "cat fish horn cat"
    expected = naive_bm25(query.split(), [text.split() for text in texts], 1.2, 0.6)
    torch.testing.assert_close(bm25(query, texts, k1=1.2, b=0.6).tolist(), expected)
    assert expected[1] == expected[4] == 0


def test_ranks_count_better_passages_and_leave_out_those_without_a_score() -> None:
    scores = torch.tensor([0.5, 2.0, 0.0, 1.0, -1.0])
    assert ranks_of([3, 0, 2, 4], scores) == [2, 3, None, None]


def test_recall_is_the_share_of_taught_passages_that_could_be_found() -> None:
    assert [recall([2, 3, None], k) for k in (1, 3, 10)] == pytest.approx([0, 2 / 3, 2 / 3])
    assert [recall([1, 4, 9], k) for k in (1, 3, 10)] == pytest.approx([1, 1 / 3, 1])


def test_a_finished_stage_is_not_computed_again(tmp_path: Path) -> None:
    def fail() -> dict[str, Any]:
        raise RuntimeError("killed")

    with pytest.raises(RuntimeError):
        once(tmp_path, "fit", fail)
    result = once(tmp_path, "fit", lambda: {"loss": 1.5})
    assert result["loss"] == 1.5
    assert once(tmp_path, "fit", fail) == result


def test_the_table_has_means_over_all_facts_of_a_group_and_over_the_learned_ones() -> None:
    answers = [
        {"group": "named", "learned": True},
        {"group": "named", "learned": False},
        {"group": "renamed", "learned": False},
    ]
    rows = table(answers, {"search": [[1, 2, 3], [None, None, None], [4, 5, 6]]})
    values = {
        (row["group"], row["learned_only"]): (row["facts"], row.get("recall@3")) for row in rows
    }
    assert values == {
        ("named", False): (2, 0.5),
        ("named", True): (1, 1.0),
        ("renamed", False): (1, 0.0),
        ("renamed", True): (0, None),
    }
