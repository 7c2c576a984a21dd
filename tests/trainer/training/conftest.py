"""Makes the step's learner, groups and job, which are in ``test_step.py``, importable for the other tests here."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
