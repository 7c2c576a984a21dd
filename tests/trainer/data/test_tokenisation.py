"""Rows become prompts: templates, chat templates, the length limit, the answer."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

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


def ids(text: str) -> tuple[int, ...]:
    """Written out: begin token 1, then one id per character from 4 on."""
    return (1, *(4 + LETTERS.index(character) for character in text))


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


def test_values_of_a_template_are_not_templates() -> None:
    (prompt,) = encode(encoder(prompt="{question}"), {"question": "{answer} {0}", "answer": "7"})
    assert prompt.text == "{answer} {0}"


def test_the_chat_template_is_rendered_as_written_by_hand_and_the_begin_token_comes_once() -> None:
    (prompt,) = encode(encoder(CHAT, system_prompt="Be brief."), {"question": "1+2?"})
    assert prompt.text == "<s>system: Be brief.|user: 1+2?|assistant:"
    assert prompt.token_ids == ids("system: Be brief.|user: 1+2?|assistant:")


def test_chat_auto_follows_the_tokenizer_and_never_ignores_it() -> None:
    row = {"question": "1+2?"}
    assert encode(encoder(CHAT), row)[0].text == "<s>user: 1+2?|assistant:"
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
    assert prompt.text == "<s>user: a|assistant: b|user: c|assistant:"
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
    ("row", "message"),
    [
        ({"other": 1}, r'file, line 0: the row has no column "question", .* it has other; add it'),
        ({"question": None}, "the prompt is empty"),
        ({"question": "ü"}, "the tokenizer does not know every character of the prompt 'ü'"),
        ({"question": "1", "other": 1}, 'no column "answer", which spec.data.answer names'),
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
