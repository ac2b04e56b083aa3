"""How curved a task's model is: spectra, conditions, effective ranks, and what they would cost."""

from isokron.inspection.conduct import inspect
from isokron.inspection.plan import Plan, make_plan
from isokron.inspection.results import Inspection, LayerFacts

__all__ = ["Inspection", "LayerFacts", "Plan", "inspect", "make_plan"]
