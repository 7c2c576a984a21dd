"""A job's model as a local Hugging Face folder: the one form in which learner, engines, export and evaluation take it.

A local folder is used where it lies. A hub id is fetched into the hub's own cache, another address (``s3://``) into
the run's folder. Random weights are made, and a model with another tokenizer or chat template gets a folder of links
with the tokenizer's files replaced. What is made appears under its name only when it is whole, and is reused when the
same run starts again.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rljob_trainer.errors import JobFileError, UnreachableError
from rljob_trainer.models.config import GEMMA, MIXTURES
from rljob_trainer.models.folder import ModelFolder, read_folder
from rljob_trainer.models.tokenizer import character_tokenizer, check_embedded, load_tokenizer
from rljob_trainer.models.tokenizer_files import read_tokenizer
from rljob_trainer.storage.bucket import REMEDY, reason

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rljob_api.spec.model import Model, RandomModel

_log = logging.getLogger(__name__)

RECORD = "rljob_model.json"
"""Inside a made folder: the part of the job file that it was made from."""

_ROPE_BASE_PER_TOKEN = 1 / 3
"""RoPE's base over the context length: the slowest pair of a random model turns once within about twice its context.
The usual 10,000 is made for thousands of tokens; in a context of 32 most pairs would hardly turn at all, and a model
that has to tell places apart (addition) learns more slowly."""

_TOKENIZER_FILES = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
)


def materialise(spec: Model, folder: Path, *, base: Path | None = None) -> ModelFolder:
    """The local folder of ``spec.model``. ``folder`` is where one may be made; ``base`` is where relative paths start.

    Raises ``JobFileError`` for a folder that is not a model, and for a hub id that cannot be fetched.
    """
    base = base or Path.cwd()
    folder = Path(folder)
    if spec.random is not None:
        random = spec.random
        _make(folder, spec, lambda target: _write_random(random, spec, target, base))
        return read_folder(folder)
    if spec.source is None:
        raise JobFileError("spec.model: set source (a path or hub id) or random")
    if is_remote(spec.source):
        url, downloaded = spec.source, folder.with_name(f"{folder.name}-source")
        _make(downloaded, spec, lambda target: _download(url, target, "spec.model.source"))
        source = downloaded
    else:
        source = fetch(spec.source, "spec.model.source", base=base, revision=spec.revision)
    if spec.tokenizer is None and spec.chat_template is None:
        return read_folder(source)
    _make(folder, spec, lambda target: _link_with_tokenizer(source, spec, target, base))
    return read_folder(folder)


def fetch(
    source: str, field: str, *, base: Path | None = None, revision: str | None = None, tokenizer_only: bool = False
) -> Path:
    """The local folder of a path, ``hf://owner/name`` or hub id. ``HF_HOME`` and ``HF_HUB_OFFLINE`` are honoured.

    Raises ``JobFileError``, its message naming ``field``, when there is no such folder and the hub does not give it.
    """
    source = source.removeprefix("file://")
    local = ((base or Path.cwd()) / Path(source).expanduser()).resolve()
    if local.is_dir():
        return local
    name = source.removeprefix("hf://")
    if not source.startswith("hf://") and (name.count("/") > 1 or name.startswith((".", "/", "~"))):
        raise JobFileError(f"{field}: there is no folder {local}; use a model folder or a hub id (owner/name)")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    wanted = ["*.json", "*.jinja", "*.model", "merges.txt", "vocab*"] + ([] if tokenizer_only else ["*.safetensors"])
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=wanted))
    except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError, OSError) as problem:
        first_line = str(problem).strip().splitlines()[0] if str(problem).strip() else type(problem).__name__
        raise JobFileError(
            f"{field}: {source!r} is not a folder ({local}) and could not be fetched from the hub ({first_line}). "
            "Check the name; for a gated model, set HF_TOKEN; without a network, download it elsewhere with "
            f"`hf download {name}` and use its path, or copy that cache and set HF_HOME and HF_HUB_OFFLINE=1"
        ) from problem


def is_remote(source: str) -> bool:
    """Whether a source is an address that fsspec reads (``s3://bucket/folder``)."""
    return "://" in source and not source.startswith(("hf://", "file://"))


def _download(url: str, target: Path, field: str) -> None:
    """Copies the files of a remote folder."""
    import fsspec

    if url.startswith("pvc://"):
        raise JobFileError(f"{field}: {url} is a volume of the cluster; on this machine, use the path of a local copy")
    try:
        files, root = fsspec.url_to_fs(url)
        if not files.isdir(root):
            raise FileNotFoundError("no such folder")
        files.get(root.rstrip("/") + "/", f"{target}/", recursive=True)
    except (FileNotFoundError, PermissionError, ImportError, ValueError) as problem:
        raise JobFileError(
            f"{field}: {url} cannot be read ({problem}); check the address, or copy it here"
        ) from problem
    except Exception as problem:  # a store that cannot be reached now: another try may help
        raise UnreachableError(f"{field}: {url} cannot be read: {reason(problem)}; {REMEDY}") from problem


def _make(folder: Path, spec: Model, write: Callable[[Path], None]) -> None:
    """Runs ``write`` on a folder beside ``folder`` and renames it, unless ``folder`` was made from the same spec and
    can still be read: what was made once can be made again."""
    record = json.dumps(spec.document(), sort_keys=True, indent=2)
    made = folder / RECORD
    if made.exists() and made.read_bytes() == record.encode() and _is_readable(folder):
        return
    partial = folder.with_name(f".{folder.name}.partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        write(partial)
        (partial / RECORD).write_text(record, encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _is_readable(folder: Path) -> bool:
    try:
        read_folder(folder)
    except JobFileError as problem:
        _log.warning("the random model is created again: %s", problem)
        return False
    return True


def _write_random(random: RandomModel, spec: Model, target: Path, base: Path) -> None:
    """Configuration, weights drawn by the seed (float32, the family's own initialisation) and tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    tokenizer = _random_tokenizer(random, spec, base)
    kv_heads = random.kv_heads or random.heads
    if random.hidden_size % random.heads or random.heads % kv_heads:
        raise JobFileError(
            f"spec.model.random: heads = {random.heads} must divide hiddenSize = {random.hidden_size}, "
            f"and kvHeads = {kv_heads} must divide heads"
        )
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": random.context_length * _ROPE_BASE_PER_TOKEN}
    of_family: dict[str, Any] = {}
    if random.family in GEMMA:
        of_family = _gemma(random)
    elif random.family in MIXTURES:
        of_family = _mixture(random)
    if random.family == "gemma3_text":
        local = rope | {"rope_theta": max(2.0, of_family["sliding_window"] * _ROPE_BASE_PER_TOKEN)}
        rope = {"full_attention": rope, "sliding_attention": local}
    config = AutoConfig.for_model(
        random.family,
        vocab_size=len(tokenizer),
        hidden_size=random.hidden_size,
        intermediate_size=random.intermediate_size or 4 * random.hidden_size,
        num_hidden_layers=random.layers,
        num_attention_heads=random.heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=random.context_length,
        rope_parameters=rope,
        tie_word_embeddings=random.tie_embeddings,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
        **of_family,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(random.seed)
        model = AutoModelForCausalLM.from_config(config)
    disable_progress_bar()  # a bar for one small file only tears the terminal
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def _gemma(random: RandomModel) -> dict[str, Any]:
    """What a Gemma's configuration says besides: windows of a quarter of the context, in all layers but every second
    (Gemma 2) or every sixth and the last (Gemma 3)."""
    width = random.hidden_size // random.heads
    every = 2 if random.family == "gemma2" else 6
    full = [(layer + 1) % every == 0 or layer + 1 == random.layers for layer in range(random.layers)]
    return {
        "head_dim": width,
        "query_pre_attn_scalar": width,
        "sliding_window": max(1, random.context_length // 4),
        "layer_types": ["full_attention" if whole else "sliding_attention" for whole in full],
    }


def _mixture(random: RandomModel) -> dict[str, Any]:
    """What the configuration of a mixture of experts says besides: all layers have them, as wide as is said."""
    return {
        "head_dim": random.hidden_size // random.heads,
        "num_experts": random.experts,
        "num_experts_per_tok": random.experts_per_token,
        "moe_intermediate_size": random.intermediate_size or 4 * random.hidden_size,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _random_tokenizer(random: RandomModel, spec: Model, base: Path) -> PreTrainedTokenizerBase:
    tokenizer: PreTrainedTokenizerBase
    if random.tokenizer.characters is not None:
        tokenizer = character_tokenizer(random.tokenizer.characters, random.context_length)
    else:
        field = "spec.model.random.tokenizer.source"
        if random.tokenizer.source is None:
            raise JobFileError("spec.model.random.tokenizer: set characters or source")
        folder = fetch(random.tokenizer.source, field, base=base, tokenizer_only=True)
        tokenizer = _load_tokenizer(folder, field, spec.trust_remote_code)
        if tokenizer.eos_token_id is None:
            raise JobFileError(f"{field}: the tokenizer in {folder} has no end-of-text token; use another one")
    if spec.chat_template is not None:
        tokenizer.chat_template = spec.chat_template
    return tokenizer


def _link_with_tokenizer(source: Path, spec: Model, target: Path, base: Path) -> None:
    """Links to the model's files, and the other tokenizer (or the same one with another chat template)."""
    vocabulary = read_folder(source, tokenizer=spec.tokenizer is None).vocabulary_size
    if spec.tokenizer is None:
        tokenizer = _load_tokenizer(source, "spec.model.source", spec.trust_remote_code)
    else:
        folder = fetch(spec.tokenizer, "spec.model.tokenizer", base=base, tokenizer_only=True)
        tokenizer = _load_tokenizer(folder, "spec.model.tokenizer", spec.trust_remote_code)
    if spec.chat_template is not None:
        tokenizer.chat_template = spec.chat_template
    check_embedded(tokenizer, vocabulary, "spec.model.tokenizer: it")
    replaced = {file.name for pattern in _TOKENIZER_FILES for file in source.glob(pattern)}
    for file in source.iterdir():
        if file.is_file() and file.name not in replaced:
            (target / file.name).symlink_to(file.resolve())
    tokenizer.save_pretrained(target)


def _load_tokenizer(folder: Path, field: str, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    read_tokenizer(folder)
    try:
        return load_tokenizer(folder, trust_remote_code=trust_remote_code)
    except JobFileError as problem:
        raise JobFileError(f"{field}: {problem}") from problem
