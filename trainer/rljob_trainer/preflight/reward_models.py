"""The models that score, as far as their files are on this machine: told by ``config.json``, nothing is loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from rljob_api import Readable, Violation
from rljob_api.spec.pools import TrainerParallelism
from rljob_trainer.errors import JobFileError
from rljob_trainer.models.config import read_json
from rljob_trainer.models.critic_start import FIELD, check_fits, read_critic
from rljob_trainer.models.folder import read_shape
from rljob_trainer.preflight.model import check_chat_template
from rljob_trainer.preflight.places import as_violation, local_path


def check_reward_models(found: Readable, base: Path) -> Iterator[Violation]:
    """``base`` is where relative paths start. Hub ids and volumes are left to the run."""
    for index, function in enumerate(found.job.spec.reward.functions):
        if function.reward_model is not None:
            path = f"spec.reward.functions[{index}].rewardModel.source"
            yield from _place(path, function.reward_model.source, base, "a reward model", _folder)


def check_critic(found: Readable, base: Path) -> Iterator[Violation]:
    """What the critic starts from, if that is another model than the policy. ``base`` is where relative paths start."""
    critic = found.job.spec.algorithm.critic
    if critic is not None and critic.model is not None:
        yield from _place(FIELD, critic.model.source, base, "a model", partial(_critic, found, base))


def check_judge(found: Readable, base: Path) -> Iterator[Violation]:
    """The model of spec.judge. ``base`` is where relative paths start."""
    judge = found.job.spec.judge
    if judge is not None:
        yield from _place("spec.judge.model.source", judge.model.source, base, "a model that judges", _language_model)
        if judge.model.chat_template is not None:
            yield from check_chat_template("spec.judge.model.chatTemplate", judge.model.chat_template)


def _place(
    path: str, source: str, base: Path, what: str, look: Callable[[str, Path], Iterator[Violation]]
) -> Iterator[Violation]:
    """``look`` says what is wrong with the folder, if it is here."""
    if "://" in source and not source.startswith(("hf://", "pvc://", "file://")):
        yield Violation(path, f"{source} is not a valid location of {what}", "use a path, a hub id or pvc://claim/path")
        return
    folder = local_path(source, base)
    if folder is None:
        return
    if folder.is_dir():
        yield from look(path, folder)
    elif source.count("/") > 1 or source.startswith((".", "/", "~", "file://")):
        yield Violation(path, f"there is no folder {folder}", "use a model folder or a hub id (owner/name)")


def _critic(found: Readable, base: Path, path: str, folder: Path) -> Iterator[Violation]:
    spec = found.job.spec
    ways = spec.trainer.parallelism if found.says("spec.trainer.parallelism") else TrainerParallelism()
    longest = None
    if found.says("spec.data.maxPromptTokens") and found.says("spec.rollout.maxResponseTokens"):
        longest = spec.data.max_prompt_tokens + spec.rollout.max_response_tokens
    policy = local_path(spec.model.source, base) if spec.model.source and found.says("spec.model.source") else None
    try:
        vocabulary = None if policy is None else read_shape(policy / "config.json").vocabulary_size
    except JobFileError:  # which ``check_model`` says
        vocabulary = None
    try:
        check_fits(read_critic(folder), ways, vocabulary=vocabulary, longest=longest)
    except JobFileError as error:
        yield as_violation(error, path)


def _language_model(path: str, folder: Path) -> Iterator[Violation]:
    try:
        config = read_json(folder / "config.json")
    except JobFileError as error:
        yield as_violation(error, path)
        return
    kinds = [str(kind) for kind in config.get("architectures") or ()]
    if any(kind.endswith("ForSequenceClassification") for kind in kinds):
        yield Violation(
            path,
            f"{folder} is a {', '.join(kinds)}, which generates no text",
            "use a language model, or use this one with type: rewardModel",
        )


def _folder(path: str, folder: Path) -> Iterator[Violation]:
    try:
        config = read_json(folder / "config.json")
    except JobFileError as error:
        yield as_violation(error, path)
        return
    kinds = [str(kind) for kind in config.get("architectures") or ()]
    if "auto_map" not in config and not any(kind.endswith("ForSequenceClassification") for kind in kinds):
        yield Violation(
            path,
            f"{folder} is a {', '.join(kinds) or 'model of unknown architecture'}, which has no scoring head",
            "use a model that was trained as a reward model (...ForSequenceClassification)",
        )
        return
    names = config.get("id2label")
    labels = config.get("num_labels", len(names) if isinstance(names, dict) else 2)
    if labels != 1:
        yield Violation(path, f"{folder} has num_labels {labels}", "use a reward model with num_labels 1")
