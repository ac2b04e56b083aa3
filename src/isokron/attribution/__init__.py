"""Training-data attribution: which examples taught the model what it says."""

from isokron.attribution.answers import Answer, Answers, Found, score
from isokron.attribution.asking import Ask, Asker, Query
from isokron.attribution.oneself import self_influence, write_self
from isokron.attribution.page.report import report
from isokron.attribution.projection import Projection
from isokron.attribution.quality.evaluation import evaluate
from isokron.attribution.queries import read_queries
from isokron.attribution.recording.recorder import Recorder
from isokron.attribution.recording.trainer import trainer_callback
from isokron.attribution.run import Run
from isokron.attribution.storage.ragged import Display
from isokron.attribution.storage.store import Store
from isokron.attribution.storage.writer import Span, StoreWriter
from isokron.attribution.subject import Subject
from isokron.attribution.verbs import Build, Fit, build, fit

__all__ = [
    "Answer",
    "Answers",
    "Ask",
    "Asker",
    "Build",
    "Display",
    "Fit",
    "Found",
    "Projection",
    "Query",
    "Recorder",
    "Run",
    "Span",
    "Store",
    "StoreWriter",
    "Subject",
    "build",
    "evaluate",
    "fit",
    "read_queries",
    "report",
    "score",
    "self_influence",
    "trainer_callback",
    "write_self",
]
