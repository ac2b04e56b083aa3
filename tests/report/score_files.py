"""Invented but complete scores/*.json files, as a run writes them."""

import json

import torch

from isokron.tasks import Shown

WORDS = ["We", " hold", "\n", "these", " truths"]


def text(words=WORDS, label="", title="", context="Before. "):
    return Shown(tuple(words), context, label=label, title=title).to_json()


def image(label, width=8):
    ramp = torch.arange(width * width).reshape(width, width) * 4 % 256
    return Shown(image=ramp.to(torch.uint8), label=label).to_json()


def item(example, score, shown, positive=20.0, **fields):
    count = len(shown.get("tokens", ())) or None
    return {
        **{"example": example, "id": f"id-{example}", "score": score, "share": score / positive},
        **{
            "nats": None,
            "noisy": False,
            "per_token": score / count if count else None,
            "cosine": 0.25,
        },
        **{"tokens_counted": count, "loss": 2.5, "tokens": [], "layers": [], "shown": shown},
        **fields,
    }


def answer(query, shown, proponents, opponents, **fields):
    edges = [-5 + k / 4 for k in range(41)]
    return {
        **{"query": query, "shown": shown, "loss": 12.0, "tokens_counted": 5, "said": None},
        **{"token_losses": [], "token_scores": [], "generated": False, "standard_error": None},
        **{"positive": 20.0, "verify": None, "calibration": None},
        **{"proponents": proponents, "opponents": opponents},
        **{"histogram": [edges, [k % 7 for k in range(40)]], **fields},
    }


def text_answer(query="what is said", **fields):
    """An answer by token; the second proponent has nothing to show, the opponent is long."""
    tokens = [1.0, 2.5, -0.5, 0.0, 0.0]
    proponents = [
        item(7, 3.0, text(title="A title"), tokens=tokens, cosine=0.2, nats=0.0123),
        item(8, 2.0, {"label": "tax"}, cosine=0.5, tokens_counted=400, per_token=0.005),
    ]
    opponent = item(9, -4.0, text(WORDS * 90), tokens=[-1.0, 0.2, 0.0, 0.0, 0.1] * 90)
    details = {
        **{"token_losses": [4.0, 2.0, 0.5, 3.5, 2.0], "token_scores": [1.0, 6.0, 0.0, -2.0, 1.0]},
        **{"said": "We have\nthe truth", "generated": True, "calibration": 0.0041},
        "verify": {
            **{"step": 0.001, "before": 12.0},
            **{"proponents": -0.8, "random": -0.05, "opponents": 0.3},
        },
    }
    return answer(query, [text()], proponents, [opponent], **(details | fields))


def image_answer(k, **fields):
    """A classifier's answer: images and labels, no tokens."""
    proponents = [item(n, 3.0 - n, image(str(n % 3))) for n in range(3)]
    opponents = [item(7, -1.0 - k, image("0"))]
    shown = [image(str(k % 3))]
    return answer(f"picture {k}", shown, proponents, opponents, tokens_counted=None, **fields)


def noisy_answer():
    """An answer of a projected run: the second proponent is below its noise."""
    proponents = [item(1, 3.0, image("1")), item(2, 0.5, image("1"), noisy=True)]
    return answer("noisy", [image("1")], proponents, [], standard_error=0.4)


def record(name="first", answers=None, layers=(), **fields):
    """A whole file."""
    left_out = [
        {"name": "lm_head", "reason": "49,152 outputs", "parameters": 28311552},
        {"name": "model.embed_tokens", "reason": "embedding", "parameters": 1},
    ]
    coverage = {"covered": 106_000_000, "total": 135_000_000, "left_out": left_out}
    coverage["summary"] = "covers 106 of 135 M parameters; left out: lm_head, embed_tokens"
    method = {
        **{"method": "kfac", "fisher": "empirical", "damping": 0.1, "scoring": "exact"},
        **{"damping_rule": "0.1 of each layer's mean eigenvalue, split over both sides"},
        **{"why": "2 queries cost less than a store", "dim": None, "mode": "individual"},
        "coverage": coverage,
    }
    return {
        **{"format": "isokron scores", "version": 3, "name": name},
        "command": "isokron attribute runs/mine --query 'what is said'",
        "run": {"model": "toy", "data": "toy.jsonl", "examples": 1234, "terms": 9e3, "skipped": {}},
        "method": method | fields.pop("method", {}),
        "noise": None,
        "layers": list(layers),
        "answers": [text_answer()] if answers is None else answers,
        **fields,
    }


def projected(name="noisy", answers=None):
    """A file of a run with a store."""
    method = {"scoring": "store", "dim": 32, "why": "500 queries"}
    noise = {"spearman": 0.934, "sample": 64}
    return record(name, answers or [noisy_answer()], method=method, noise=noise)


def many():
    """A file as large as pages get: 100 queries, 20 examples each, of 200 tokens."""
    shown = text([f" word{k % 37}" for k in range(200)])
    shares = [((7 * k) % 19 - 6) / 200 for k in range(200)]

    def cards(first, sign):
        return [item(first + n, sign * (4 - n / 3), shown, tokens=shares) for n in range(10)]

    answers = [answer(f"query {q}", [shown], cards(9 * q, 1), cards(5000, -1)) for q in range(100)]
    return record("many", answers)


def write_run(folder, *records):
    """A run's folder with these score files."""
    (folder / "scores").mkdir(parents=True)
    for k, content in enumerate(records):
        path = folder / "scores" / f"{k}.json"
        path.write_text(json.dumps(content), encoding="utf-8")
    return folder
