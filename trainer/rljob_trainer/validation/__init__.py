"""Validation metrics: mean@n, best@k, worst@k, maj@k, pass@k for each data source."""

from rljob_trainer.validation.summary import summarise

__all__ = ["summarise"]
