"""A model folder's tokenizer as transformers loads it, and one with a token per character for random weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rljob_trainer.errors import JobFileError
from rljob_trainer.models.tokenizer_files import COPY, too_large

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

END = "</s>"
"""The one special token of a character tokenizer. Its id is 0; the characters follow in the order given.

A model can generate every token of its vocabulary. Tokens that only pad, begin or replace unknown characters would show
up in answers, so this one does all of that, as GPT-2's ``<|endoftext|>`` does.
"""
SPECIAL: Mapping[str, str] = dict.fromkeys(("pad_token", "bos_token", "eos_token", "unk_token"), END)
"""What transformers and chat templates call it."""
_OF_NO_FAMILY = ("TokenizersBackend", "PreTrainedTokenizerFast")


def character_tokenizer(characters: str, context_length: int) -> PreTrainedTokenizerFast:
    """Encodes text as ``</s>`` and one id per character; decoding gives the same text back.

    A character that is not listed becomes ``</s>`` too, which the data part refuses. Raises ``JobFileError`` when a
    character is listed twice.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    if len(set(characters)) != len(characters):
        twice = sorted({character for character in characters if characters.count(character) > 1})
        raise JobFileError(
            f"spec.model.random.tokenizer.characters lists {''.join(twice)!r} more than once; list each once"
        )
    vocabulary = {token: i for i, token in enumerate((END, *characters))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=END))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{END} $A", pair=f"{END} $A $B", special_tokens=[(END, vocabulary[END])]
    )
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        **SPECIAL,
        model_max_length=context_length,
        clean_up_tokenization_spaces=False,
    )


def load_tokenizer(folder: Path, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder. ``trust_remote_code`` is the job's ``spec.model`` setting.

    Raises ``JobFileError`` for files that transformers cannot make a tokenizer of.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    # For some families (Qwen2) transformers takes its own class whatever the folder says, which cuts text up in its own
    # way and loses without a word what it has no token for: blanks, of a tokenizer made for characters.
    kind = PreTrainedTokenizerFast if _is_what_its_file_says(folder) else AutoTokenizer
    try:
        tokenizer: PreTrainedTokenizerBase = kind.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as problem:
        # Whatever its many classes, or the tokenizers library (whose panics are no Exception), stumble over.
        lines = str(problem).strip().splitlines() or [""]
        raise JobFileError(
            f"transformers cannot load the tokenizer in {folder} ({type(problem).__name__}: {lines[0]}); {COPY}"
        ) from problem
    return tokenizer


def _is_what_its_file_says(folder: Path) -> bool:
    """Whether all there is to know of a tokenizer is in ``tokenizer.json``: it was saved as one of no family."""
    try:
        told = json.loads((folder / "tokenizer_config.json").read_text())
    except (OSError, ValueError):
        return False
    if not isinstance(told, dict) or "auto_map" in told or not (folder / "tokenizer.json").is_file():
        return False
    return told.get("tokenizer_class") in _OF_NO_FAMILY


def check_embedded(tokenizer: PreTrainedTokenizerBase, vocabulary: int, which: str) -> None:
    """Raises ``JobFileError`` when a token of it would have no row in the embedding."""
    # As ``tokenizer_files`` has it: special tokens beside the end's need no row.
    unused = set(tokenizer.all_special_ids) - {tokenizer.eos_token_id}
    size = 1 + max((number for number in tokenizer.get_vocab().values() if number not in unused), default=0)
    if size > vocabulary:
        raise too_large(size, vocabulary, which)
