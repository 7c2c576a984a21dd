"""The model and the tokenizer of a job, as far as their files are on this machine. Weights are read if they are few."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from rljob_api import Readable, Violation
from rljob_api.memory import ModelShape, known_shape
from rljob_trainer.errors import JobFileError
from rljob_trainer.models.config import TENSOR_FAMILIES
from rljob_trainer.preflight.places import HUB, as_violation, local_path, unknown_scheme

if TYPE_CHECKING:
    from rljob_api.spec.pools import TrainerParallelism
    from rljob_trainer.models.folder import Shape
    from rljob_trainer.models.tokenizer_files import TokenizerFiles

_READ_BYTES = 4 << 30
"""Weights up to so many are read for numbers that are none, in seconds; of more the start of a run says it."""


@dataclass(frozen=True, slots=True)
class KnownTokenizer:
    """What data are held against; None where the files are not here."""

    has_template: bool | None = None
    fills_empty: bool | None = None
    """Whether an empty text has tokens (one that begins every text)."""
    characters: frozenset[str] | None = None
    """The only ones that it knows."""
    template: str | None = None
    """The text of the chat template."""
    special: Mapping[str, str] = field(default_factory=dict)
    """The texts of special tokens, by name, as far as they are known."""

    def lacks_characters_of(self, text: str) -> bool:
        """Whether a prompt has characters that are known to be unknown; special tokens that it holds have none."""
        if self.characters is None:
            return False
        for token in self.special.values():
            text = text.replace(token, "")
        return not self.characters.issuperset(text)


def check_model(found: Readable, base: Path) -> Iterator[Violation]:
    """What is wrong with the model's and the tokenizer's files, and with lengths that they do not allow."""
    model = found.job.spec.model
    if model.chat_template is not None and found.says("spec.model.chatTemplate"):
        yield from check_chat_template("spec.model.chatTemplate", model.chat_template)
    if model.random is not None:
        path = "spec.model.random.tokenizer.source"
        yield from _tokenizer(path, model.random.tokenizer.source, base, None)
        return
    path = "spec.model.source"
    source = model.source
    shape: Shape | None = None
    if source and found.says(path):
        yield from unknown_scheme(path, source, HUB)
        folder = None if source.startswith(f"{HUB}://") else local_path(source, base)
        if source.startswith(f"{HUB}://"):
            yield from _model_of_the_hub(found, source.removeprefix(f"{HUB}://"))
        elif folder is not None and folder.is_dir():
            from rljob_trainer.models.folder import read_folder
            from rljob_trainer.models.weights import check_values, weight_files

            own = model.tokenizer is None and found.says("spec.model.tokenizer")
            try:
                shape = read_folder(folder, tokenizer=own)
                if sum(file.stat().st_size for file in weight_files(folder)) <= _READ_BYTES:
                    check_values(folder)
            except JobFileError as error:
                yield as_violation(error, path)
            else:
                yield from _shape(found, shape)
        elif folder is not None and _may_be_hub_id(source):
            yield from _model_of_the_hub(found, source)
        elif folder is not None:
            yield Violation(path, f"there is no folder {folder}", "use a model folder or a hub id (owner/name)")
    rows = None if shape is None else shape.vocabulary_size
    yield from _tokenizer("spec.model.tokenizer", model.tokenizer, base, rows)


def known_tokenizer(found: Readable, base: Path) -> KnownTokenizer:
    """What is known of the job's tokenizer. What is wrong with it ``check_model`` says."""
    model = found.job.spec.model
    if not found.says("spec.model"):
        return KnownTokenizer()
    given = model.chat_template
    has_template = True if given is not None else None
    if given is not None and list(check_chat_template("spec.model.chatTemplate", given)):
        given = None
    if model.random is not None and model.random.tokenizer.characters is not None:
        from rljob_trainer.models.tokenizer import SPECIAL

        return KnownTokenizer(bool(has_template), True, frozenset(model.random.tokenizer.characters), given, SPECIAL)
    source = model.random.tokenizer.source if model.random is not None else model.tokenizer or model.source
    files = None if source is None else _files(source, base)
    if files is None:
        return KnownTokenizer(has_template, template=given)
    own = files.chat_template if model.chat_template is None else given
    return KnownTokenizer(
        has_template or files.has_chat_template, files.fills_empty, template=own, special=files.special
    )


def _files(source: str, base: Path) -> TokenizerFiles | None:
    from rljob_trainer.models.tokenizer_files import read_tokenizer

    folder = local_path(source, base)
    if folder is None or not folder.is_dir():
        return None
    try:
        return read_tokenizer(folder)
    except JobFileError:
        return None


def check_chat_template(path: str, text: str) -> Iterator[Violation]:
    """Whether the template of the field ``path`` compiles."""
    from rljob_trainer.models.tokenizer_files import check_template

    try:
        check_template(text, path)
    except JobFileError as error:
        problem, _, remedy = str(error).removeprefix(f"{path} ").rpartition("; ")
        yield Violation(path, problem, remedy)


