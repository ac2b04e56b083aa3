"""The inspection as files: the page, its numbers, the curvature itself."""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict
from pathlib import Path

from isokron.curvature import Curvature
from isokron.files import write_atomically
from isokron.inspection.memory import by_policy
from isokron.inspection.page import page
from isokron.inspection.results import Inspection
from isokron.pages.numbers import finite

RECORDS, PAGE, CURVATURE = "inspect.json", "index.html", "curvature"


def open_folder(folder: Path) -> None:
    """Make the folder, unless it holds other things than an inspection or cannot be written."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"out {str(folder)!r} is a file; give a folder with --out")
    content = [path for path in folder.glob("*") if not path.name.startswith(".")]
    if content and not (folder / RECORDS).is_file():
        raise ValueError(
            f"out {str(folder)!r} has other files in it (such as {content[0].name}); "
            "give a new folder with --out"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(
            f"out {str(folder)!r} cannot be written: {error.strerror}; give another with --out"
        ) from None


def write_report(result: Inspection, curvature: Curvature, folder: Path) -> None:
    """Each file whole or not at all; the page comes last, and means that all are there."""
    texts = {RECORDS: as_json(result), PAGE: page(result)}
    # of an older inspection: from here on it would show what is not in the folder any more
    (folder / PAGE).unlink(missing_ok=True)
    curvature.save(folder / CURVATURE)
    for name, text in texts.items():
        write_atomically(folder / name, [text.encode()])


def as_json(result: Inspection) -> str:
    """Settings, layers and memory; infinite conditions are null."""
    value = {
        "settings": dict(result.settings),
        "evaluation_loss": result.loss,
        "terms": result.terms,
        "model_bytes": result.model_bytes,
        "notes": list(result.notes),
        "memory": [
            asdict(found) for found in by_policy(result.layers, result.settings["examples"])
        ],
        "layers": [asdict(facts) for facts in result.layers],
    }
    return json.dumps(finite(value), ensure_ascii=False, allow_nan=False) + "\n"
