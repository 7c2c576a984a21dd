"""A job's model as a local Hugging Face folder (from a hub, a path, or random weights)."""

from rljob_trainer.models.folder import ModelFolder, read_folder
from rljob_trainer.models.materialise import fetch, materialise

__all__ = ["ModelFolder", "fetch", "materialise", "read_folder"]
