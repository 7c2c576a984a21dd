"""The endpoint's other protocols, before the clients that their makers publish."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import openai
import pytest
from scripted_model import ASKED, CALL, TOOL, Scripted, log_probs_of, played, said

from rljob_trainer.endpoint.served import MODEL, ClientSettings
from rljob_trainer.endpoint.server import Endpoint
from rljob_trainer.episodes.episode import Episode
from rljob_trainer.episodes.log import EpisodeLog

TEXTS = f"Let me see. {CALL}", "The answer is 42."
QUESTION = str(ASKED[0]["content"])
FUNCTION: Any = {"type": "function", "strict": None, **TOOL["function"]}  # type: ignore[dict-item]
CLIENT_TOOL: Any = {
    "name": "calculator",
    "description": TOOL["function"]["description"],  # type: ignore[index]
    "input_schema": TOOL["function"]["parameters"],  # type: ignore[index]
}


def assert_one_leaf(episode: Episode, counts: dict[str, float]) -> None:
    """The chat went on from what the model said, and that is trained on."""
    (leaf,) = episode.leaves
    assert [leaf.tokens.ids[turn.start : turn.stop].tolist() for turn in leaf.turns] == [said(text) for text in TEXTS]
    for number, turn in enumerate(leaf.turns):
        expected = log_probs_of(turn.stop - turn.start, number)
        assert leaf.tokens.log_probs[turn.start : turn.stop].tolist() == expected
    assert (counts["rollout/branched_turns"], counts["rollout/tool_calls"]) == (0, 1)


@pytest.mark.parametrize("stream", [False, True])
async def test_responses(endpoint: Endpoint, log: EpisodeLog, stream: bool) -> None:
    model = Scripted(*TEXTS)

    async def agent(client: ClientSettings) -> None:
        async with openai.AsyncOpenAI(base_url=client.base_url, api_key=client.api_key) as api:
            items: list[Any] = [{"role": "user", "content": QUESTION}]
            asked: Any = {"model": client.model, "tools": [FUNCTION]}
            for number in range(2):
                if stream:
                    async with api.responses.stream(input=items, **asked) as events:
                        kinds = [event.type async for event in events]
                        response = await events.get_final_response()
                    assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
                else:
                    response = await api.responses.create(input=items, **asked)
                assert response.usage.input_tokens == len(model.seen[number])
                assert response.usage.output_tokens == len(said(TEXTS[number]))
                items += [item.model_dump(exclude_none=True, by_alias=True) for item in response.output]
                calls = [item for item in response.output if item.type == "function_call"]
                if number == 0:
                    assert response.output_text == "Let me see."
                    (call,) = calls
                    assert json.loads(call.arguments) == {"expression": "2 * 21"}
                    items.append({"type": "function_call_output", "call_id": call.call_id, "output": "42"})
                else:
                    assert (response.output_text, calls) == (TEXTS[1], [])

    assert_one_leaf(*await played(agent, model, endpoint, log))


@pytest.mark.parametrize("stream", [False, True])
async def test_messages(endpoint: Endpoint, log: EpisodeLog, stream: bool) -> None:
    model = Scripted(*TEXTS)

    async def agent(client: ClientSettings) -> None:
        variables = client.variables()
        settings = {"base_url": variables["ANTHROPIC_BASE_URL"], "api_key": variables["ANTHROPIC_API_KEY"]}
        async with anthropic.AsyncAnthropic(**settings) as api:  # type: ignore[arg-type]
            messages: list[Any] = [{"role": "user", "content": QUESTION}]
            asked: Any = {"model": client.model, "tools": [CLIENT_TOOL], "max_tokens": 500}
            for number in range(2):
                if stream:
                    async with api.messages.stream(messages=messages, **asked) as events:
                        message = await events.get_final_message()
                else:
                    message = await api.messages.create(messages=messages, **asked)
                assert message.usage.input_tokens == len(model.seen[number])
                assert message.usage.output_tokens == len(said(TEXTS[number]))
                content = [block.model_dump(exclude_none=True, include={"type", "text", "id", "name", "input"})
                           for block in message.content]  # fmt: skip
                messages.append({"role": "assistant", "content": content})
                if number == 0:
                    assert message.stop_reason == "tool_use"
                    text, call = message.content
                    assert (text.text, call.name, call.input) == ("Let me see.", "calculator", {"expression": "2 * 21"})
                    result = {"type": "tool_result", "tool_use_id": call.id, "content": "42"}
                    messages.append({"role": "user", "content": [result]})
                else:
                    assert (message.stop_reason, message.content[0].text) == ("end_turn", TEXTS[1])

    assert_one_leaf(*await played(agent, model, endpoint, log))


async def test_what_has_no_meaning_here_is_refused_by_its_name(endpoint: Endpoint, log: EpisodeLog) -> None:
    model = Scripted("42")

    async def agent(client: ClientSettings) -> None:
        async with openai.AsyncOpenAI(base_url=client.base_url, api_key=client.api_key) as api:
            for change, param in (
                ({"previous_response_id": "resp_1"}, "previous_response_id"),
                ({"reasoning": {"effort": "low"}}, "reasoning"),
                ({"text": {"format": {"type": "json_object"}}}, "text"),
                ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
                ({"input": [{"type": "reasoning", "id": "r", "summary": []}]}, "input[0].type"),
            ):
                given: Any = {"model": MODEL, "input": QUESTION, **change}
                with pytest.raises(openai.BadRequestError) as refused:
                    await api.responses.create(**given)
                assert refused.value.param == param
        base_url = client.variables()["ANTHROPIC_BASE_URL"]
        async with anthropic.AsyncAnthropic(base_url=base_url, api_key=client.api_key) as other:
            asked: Any = {"model": MODEL, "max_tokens": 5, "messages": [{"role": "user", "content": QUESTION}]}
            begun = {"messages": [*asked["messages"], {"role": "assistant", "content": "It is"}]}
            for change, word in (
                ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
                ({"extra_body": {"top_k": 3}}, "top_k"),
                ({"tool_choice": {"type": "any"}}, "tool_choice"),
                (begun, "prefilling"),
            ):
                with pytest.raises(anthropic.BadRequestError, match=word):
                    await other.messages.create(**{**asked, **change})
        async with anthropic.AsyncAnthropic(base_url=base_url, api_key="sk-none") as stranger:
            with pytest.raises(anthropic.AuthenticationError):
                await stranger.messages.create(**asked)
        assert model.seen == []
        async with anthropic.AsyncAnthropic(base_url=base_url, api_key=client.api_key) as other:
            wishes = {"stop_sequences": ["x"], "extra_body": {"temperature": 0.5}}  # the job's sampling counts
            cut = await other.messages.create(**{**asked, "max_tokens": 1, "system": "Be brief.", **wishes})
            assert cut.stop_reason == "max_tokens"

    await played(agent, model, endpoint, log)
