"""Readers of checkpoint files. Each gives tensors by Hugging Face name and layout, a few rows at a time."""

from pdjax.models.checkpoints.base import TensorReader

__all__ = ["TensorReader"]
