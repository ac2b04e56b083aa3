"""The page of a run: which training examples made the model say this."""

from pathlib import Path

from isokron.attribution.page.document import page
from isokron.attribution.page.recorded import read_recorded
from isokron.attribution.run import read_record
from isokron.files import write_atomically

PAGE = "report.html"
NEEDED = ("source", "stages", "isokron", "torch", "task", "examples")


def report(folder: Path | str, *, top: int | None = None) -> Path:
    """Write report.html of all that was scored in a run, whole, and say where it is.

    It is made of run.json and scores/ alone: the same files, the same page. `top`: of proponents
    and of opponents, at most so many each.
    """
    folder = Path(folder)
    record = read_record(folder)
    source = record.get("source")
    there = {*record, *(source if isinstance(source, dict) else ())}
    missing = [name for name in NEEDED if name not in there]
    if missing:
        raise ValueError(f"run.json in {folder} lacks {', '.join(missing)}; begin a new run")
    path = folder / PAGE
    # half a character, as a tokenizer may leave one, has no bytes in UTF-8
    text = page(record, read_recorded(folder, top)).encode("utf-8", "replace")
    write_atomically(path, [text])
    return path
