"""The backend of the trainer pool: whether anybody has registered it, or its module is there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from rljob_api import Readable, Violation
from rljob_trainer.errors import JobFileError
from rljob_trainer.learner.backends import FIELD, class_of
from rljob_trainer.preflight.modules import module_spec, search_path
from rljob_trainer.preflight.places import as_violation


def check_backend(found: Readable, folders: Sequence[Path]) -> Iterator[Violation]:
    """``folders``: where a module of the user may be."""
    name = found.job.spec.trainer.backend
    try:
        module, _, _ = class_of(name).partition(":")
    except JobFileError as error:
        yield as_violation(error, FIELD)
        return
    # What the job mounts as code is not here.
    if ":" in name and not found.job.spec.code:
        spec = module_spec(FIELD, module, search_path(folders))
        if isinstance(spec, Violation):
            yield spec
