"""`isokron demo`: a short race on real text, then the training examples a model learned from."""

from pathlib import Path
from typing import Annotated

import typer

from isokron.cli.attribution import Asked, RunCurvature, Scoring, StoreRows, attribute
from isokron.cli.encoding import echo
from isokron.cli.race import race
from isokron.cli.source import Resources, Source, TaskSource
from isokron.report.render import add_link_

TASK = "speeches-tiny"
STEPS = 150
# three values around the best of each; AdamW with ten times the rate for all but hidden matrices
RATES = {"adamw": "2.5e-3x10,5e-3x10,1e-2x10", "shampoo": "1e-2,3e-2,6e-2"}
# training examples and steps of the explained model, and a query
EXAMPLES, LEARNED = 2000, 500
TEXT = "Fellow-Citizens of the Senate and House of Representatives"
# links between the two pages
ANSWERS = "Which training examples make such a model say what it says?"
RACE = "The race of optimizers on the same text"
END = """
The race:    {}
The answers: {}

Next, on your own model and data:
  isokron plan --model FOLDER --ranks 1
  isokron race --task file.py:function --optimizers adamw,shampoo
  isokron attribute runs/mine --model FOLDER --data train.jsonl --prompt 'Who was'"""


def demo(
    out: Annotated[
        Path, typer.Option(help="Folder for the pages; an earlier demo in it is continued.")
    ] = Path("isokron-demo"),
) -> None:
    """Race Shampoo against AdamW on a small language model, and show which examples taught it.

    Takes about a minute. If it is stopped, run the same command again to continue.

    Examples:
      isokron demo
      isokron demo --out runs/demo
    """
    echo("A byte-level language model learns from presidents' speeches.", err=True)
    rates = [f"{name}={values}" for name, values in RATES.items()]
    race(TaskSource(task=TASK), ",".join(RATES), rates, STEPS, seeds=1, out=out, resume=True)
    echo(ANSWERS, err=True)
    source = Source(task=TASK, steps=LEARNED, lr=1e-2, examples=EXAMPLES)
    asked = Asked(query=[TEXT, "eval:0"])
    groups = (source, RunCurvature(), StoreRows(), asked, Scoring(), Resources())
    attribute(out / "attribution", *groups)
    pages = (out / "index.html").resolve(), (out / "attribution" / "report.html").resolve()
    add_link_(pages[0], ANSWERS, "attribution/report.html")
    add_link_(pages[1], RACE, "../index.html")
    echo(END.format(*pages))
