"""What is known of the curvature of every layer, as records, a table and lines of JSON."""

import json
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from isokron.curvature.layers import Layout


def layer_record(
    name: str,
    method: str,
    layout: Layout,
    tensors: Mapping[str, Tensor],
    policy: str,
    terms: float,
    columns: int | None,
) -> dict[str, Any]:
    """What every report says of a layer."""
    blocks, outputs, inputs = layout.shape
    return {
        "layer": name,
        "method": method,
        "kind": layout.kind,
        "blocks": blocks,
        "outputs": outputs,
        "inputs": inputs,
        "bias": layout.bias,
        "terms": terms,
        "policy": policy,
        "columns": columns,
        "bytes": sum(value.nbytes for value in tensors.values()),
    }


def log_line(record: Mapping[str, Any]) -> str:
    """One line for the log of a run: T, policy, dampings, κ, what was clipped, fallbacks."""
    number = record["blocks"] * record["outputs"] * record["inputs"]
    numbers = {
        "T": record["terms"] if record["columns"] is None else record["columns"],
        "λ": record.get("damping"),
        "λ_G": record.get("damping_output"),
        "λ_A": record.get("damping_input"),
        "κ": record.get("condition"),
        "κ damped": record.get("condition_after"),
        "κ_max": record.get("max_condition"),
    }
    parts = [f"layer {record['layer']}: {record['method']}, policy {record['policy']}"]
    parts += [f"{name} {value:.6g}" for name, value in numbers.items() if value is not None]
    parts += [f"clipped {round((record.get('clipped') or 0.0) * number)} of {number}"]
    fallbacks = [f"{name} {count}" for name, count in record["fallbacks"].items()]
    return ", ".join([*parts, f"fallbacks {'; '.join(fallbacks) or 'none'}"])


class CurvatureReport(list[dict[str, Any]]):
    """One record a layer. `print` shows a table, in which κ is the condition number."""

    def json_lines(self) -> str:
        """One JSON object a line, for the log of a run; null where κ is infinite."""
        plain = [{k: None if v == float("inf") else v for k, v in r.items()} for r in self]
        return "".join(f"{json.dumps(record)}\n" for record in plain)

    def __str__(self) -> str:
        rows = [("layer", "shape", "T", "λ", "κ", "κ damped", "clipped", "fallbacks", "MB")]
        for record in self:
            shape = f"{record['outputs']}×{record['inputs']}"
            terms = record["terms"] if record["columns"] is None else record["columns"]
            numbers = (record.get(key) for key in ("damping", "condition", "condition_after"))
            fallbacks = ", ".join(f"{k} {n}" for k, n in record["fallbacks"].items()) or "–"
            rows.append(
                (
                    record["layer"],
                    f"{record['blocks']}×{shape}" if record["blocks"] > 1 else shape,
                    f"{terms:.0f}",
                    *("–" if number is None else f"{number:.2g}" for number in numbers),
                    "–" if record.get("clipped") is None else f"{record['clipped']:.1%}",
                    fallbacks,
                    f"{record['bytes'] / 1e6:.2f}",
                )
            )
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
        return "\n".join(lines)
