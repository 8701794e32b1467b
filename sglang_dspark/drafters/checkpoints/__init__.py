"""Draft checkpoints: every layout read into one description, checked, and mapped to one naming."""

from sglang_dspark.drafters.checkpoints.description import DraftCheckpoint, Shape
from sglang_dspark.drafters.checkpoints.reading import (
    check_algorithm,
    check_ranks,
    read_checkpoint,
)
from sglang_dspark.drafters.checkpoints.weights import check_weights, weight_shapes

__all__ = [
    "DraftCheckpoint",
    "Shape",
    "check_algorithm",
    "check_ranks",
    "check_weights",
    "read_checkpoint",
    "weight_shapes",
]
