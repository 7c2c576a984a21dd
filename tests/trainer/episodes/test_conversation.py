"""What the model said is never tokenised again, under the chat templates of published models.

The oracle is the template itself, which renders the whole chat: the context's text must be that, while its token ids
hold those that the model said, which are other ones than the tokenizer would make of their text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from published_chats import FAMILIES, Family, chat_of, letters_of
from transformers import AddedToken

from rljob_trainer.data.chat import ChatTemplate
from rljob_trainer.episodes.conversation import Conversation
from rljob_trainer.episodes.episode import Prompt


def text_of(chat: ChatTemplate, ids: Sequence[int]) -> str:
    return chat._tokenizer.decode(list(ids), skip_special_tokens=False)


def played(chat: ChatTemplate, family: Family, answers: Sequence[tuple[str, bool]], told: Sequence[dict[str, Any]]):
    """A chat in which the model gives these answers, each of which it has ended itself or not, and is told something
    after each. Returns the last context, the conversation, its messages, and what the model said."""
    messages: list[Any] = [{"role": "user", "content": "What is the answer?"}]
    text = chat.render(messages)
    prompt = Prompt(0, 0, 0, "", text, tuple(chat.encode(text)), None, messages=messages)
    conversation = Conversation(chat, prompt)
    context = conversation.context(messages)
    spoken = []
    for (answer, ended), more in zip(answers, told, strict=True):
        said = letters_of(chat, answer) + (chat.encode(family.end) if ended else [])
        spoken.append(said)
        messages = [*messages, conversation.answered(context, said), more]
        context = conversation.context(messages)
    return context.ids, conversation, messages, spoken


def without_empty_thoughts(text: str) -> str:
    """Some templates open the next answer, or the last one, with a place to think, and leave it out of history. What
    the model saw stays what it was."""
    return text.replace("<think>\n\n</think>\n\n", "").replace("<think>\n", "")


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@pytest.mark.parametrize("ended", [True, False], ids=["ended", "cut"])
def test_a_context_is_what_the_template_renders_with_the_tokens_that_were_said(family: Family, ended: bool) -> None:
    chat = chat_of(family)
    tool = {"role": family.tool_role, "content": "an answer of a tool"}
    context, conversation, messages, spoken = played(
        chat, family, [("an answer", ended), ("one more answer", ended)], [tool, {"role": "user", "content": "more"}]
    )
    assert without_empty_thoughts(text_of(chat, context)) == without_empty_thoughts(chat.render(messages))
    assert conversation.branches == 0
    whole = " ".join(map(str, context))
    for said in spoken:
        assert " ".join(map(str, said)) in whole
    assert list(context) != chat.encode(chat.render(messages)), "the model says other tokens than the tokenizer"
    assert not chat.drops_history or family.name == "qwen3"


@pytest.mark.parametrize("family", [f for f in FAMILIES if f.name == "qwen3"], ids=lambda family: family.name)
def test_where_thinking_is_left_out_the_next_question_begins_a_branch(family: Family) -> None:
    chat = chat_of(family)
    thought = "<think>\nwhy\n</think>\n\nan answer"
    assert chat.drops_history
    asked = {"role": "user", "content": "more"}
    context, conversation, messages, _ = played(chat, family, [(thought, True)], [asked])
    assert conversation.branches == 1
    assert text_of(chat, context) == chat.render(messages)
    assert "why" not in text_of(chat, context)
    told = {"role": "tool", "content": "seven"}
    context, conversation, messages, (said,) = played(chat, family, [(thought, True)], [told])
    assert conversation.branches == 0, "what a tool says leaves the thinking that called it where it is"
    assert " ".join(map(str, said)) in " ".join(map(str, context))
    assert text_of(chat, context) == chat.render(messages)


def test_a_template_that_ends_its_last_answer_otherwise_goes_on_all_the_same() -> None:
    """As gpt-oss does: ``<|return|>`` ends the last answer, ``<|end|>`` those before. The model's own word stands."""
    family = Family("", "<|return|>", ("<|start|>", "<|message|>", "<|end|>", "<|return|>"))
    text = (
        "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}"
        "{{ '<|return|>' if loop.last and m.role == 'assistant' else '<|end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant<|message|>{% endif %}"
    )
    chat = chat_of(family, text)
    context, conversation, messages, _ = played(
        chat, family, [("an answer", True), ("more", True)], [{"role": "user", "content": "so"}] * 2
    )
    assert conversation.branches == 0
    rendered = chat.render(messages)
    assert rendered.count("<|end|>") == 5
    expected = rendered.replace("an answer<|end|>", "an answer<|return|>").replace("more<|end|>", "more<|return|>")
    assert text_of(chat, context) == expected


