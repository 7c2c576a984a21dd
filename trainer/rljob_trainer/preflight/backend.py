"""The backend of the trainer pool: whether its module is there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from rljob_api import Readable, Violation
from rljob_trainer.learner.backends import BUILT_IN, FIELD
from rljob_trainer.preflight.modules import module_spec, search_path


def check_backend(found: Readable, folders: Sequence[Path]) -> Iterator[Violation]:
    """``folders``: where a module of the user may be."""
    name = found.job.spec.trainer.backend
    # What the job mounts as code is not here.
    if name not in BUILT_IN and not found.job.spec.code:
        spec = module_spec(FIELD, name, search_path(folders))
        if isinstance(spec, Violation):
            yield spec
