"""The rules that concern more than one field, or more than a type and bounds can say.

One small function a rule, a file a topic; importing this package registers them all.
"""

from rljob_api.rules import algorithm, data, kubernetes, lifecycle, naming, pipeline, pods, pools, templates, volumes
from rljob_api.rules.registry import RULES, Job, broken

__all__ = [
    "RULES",
    "Job",
    "algorithm",
    "broken",
    "data",
    "kubernetes",
    "lifecycle",
    "naming",
    "pipeline",
    "pods",
    "pools",
    "templates",
    "volumes",
]