def test_a_history_that_was_rewritten_is_rendered_whole_and_counted() -> None:
    family = FAMILIES[0]
    chat = chat_of(family)
    context, conversation, messages, _ = played(chat, family, [("an answer", True)], [{"role": "user", "content": "x"}])
    rewritten = [messages[0], {"role": "assistant", "content": "another answer"}, messages[2]]
    assert list(conversation.context(rewritten).ids) == chat.encode(chat.render(rewritten))
    assert conversation.branches == 1
    assert conversation.context(messages).ids == context, "the branch that was left can be taken up again"
    assert conversation.branches == 1


def test_tools_that_the_prompt_did_not_name_are_in_the_context() -> None:
    family = FAMILIES[0]
    chat = chat_of(family)
    schema = {"type": "function", "function": {"name": "count", "description": "", "parameters": {}}}
    messages: list[Any] = [{"role": "user", "content": "q"}]
    text = chat.render(messages)
    prompt = Prompt(0, 0, 0, "", text, tuple(chat.encode(text)), None, messages=messages)
    conversation = Conversation(chat, prompt)
    assert conversation.context(messages).ids is prompt.token_ids
    assert list(conversation.context(messages, [schema]).ids) == chat.encode(chat.render(messages, [schema]))
    assert conversation.branches == 0


def test_what_cannot_be_rendered_is_said() -> None:
    family = FAMILIES[0]
    chat = chat_of(family, "{{ raise_exception('no systems') }}")
    prompt = Prompt(0, 0, 0, "", "", (1,), None)
    with pytest.raises(ValueError, match="the chat template cannot render the messages \\(no systems\\)"):
        Conversation(chat, prompt).context([{"role": "user", "content": "q"}])
    with pytest.raises(TypeError, match="a message must be plain data"):
        Conversation(chat, prompt).context([{"role": "user", "content": object()}])


def test_branches_that_wait_for_the_model_at_once_keep_apart_what_each_saw() -> None:
    chat = chat_of(FAMILIES[0], "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}")
    conversation = Conversation(chat, Prompt(0, 0, 0, "", "", (1,), None))
    asked = [[{"role": "user", "content": content}] for content in ("left", "right")]
    contexts = [conversation.context(messages) for messages in asked]
    answers = [conversation.answered(context, letters_of(chat, "an answer")) for context in contexts]
    assert [answer["content"] for answer in answers] == ["an answer"] * 2
    for messages, context in zip(asked, contexts, strict=True):
        assert context.text == f"{messages[0]['content']}<|im_end|>"
        (known,) = [a for a in conversation._answered if a.ids[: len(context.ids)] == context.ids]
        assert known.text == f"{messages[0]['content']}<|im_end|>an answer"


def test_who_asked_may_change_its_messages_before_the_answer_is_there() -> None:
    family = FAMILIES[0]
    chat = chat_of(family)
    conversation = Conversation(chat, Prompt(0, 0, 0, "", "", (1,), None))
    messages: list[Any] = [{"role": "user", "content": "q"}]
    asked = conversation.context(messages)
    messages.append({"role": "user", "content": "and this"})
    answer = conversation.answered(asked, letters_of(chat, "an answer"))
    assert [message["content"] for message in conversation.messages] == ["q", "an answer"]
    answer["content"] = "changed"
    assert conversation.messages[1]["content"] == "an answer"
    went_on = conversation.context([*messages, {"role": "assistant", "content": "an answer"}])
    assert "and this" in text_of(chat, went_on.ids), "the model has not seen it yet"


def test_tokens_that_a_tokenizer_has_added_cannot_be_said_by_a_tool() -> None:
    """Published ones name only some of theirs as special (Llama 3), or mark them as ordinary (DeepSeek)."""
    tokenizer = chat_of(FAMILIES[0])._tokenizer
    tokenizer.add_tokens([AddedToken("<|start_header_id|>", special=True), AddedToken("<｜User｜>"), AddedToken("  ")])
    chat = ChatTemplate(tokenizer)
    said = "a  b <|start_header_id|>system<|im_start|> <｜User｜>"
    told = chat.without_special(said)
    assert told == "a  b < |start_header_id|>system< |im_start|> < ｜User｜>"
    names = tokenizer.convert_ids_to_tokens(chat.encode(told))
    assert not {"<|start_header_id|>", "<|im_start|>", "<｜User｜>"} & set(names)
