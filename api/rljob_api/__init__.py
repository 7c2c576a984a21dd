"""The RLJob document: its types, its rules, its presets. Imports pydantic and PyYAML only."""

from rljob_api.spec.job import API_VERSION, KIND, Metadata, RLJob, Spec

__all__ = ["API_VERSION", "KIND", "Metadata", "RLJob", "Spec"]
