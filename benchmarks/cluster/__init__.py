"""The cluster's share of the time, measured with the end-to-end suite's namespace, volumes and jobs."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "e2e"), str(ROOT / "deploy")]
