"""Rows become prompts: templates, chat templates, the length limit, the answer."""

from __future__ import annotations

import random
from datetime import datetime
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from rljob_trainer.data.chat import ChatTemplate, response_decoder, text_encoder
from rljob_trainer.data.tokenisation import PromptEncoder, PromptSettings
from rljob_trainer.errors import DataError, JobFileError
from rljob_trainer.models.tokenizer import character_tokenizer

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 .,:?!+=|{}\n"
CHAT = (
    "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}|{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def encoder(chat_template: str | None = None, **settings: Any) -> PromptEncoder:
    tokenizer = character_tokenizer(LETTERS, 256)
    tokenizer.chat_template = chat_template
    return PromptEncoder(tokenizer, PromptSettings(**({"prompt": "question"} | settings)))


DATED = "{% macro today() %}{{ strftime_now('%d %b %Y') }}{% endmacro %}{{ today() }}|{{ messages[0].content }}"
"""As Llama 3.2's writes it."""


def ids(text: str) -> tuple[int, ...]:
    """Written out: token 0 begins, then one id per character from 1 on."""
    return (0, *(1 + LETTERS.index(character) for character in text))


def encode(e: PromptEncoder, *rows: dict[str, Any]) -> list[Any]:
    return e.encode(rows, [f"file, line {i}" for i in range(len(rows))])


def test_a_column_is_the_prompt_and_another_the_answer() -> None:
    (prompt,) = encode(encoder(answer="answer"), {"question": "1+2=", "answer": 3})
    assert (prompt.text, prompt.token_ids, prompt.answer) == ("1+2=", ids("1+2="), "3")


def test_a_template_is_filled_and_braces_can_be_written() -> None:
    e = encoder(prompt="Add {{x}}: {question} {meta.level}")
    (prompt,) = encode(e, {"question": "1+2", "meta": {"level": 4.0}})
    assert prompt.text == "Add {x}: 1+2 4"
    assert prompt.token_ids == ids("Add {x}: 1+2 4")


def test_a_null_in_a_template_is_refused_and_never_the_word_none() -> None:
    with pytest.raises(DataError, match=r'line 0: the column "hint" \(set by spec.data.prompt\) is null'):
        encode(encoder(prompt="{question}{hint}"), {"question": "1", "hint": None})


def test_a_chat_template_writes_the_date_that_it_is_given() -> None:
    tokenizer = character_tokenizer(LETTERS, 256)
    tokenizer.chat_template = DATED
    dated = PromptEncoder(tokenizer, PromptSettings(prompt="question"), datetime(2024, 7, 26, 23, 59))
    assert dated.date == "2024-07-26T23:59:00"
    (prompt,) = encode(dated, {"question": "1+2"})
    assert prompt.text == "26 Jul 2024|1+2"
    (present,) = encode(encoder(DATED), {"question": "1+2"})
    assert int(present.text[7:11]) > 2024
    assert encoder(CHAT).date is None


def test_values_of_a_template_are_not_templates() -> None:
    (prompt,) = encode(encoder(prompt="{question}"), {"question": "{answer} {0}", "answer": "7"})
    assert prompt.text == "{answer} {0}"


def test_the_chat_template_is_rendered_as_written_by_hand_and_the_begin_token_comes_once() -> None:
    (prompt,) = encode(encoder(CHAT, system_prompt="Be brief."), {"question": "1+2?"})
    assert prompt.text == "</s>system: Be brief.|user: 1+2?|assistant:"
    assert prompt.token_ids == ids("system: Be brief.|user: 1+2?|assistant:")


def test_chat_auto_follows_the_tokenizer_and_never_ignores_it() -> None:
    row = {"question": "1+2?"}
    assert encode(encoder(CHAT), row)[0].text == "</s>user: 1+2?|assistant:"
    assert encode(encoder(CHAT, chat="never"), row)[0].text == "1+2?"
    assert encode(encoder(None), row)[0].text == "1+2?"
    with pytest.raises(JobFileError, match=r"spec\.data\.chat: always needs a tokenizer with a chat template"):
        encoder(None, chat="always")
    with pytest.raises(JobFileError, match=r"spec\.data\.systemPrompt needs a chat template"):
        encoder(None, system_prompt="Be brief.")


def test_a_column_may_hold_chat_messages() -> None:
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    (prompt,) = encode(encoder(CHAT), {"question": messages})
    assert prompt.text == "</s>user: a|assistant: b|user: c|assistant:"
    with pytest.raises(DataError, match=r"file, line 0: the prompt is a list of chat messages"):
        encode(encoder(None), {"question": messages})


def test_overlong_prompts_are_dropped_cut_or_refused() -> None:
    rows = [{"question": "12"}, {"question": "123456"}, {"question": "34"}]
    kept = encode(encoder(max_tokens=4), *rows)
    assert [p and p.text for p in kept] == ["12", None, "34"]
    cut = encode(encoder(max_tokens=4, overlong="truncate"), *rows)
    assert [p.truncated for p in cut] == [False, True, False]
    assert cut[1].token_ids == ids("123456")[-4:]
    with pytest.raises(DataError, match=r"file, line 1: the prompt has 7 tokens, more than maxPromptTokens = 4"):
        encode(encoder(max_tokens=4, overlong="error"), *rows)
    assert encode(encoder(max_tokens=7), *rows)[1].text == "123456"


@pytest.mark.parametrize(
    ("chat_template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 1 }}", "can only concatenate str"),
    ],
)
def test_a_row_that_the_chat_template_refuses_is_named(chat_template: str, message: str) -> None:
    with pytest.raises(DataError, match=rf"line 1: the chat template cannot render the prompt \(.*{message}"):
        encoder(chat_template).encode([{"question": "1"}], ["line 1"])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"other": 1}, r'file, line 0: the row has no column "question" .* it has other; add it'),
        (
            {"question": None},
            r'file, line 0: the column "question" \(set by spec.data.prompt\) is null or NaN; fill it in',
        ),
        ({"question": "ü"}, "the tokenizer does not know every character of the prompt 'ü'"),
        ({"question": "1", "other": 1}, r'no column "answer" \(set by spec.data.answer\)'),
    ],
)
def test_a_bad_row_is_named(row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        encode(encoder(answer="answer"), row)


def test_an_empty_prompt_has_no_tokens_where_there_is_no_begin_token() -> None:
    e = encoder(CHAT, chat="never")
    tokenizer = e.tokenizer
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    tokenizer.backend_tokenizer.post_processor = None
    with pytest.raises(DataError, match="the prompt has no tokens"):
        encode(e, {"question": ""})


def test_columns_are_checked_before_the_first_row() -> None:
    with pytest.raises(JobFileError, match=r"spec\.data\.prompt: set 's' has no column 'hint'; it has question"):
        encoder(prompt="{question} {hint}").check_columns(["question"], "set 's'")
    with pytest.raises(JobFileError, match=r"spec\.data\.answer: set 's' has no column 'result'"):
        encoder(answer="result").check_columns(["question"], "set 's'")
    encoder(answer="reward_model.ground_truth").check_columns(["question", "reward_model"], "set 's'")


@pytest.mark.parametrize("template", ["{question", "question}", "{}", "{question!r}", "{question:>9}"])
def test_a_malformed_template_is_refused(template: str) -> None:
    with pytest.raises(JobFileError, match=r"spec\.data\.prompt"):
        encoder(prompt=template)


TEXTS = [
    "Natalia sold clips to 48 of her friends in April,\nand half as many in May.",
    "  naïve café — 東京 \U0001f600 e\u0301\t\r\n\n",
    "<s>A special token as text, and one at the end</s>",
    "",
    "aaaa " * 500,
]


def words() -> PreTrainedTokenizerFast:
    """As BERT's: lower case, pieces of words, two special tokens around each text."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=["<pad>", "<s>", "</s>", "<unk>"])
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.post_processor = processors.BertProcessing(("</s>", 2), ("<s>", 1))
    return wrapped(tokenizer)


def byte_pairs() -> PreTrainedTokenizerFast:
    """As those of Llama 3 and Qwen: bytes, no unknown character."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<pad>", "<s>", "</s>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.decoder = decoders.ByteLevel()
    return wrapped(tokenizer)


def sentence_pieces() -> PreTrainedTokenizerFast:
    """As T5's: pieces that may begin with a space."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=120, special_tokens=["<pad>", "<s>", "</s>", "<unk>"], unk_token="<unk>"
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 2)])
    return wrapped(tokenizer)


def wrapped(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def test_a_token_for_what_is_unknown_that_is_also_another_one_is_no_unknown_character() -> None:
    """As GPT-2's, with a template that begins as OLMo 2's."""
    byte_pairs = Tokenizer(models.BPE({"<|endoftext|>": 0, "h": 1, "i": 2, ":": 3}, []))
    byte_pairs.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    names = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_pairs, **names)
    tokenizer.chat_template = "{{ bos_token }}{{ messages[0].content }}:"
    (prompt,) = encode(PromptEncoder(tokenizer, PromptSettings(prompt="question")), {"question": "hi"})
    assert prompt.token_ids == (0, 1, 2, 3)


@pytest.mark.parametrize("question", ["</s>", "1</s></s>2"])
def test_a_token_for_what_is_unknown_that_the_text_holds_is_no_unknown_character(question: str) -> None:
    (prompt,) = encode(encoder(), {"question": question})
    assert prompt.token_ids.count(0) == 1 + question.count("</s>")
    with pytest.raises(DataError, match="the tokenizer does not know every character"):
        encode(encoder(), {"question": f"{question}ü"})


@pytest.mark.parametrize("make", [words, byte_pairs, sentence_pieces, lambda: character_tokenizer(LETTERS, 256)])
@pytest.mark.parametrize("add_special_tokens", [True, False])
@pytest.mark.parametrize("split_special_tokens", [True, False])
def test_ids_are_those_that_the_tokenizers_own_call_gives(
    make: Any, add_special_tokens: bool, split_special_tokens: bool
) -> None:
    tokenizer = make()
    tokenizer.split_special_tokens = split_special_tokens
    expected = tokenizer(TEXTS, add_special_tokens=add_special_tokens)["input_ids"]
    encode = text_encoder(tokenizer, add_special_tokens=add_special_tokens)
    assert encode(TEXTS) == expected
    # Another use leaves its settings behind.
    tokenizer(TEXTS, truncation=True, max_length=4, padding="max_length", split_special_tokens=not split_special_tokens)
    assert tokenizer.backend_tokenizer.truncation
    assert tokenizer.backend_tokenizer.padding
    assert encode(TEXTS) == expected
    assert encode(TEXTS) == expected


def test_a_tokenizer_that_encodes_in_its_own_way_is_asked() -> None:
    class Backwards(PreTrainedTokenizerFast):
        def _encode_plus(self, text: Any, **settings: Any) -> Any:
            return super()._encode_plus([one[::-1] for one in text], **settings)

    tokenizer = Backwards(tokenizer_object=byte_pairs().backend_tokenizer)
    forwards = byte_pairs()(["april"], add_special_tokens=False)["input_ids"]
    assert text_encoder(tokenizer, add_special_tokens=False)(["lirpa"]) == forwards


@pytest.mark.parametrize("make", [words, byte_pairs, sentence_pieces, lambda: character_tokenizer(LETTERS, 256)])
@pytest.mark.parametrize("clean_up", [True, False])
@pytest.mark.parametrize("tokens", [0, 1, 40, 3000])
def test_texts_are_those_that_the_tokenizers_own_call_gives(make: Any, clean_up: bool, tokens: int) -> None:
    """Of a few tokens and of many, which are decoded in different ways."""
    tokenizer = make()
    tokenizer.clean_up_tokenization_spaces = clean_up
    draw = random.Random(tokens)
    responses = [[draw.randrange(len(tokenizer)) for _ in range(tokens)] for _ in range(3)]
    stops = {tokenizer.eos_token_id, 7}
    expected = [[id for id in ids if id not in stops] for ids in responses]
    assert response_decoder(tokenizer, stops)(responses) == tokenizer.batch_decode(expected)
    plain = tokenizer.batch_decode(responses, skip_special_tokens=True)
    assert [ChatTemplate(tokenizer).decode(ids) for ids in responses] == plain


def test_a_response_shows_the_special_tokens_in_it_but_those_that_end_an_answer() -> None:
    """Of a model that has written padding into the first of its answers."""
    tokenizer = character_tokenizer("ab", 64)
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    decode = response_decoder(tokenizer, [0])
    assert decode([[1, 3, 2, 0, 1, 0], [0], [], [2, 2]]) == ["a<pad>ba", "", "", "bb"]


@pytest.mark.parametrize(
    ("cell", "words"),
    [
        (["a", "b"], r"a list whose entry 0 is not a chat message with a role \(a\)"),
        ([{"role": "user", "content": "a"}, {"content": "b"}], r"a list whose entry 1 is not a chat message with a"),
        ({"text": "a"}, r"a dict \(\{'text': 'a'\}\)"),
        (b"1", r"a bytes \(b'1'\)"),
    ],
)
@pytest.mark.parametrize("chat_template", [None, CHAT])
def test_a_cell_that_is_neither_text_nor_messages_is_refused(cell: Any, words: str, chat_template: str | None) -> None:
    with pytest.raises(DataError, match=rf"file, line 0: column 'question' \(spec.data.prompt\) contains {words}"):
        encode(encoder(chat_template), {"question": cell})
