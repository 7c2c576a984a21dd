"""A tokenizer with one token per character, for models with random weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rljob_trainer.errors import JobFileError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAD, BOS, EOS, UNKNOWN = "<pad>", "<s>", "</s>", "<unk>"
SPECIAL_TOKENS = (PAD, BOS, EOS, UNKNOWN)
"""Their ids are 0 to 3; the characters follow in the order given."""


def character_tokenizer(characters: str, context_length: int) -> PreTrainedTokenizerFast:
    """Encodes text as ``<s>`` and one id per character; decoding gives the same text back.

    A character that is not listed becomes ``<unk>``, which the data part refuses. Raises ``JobFileError`` when a
    character is listed twice.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    if len(set(characters)) != len(characters):
        twice = sorted({character for character in characters if characters.count(character) > 1})
        raise JobFileError(
            f"spec.model.random.tokenizer.characters lists {''.join(twice)!r} more than once; list each once"
        )
    vocabulary = {token: i for i, token in enumerate((*SPECIAL_TOKENS, *characters))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, vocabulary[BOS])]
    )
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNKNOWN,
        model_max_length=context_length,
        clean_up_tokenization_spaces=False,
    )