def _model_of_the_hub(found: Readable, name: str) -> Iterator[Violation]:
    """A model that an earlier run or download has left in this machine's cache; of others the run itself finds out."""
    from rljob_trainer.models.folder import read_shape
    from rljob_trainer.models.hub_cache import cached_file

    config = cached_file(name, "config.json", found.job.spec.model.revision)
    if config is None:
        known, ours = known_shape(name), ":" not in found.job.spec.trainer.backend
        if known is not None and found.says("spec.trainer.parallelism") and found.says("spec.trainer.backend"):
            yield from undivided(found.job.spec.trainer.parallelism, known, ours=ours)
    if config is None or not found.says("spec.model.revision"):
        return
    try:
        yield from _shape(found, read_shape(config))
    except JobFileError as error:
        yield as_violation(error, "spec.model.source")


def _shape(found: Readable, shape: Shape) -> Iterator[Violation]:
    yield from _context(found, shape.context_length)
    # A backend of the job's own may compute what ours does not.
    ours = found.says("spec.trainer.backend") and ":" not in found.job.spec.trainer.backend
    if shape.untrainable is not None and ours:
        yield Violation("spec.model.source", f"the learner {shape.untrainable}", "train another model")
        return
    engine = found.job.spec.rollout.engine if found.says("spec.rollout.engine") else None
    if engine == "torch" and shape.unsupported is not None:
        yield Violation(
            "spec.rollout.engine", f"the torch engine {shape.unsupported}", "use rollout.engine: vllm, or another model"
        )
    if (
        shape.unreplayable is not None
        and found.says("spec.algorithm.routingReplay")
        and found.job.spec.algorithm.routing_replay
    ):
        yield Violation("spec.algorithm.routingReplay", f"the model {shape.unreplayable}", "remove it")
    if found.says("spec.trainer.parallelism"):
        yield from undivided(found.job.spec.trainer.parallelism, shape, ours=ours)
    if engine == "vllm" and shape.head_dim < 32:
        yield Violation(
            "spec.model.source",
            f"its head size is {shape.head_dim}, but vLLM needs at least 32",
            "use rollout.engine: torch",
        )


def undivided(ways: TrainerParallelism, shape: Shape | ModelShape, *, ours: bool = True) -> Iterator[Violation]:
    """Layouts whose ranks cannot divide the model's heads. ``ours``: whether the backend is one that is built in."""
    context, tensor, path = ways.context, ways.tensor, "spec.trainer.parallelism"
    if tensor > 1 and ours and shape.family not in TENSOR_FAMILIES:
        yield Violation(
            f"{path}.tensor",
            f"is supported only for {', '.join(TENSOR_FAMILIES)}, not for {shape.family}",
            "use 1, and use shard or context instead",
        )
    elif shape.kv_heads % tensor:
        yield Violation(
            f"{path}.tensor",
            f"the model's {shape.kv_heads} key heads cannot be divided among {tensor} ranks",
            "use 1" if shape.kv_heads == 1 else f"use a divisor of {shape.kv_heads}",
        )
    elif shape.heads % (context * tensor):
        ranks = f"{context} ranks" if tensor == 1 else f"{context} x {tensor} (tensor) ranks"
        yield Violation(
            f"{path}.context",
            f"the model's {shape.heads} attention heads cannot be divided among {ranks}",
            f"use a divisor of {shape.heads // tensor}",
        )


def _tokenizer(path: str, source: str | None, base: Path, rows: int | None) -> Iterator[Violation]:
    """``rows``: of the embedding that it has to fit, if that is known."""
    if not source:
        return
    yield from unknown_scheme(path, source, HUB)
    folder = local_path(source, base)
    if folder is None:
        return
    if folder.is_dir():
        from rljob_trainer.models.tokenizer_files import check_size, read_tokenizer

        try:
            files = read_tokenizer(folder, of_model=False)
            if rows is not None:
                check_size(files, rows, path)
        except JobFileError as error:
            yield as_violation(error, path)
    elif not _may_be_hub_id(source):
        yield Violation(path, f"there is no folder {folder}", "use a folder with a tokenizer or a hub id (owner/name)")


def _may_be_hub_id(source: str) -> bool:
    return source.count("/") <= 1 and not source.startswith((".", "/", "~"))


def _context(found: Readable, context: int) -> Iterator[Violation]:
    """Prompt and response must fit the model; so must the responses of validation."""
    job = found.job
    if not found.says("spec.data.maxPromptTokens"):
        return
    prompt, response = job.spec.data.max_prompt_tokens, job.spec.rollout.max_response_tokens
    lengths = [("spec.rollout.maxResponseTokens", response)]
    for index, part in enumerate(job.spec.data.validation):
        if part.sampling.max_response_tokens is not None:
            path = f"spec.data.validation[{index}].sampling.maxResponseTokens"
            lengths.append((path, part.sampling.max_response_tokens))
    for path, length in lengths:
        if prompt + length > context:
            remedy = f"lower it to {context - prompt}" if prompt < context else "lower data.maxPromptTokens"
            yield Violation(
                path,
                f"{length} and data.maxPromptTokens = {prompt} together exceed the model's context of {context}",
                remedy,
            )
