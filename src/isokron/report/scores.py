"""Read and validate scores/*.json of a run."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

FORMAT, VERSION = "isokron scores", 2

# A type must be there; (spec,) may be null; [spec] is a list, empty if missing; a dict has fields.
# float: a number, or None where it is missing or not finite.
SHOWN = {"tokens": [str], "context": (str,), "image": (str,), "label": (str,), "title": (str,)}
ITEM = {
    **{"example": int, "id": str, "score": float, "share": float, "nats": float},
    **{"per_token": float, "cosine": float, "tokens_counted": (int,), "loss": float},
    **{"noisy": (bool,), "tokens": [float], "layers": [float], "shown": SHOWN},
}
VERIFY = {
    **{"examples": int, "step": float, "before": float},
    **{"proponents": float, "random": float, "opponents": float},
}
ANSWER = {
    **{"query": str, "shown": [SHOWN], "loss": float, "tokens_counted": (int,)},
    **{"token_losses": [float], "token_scores": [float], "said": (str,), "generated": (bool,)},
    **{"standard_error": float, "positive": float, "calibration": float, "verify": (VERIFY,)},
    **{"proponents": [ITEM], "opponents": [ITEM], "histogram": [[float]]},
}
LEFT_OUT = {"name": str, "reason": str, "parameters": int}
COVERAGE = {"covered": int, "total": int, "summary": str, "left_out": [LEFT_OUT]}
METHOD = {
    **{"method": str, "fisher": str, "damping": float, "damping_rule": (str,), "scoring": str},
    **{"why": (str,), "dim": (int,), "mode": str, "coverage": COVERAGE},
}
RECORD = {
    "name": str,
    "command": (str,),
    "run": {"model": str, "data": str, "examples": int},
    "method": METHOD,
    "noise": ({"spearman": float, "sample": int},),
    "layers": [str],
    "answers": [ANSWER],
}
NAMES = {dict: "an object", list: "a list", str: "a string", int: "an integer", bool: "a boolean"}
REMEDY = "score the queries again with `isokron score`"


def read_scores(folder: Path, top: int | None = None) -> list[dict[str, Any]]:
    """All sets of queries of a run, in the order of their file names.

    top: at most so many proponents and opponents per query, None for all in the files.
    """
    if top is not None and top < 1:
        raise ValueError(f"top must be at least 1, got {top}")
    paths = sorted((folder / "scores").glob("*.json"))
    if not paths:
        raise FileNotFoundError(
            f"no scores in {str(folder)!r}; score some queries first with `isokron score`"
        )
    records = [_read(path) for path in paths]
    for answer in (answer for record in records for answer in record["answers"]):
        for side in ("proponents", "opponents"):
            answer[side] = answer[side][:top]
    return records


def _read(path: Path) -> dict[str, Any]:
    try:
        # NaN and Infinity, which Python writes into JSON, are missing numbers
        content = json.loads(path.read_text(encoding="utf-8"), parse_constant=lambda _: None)
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}; {REMEDY}") from None
    head = content if isinstance(content, dict) else {}
    if (head.get("format"), head.get("version")) != (FORMAT, VERSION):
        raise ValueError(
            f"{path} must be of format {FORMAT!r}, version {VERSION}, got "
            f"{head.get('format')!r}, version {head.get('version')!r}; {REMEDY}"
        )
    try:
        record: dict[str, Any] = conform(content, RECORD, "")
        for k, answer in enumerate(record["answers"]):
            edges, counts = answer["histogram"] if len(answer["histogram"]) == 2 else ([], [])
            rising = None not in edges and edges[:1] < edges[-1:] and len(edges) == len(counts) + 1
            if answer["histogram"] and not rising:
                raise ValueError(f"answers[{k}].histogram must be [edges, counts], edges rising")
    except ValueError as error:
        raise ValueError(f"{path}: {error}; {REMEDY}") from None
    return record


def conform(value: Any, spec: Any, place: str) -> Any:
    """The value with the fields of its specification, missing ones filled in.

    place: where the value stands in the file, for errors.
    """
    if isinstance(spec, tuple):
        return None if value is None else conform(value, spec[0], place)
    if spec is float and (value is None or type(value) in (int, float)):
        return None if value is None or not math.isfinite(value) else float(value)
    if isinstance(spec, list) and (value is None or isinstance(value, list)):
        items = value or []
        # most of a file are lists of tokens and of their scores, which need no walk
        if list(set(map(type, items))) == spec:
            return items
        return [conform(item, spec[0], f"{place}[{i}]") for i, item in enumerate(items)]
    if isinstance(spec, dict) and isinstance(value, dict):
        return {
            key: conform(value.get(key), inner, f"{place}.{key}") for key, inner in spec.items()
        }
    wanted = spec if isinstance(spec, type) else type(spec)
    # True is an int to Python, but not to JSON
    if not isinstance(value, wanted) or (isinstance(value, bool) and spec is int):
        name = NAMES.get(wanted, "a number or null")
        raise ValueError(f"{place.lstrip('.')} must be {name}, got {value!r:.60}")
    return value
