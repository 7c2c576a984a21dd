"""Scores of held-out sets: who asks for them and when, and the statistics.

validator.py    generation through the same pool, the same rewards
beside.py       on engines that the pool lends, while training goes on
statistics.py   mean@n, best@k, worst@k, maj@k, pass@k;  ``summary.py``: for each data source
"""

from rljob_trainer.validation.summary import summarise

__all__ = ["summarise"]
