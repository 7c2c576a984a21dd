"""The RLJob document: its types, its rules, its presets. Imports pydantic and PyYAML only."""

from rljob_api.loading import Checked, Readable, check, check_text, load_jobs, read_overlay
from rljob_api.resolution import resolve
from rljob_api.resolved import ResolvedJob
from rljob_api.spec.job import API_VERSION, KIND, Metadata, RLJob, Spec
from rljob_api.violations import JobInvalid, Violation

__all__ = [
    "API_VERSION",
    "KIND",
    "Checked",
    "JobInvalid",
    "Metadata",
    "RLJob",
    "Readable",
    "ResolvedJob",
    "Spec",
    "Violation",
    "check",
    "check_text",
    "load_jobs",
    "read_overlay",
    "resolve",
]
