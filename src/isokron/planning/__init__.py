"""What an optimizer costs on many ranks, foreseen: shapes only, no weights and no processes."""

from isokron.planning.conduct import check_optimizer, make_report
from isokron.planning.layouts import Layout, make_layout
from isokron.planning.load import Load, load_of
from isokron.planning.models import make_model, names
from isokron.planning.report import Report, Row, as_json, rich_table
from isokron.planning.speed import Speed, given_speed, measured_speed

__all__ = [
    "Layout",
    "Load",
    "Report",
    "Row",
    "Speed",
    "as_json",
    "check_optimizer",
    "given_speed",
    "load_of",
    "make_layout",
    "make_model",
    "make_report",
    "measured_speed",
    "names",
    "rich_table",
]
