"""What can be known before a run starts by looking at what a job names: data, model, rewards, environment, backend,
checkpoints.

Neither torch nor the network is touched: remote addresses are left to the run itself, and so are hub ids of models that
are not in this machine's cache. The schema and the rules between fields are ``rljob_api``'s. A job that is not valid by
those is looked at as far as it can be read, so that everything is said at once.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from rljob_api import Readable, RLJob, Violation
from rljob_trainer.preflight.backend import check_backend
from rljob_trainer.preflight.data import check_data
from rljob_trainer.preflight.environment import check_environment
from rljob_trainer.preflight.lora import check_lora
from rljob_trainer.preflight.model import check_model, known_tokenizer
from rljob_trainer.preflight.places import local_path
from rljob_trainer.preflight.reward_models import check_critic, check_judge, check_reward_models
from rljob_trainer.preflight.rewards import check_rewards


def preflight(found: Readable, *, base: Path | None = None, code: Sequence[Path] = ()) -> list[Violation]:
    """Everything wrong with the files of a job, but for what follows from values that can't be read.

    ``base`` is where relative paths start (default: the current folder); ``code`` are folders, besides the current one
    and the interpreter's own, in which modules of custom rewards may lie.
    """
    base, job = base or Path.cwd(), found.job
    columns: dict[str, frozenset[str]] = {}
    violations = [
        *check_model(found, base),
        *check_lora(found, base),
        *check_data(found, base, known_tokenizer(found, base), columns),
        *check_rewards(found, [*code, Path.cwd()], columns),
        *check_reward_models(found, base),
        *check_judge(found, base),
        *check_critic(found, base),
        *check_environment(found, [*code, Path.cwd()], base),
        *check_backend(found, [*code, Path.cwd()]),
        *_checkpoint(job, base),
        *_restore(job, base),
    ]
    return [violation for violation in violations if found.says(violation.path)]


def _checkpoint(job: RLJob, base: Path) -> Iterator[Violation]:
    uri = job.spec.checkpoint.uri
    folder = local_path(uri, base) if uri else None
    if folder is None:
        return
    path = "spec.checkpoint.uri"
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    if not existing.is_dir():
        yield Violation(path, f"{existing} is a file, not a folder", "choose another folder")
    elif not os.access(existing, os.W_OK | os.X_OK):
        yield Violation(path, f"{existing} is not writable", "choose another folder, or change its permissions")


def _restore(job: RLJob, base: Path) -> Iterator[Violation]:
    folder = local_path(job.spec.restore.from_, base) if job.spec.restore else None
    if folder is not None and not folder.is_dir():
        yield Violation("spec.restore.from", f"there is no folder {folder}", "use that of a checkpoint or run")
