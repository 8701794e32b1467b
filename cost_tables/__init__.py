"""What a verify step costs: the model, its fit, and the table files."""

from cost_tables.files import Fingerprint, TableError, load_table, save_table
from cost_tables.model import CostModel, FlatCost, RoundCost, StepCost, fit

__all__ = [
    "CostModel",
    "Fingerprint",
    "FlatCost",
    "RoundCost",
    "StepCost",
    "TableError",
    "fit",
    "load_table",
    "save_table",
]
