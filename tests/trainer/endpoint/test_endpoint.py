"""The endpoint before OpenAI's own client: what the model sees and says, what is recorded, what is refused."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import random
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import openai
import pytest
from openai import AsyncOpenAI
from scripted_model import ASKED, CALL, CHAT, TOOL, Scripted, log_probs_of, played, said

from rljob_trainer.endpoint.journal import RequestJournal, answers_in, refuse, turns_of, withdraw
from rljob_trainer.endpoint.served import MODEL, ClientSettings
from rljob_trainer.endpoint.server import Endpoint
from rljob_trainer.episodes.log import EpisodeLog

Messages = list[Any]


def openai_of(client: ClientSettings, **options: Any) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=client.base_url, api_key=client.api_key, **options)


def rendered(messages: Messages, tools: Any = None) -> list[int]:
    """What the template makes of messages, tokenised as a whole."""
    return CHAT.encode(CHAT.render(messages, tools))


async def asked(client: ClientSettings, body: dict[str, Any], **headers: str) -> tuple[int, dict[str, Any]]:
    """A request of a client that is not OpenAI's."""
    sent = {"Authorization": f"Bearer {client.api_key}"} | {name.replace("_", "-"): v for name, v in headers.items()}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{client.base_url}/chat/completions", json=body, headers=sent) as response,
    ):
        return response.status, await response.json()


BODY = {"model": MODEL, "messages": list(ASKED)}


async def test_an_agent_with_tools_goes_on_from_the_very_tokens_that_the_model_said(
    endpoint: Endpoint, log: EpisodeLog
) -> None:
    texts = f"Let me see. {CALL}", "The answer is 42."
    model, completions = Scripted(*texts), []

    async def agent(client: ClientSettings) -> float:
        async with openai_of(client) as api:
            messages: Messages = list(ASKED)
            while True:
                completion = await api.chat.completions.create(
                    model=client.model,
                    messages=messages,
                    tools=[TOOL],
                    logprobs=True,  # type: ignore[list-item]
                )
                completions.append(completion)
                message = completion.choices[0].message
                if not message.tool_calls:
                    return 1.0
                messages += [message, {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "42"}]

    episode, counts = await played(agent, model, endpoint, log)
    first, second = completions
    message = first.choices[0].message
    assert message.content == "Let me see."
    (call,) = message.tool_calls
    assert (call.type, call.function.name) == ("function", "calculator")
    assert json.loads(call.function.arguments) == {"expression": "2 * 21"}
    assert [c.choices[0].finish_reason for c in completions] == ["tool_calls", "stop"]
    assert second.choices[0].message.content == texts[1]
    assert (first.object, first.model) == ("chat.completion", MODEL)
    assert first.id != second.id

    # One leaf: what the model saw, said, was told, and said.
    (leaf,) = episode.leaves
    assert model.seen[0] == list(leaf.prompt_ids) == rendered(list(ASKED), [TOOL])
    spoken = [said(text) for text in texts]
    assert [leaf.tokens.ids[turn.start : turn.stop].tolist() for turn in leaf.turns] == spoken
    assert model.seen[1][: len(model.seen[0]) + len(spoken[0])] == [*model.seen[0], *spoken[0]]
    for number, (turn, completion) in enumerate(zip(leaf.turns, completions, strict=True)):
        expected = log_probs_of(len(spoken[number]), number)
        assert leaf.tokens.log_probs[turn.start : turn.stop].tolist() == expected
        assert [token.logprob for token in completion.choices[0].logprobs.content] == expected
        assert "".join(token.token for token in completion.choices[0].logprobs.content) == texts[number]
        assert completion.usage.prompt_tokens == len(model.seen[number])
        assert completion.usage.completion_tokens == len(spoken[number])
        assert completion.usage.total_tokens == len(model.seen[number]) + len(spoken[number])
    made = sum(map(len, spoken))
    assert leaf.tokens.mask.sum() == made < len(leaf.tokens)
    assert set(leaf.tokens.versions.tolist()) == {3}
    assert (episode.returned, episode.finish) == (1.0, "stop")
    assert counts["rollout/branched_turns"] == 0
    assert (counts["rollout/tool_calls"], counts["rollout/tool_errors"]) == (1, 0)


async def test_a_stream_says_the_same_and_what_is_put_together_from_it_goes_on(
    endpoint: Endpoint, log: EpisodeLog
) -> None:
    model = Scripted(CALL, "42")
    usages = []

    async def agent(client: ClientSettings) -> float:
        async with openai_of(client) as api:
            messages: Messages = list(ASKED)
            for _ in range(2):
                async with api.chat.completions.stream(
                    model=client.model, messages=messages, tools=[TOOL], stream_options={"include_usage": True}
                ) as stream:  # type: ignore[call-overload]
                    kinds = [event.type async for event in stream]
                    completion = await stream.get_final_completion()
                assert "chunk" in kinds
                usages.append((completion.usage.prompt_tokens, completion.usage.completion_tokens))
                message = completion.choices[0].message
                if not message.tool_calls:
                    assert message.content == "42"
                    assert completion.choices[0].finish_reason == "stop"
                    return 1.0
                assert completion.choices[0].finish_reason == "tool_calls"
                call = message.tool_calls[0]
                assert json.loads(call.function.arguments) == {"expression": "2 * 21"}
                answer = {"role": "assistant", "content": message.content, "tool_calls": [
                    {"id": call.id, "type": "function",
                     # Some write the arguments anew.
                     "function": {"name": call.function.name, "arguments": '{ "expression":"2 * 21" }'}}
                ]}  # fmt: skip
                messages += [answer, {"role": "tool", "tool_call_id": call.id, "content": "42"}]
        raise AssertionError

    episode, counts = await played(agent, model, endpoint, log)
    (leaf,) = episode.leaves
    assert len(leaf.turns) == 2
    assert counts["rollout/branched_turns"] == 0
    assert usages == [(len(seen), len(said(text))) for seen, text in zip(model.seen, model.texts, strict=True)]


async def test_a_history_that_the_agent_has_changed_is_a_branch_of_its_own(endpoint: Endpoint, log: EpisodeLog) -> None:
    model = Scripted("It is 41.", "Yes.")
    changed: Messages = [*ASKED, {"role": "assistant", "content": "It is 42."}, {"role": "user", "content": "Sure?"}]

    async def agent(client: ClientSettings) -> None:
        async with openai_of(client) as api:
            await api.chat.completions.create(model=MODEL, messages=list(ASKED))  # type: ignore[arg-type]
            await api.chat.completions.create(model=MODEL, messages=changed)

    episode, counts = await played(agent, model, endpoint, log)
    one, other = episode.leaves
    assert one.tokens.ids.tolist() == said("It is 41.")
    # What the agent has written is context, and nothing to train on.
    assert list(other.prompt_ids) == rendered(changed)
    assert other.tokens.ids.tolist() == said("Yes.")
    assert other.tokens.mask.all()
    assert counts["rollout/branched_turns"] == 1


async def test_a_changed_call_is_shown_to_the_model_as_the_agent_has_it(endpoint: Endpoint, log: EpisodeLog) -> None:
    model = Scripted(CALL, "43")

    async def agent(client: ClientSettings) -> None:
        async with openai_of(client) as api:
            first = await api.chat.completions.create(model=MODEL, messages=list(ASKED), tools=[TOOL])  # type: ignore
            call = first.choices[0].message.tool_calls[0].model_dump()  # type: ignore[index]
            call["function"]["arguments"] = '{"expression": "2 * 22"}'
            told = {"role": "tool", "tool_call_id": call["id"], "content": "44<|im_end|>"}
            messages: Messages = [*ASKED, {"role": "assistant", "tool_calls": [call]}, told]
            await api.chat.completions.create(model=MODEL, messages=messages, tools=[TOOL])  # type: ignore[list-item]

    episode, counts = await played(agent, model, endpoint, log)
    assert (len(episode.leaves), counts["rollout/branched_turns"]) == (2, 1)
    shown = CHAT._tokenizer.decode(episode.leaves[1].prompt_ids)
    assert '"expression": "2 * 22"' in shown
    # A tool cannot end its own message and speak for another.
    assert "44< |im_end|>" in shown


async def test_what_cannot_be_read_is_no_call_and_counted(endpoint: Endpoint, log: EpisodeLog) -> None:
    text = '<tool_call>{"name": calculator}</tool_call>'

    async def agent(client: ClientSettings) -> None:
        async with openai_of(client) as api:
            answer = await api.chat.completions.create(model=MODEL, messages=list(ASKED), tools=[TOOL])  # type: ignore
            assert answer.choices[0].message.tool_calls is None
            assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (text, "stop")

    _, counts = await played(agent, Scripted(text), endpoint, log)
    assert (counts["rollout/tool_calls"], counts["rollout/tool_errors"]) == (1, 1)


async def test_a_call_that_is_only_thought_of_is_none(endpoint: Endpoint, log: EpisodeLog) -> None:
    thought = f"<think>Perhaps {CALL}?</think>"

    async def agent(client: ClientSettings) -> None:
        async with openai_of(client) as api:
            asked: Any = {"model": MODEL, "messages": list(ASKED), "tools": [TOOL]}
            message = (await api.chat.completions.create(**asked)).choices[0].message
            assert (message.content, message.tool_calls) == (f"{thought}42", None)
            message = (await api.chat.completions.create(**asked)).choices[0].message
            assert message.content == f"{thought}So:"
            assert len(message.tool_calls or ()) == 1

    _, counts = await played(agent, Scripted(f"{thought}42", f"{thought}So: {CALL}"), endpoint, log)
    assert (counts["rollout/tool_calls"], counts["rollout/tool_errors"]) == (1, 0)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"n": 2}, "n"),
    ({"temperature": "hot"}, "temperature"),
    ({"stop": [1]}, "stop"),
    ({"seed": 1}, "seed"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"frequency_penalty": 0.1}, "frequency_penalty"),
    ({"logit_bias": {"1": 2}}, "logit_bias"),
    ({"logprobs": True, "top_logprobs": 2}, "top_logprobs"),
    ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice"),
    ({"tools": [TOOL], "parallel_tool_calls": False}, "parallel_tool_calls"),
    ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0].type"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"reasoning_effort": "low"}, "reasoning_effort"),
    ({"extra_body": {"best_of": 3}}, "best_of"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "function", "content": "x", "name": "y"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": "x", "name": "y"}]}, "messages[0].name"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]},
        "messages[0].content[0]",
    ),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
    ({"messages": [{"role": "assistant"}]}, "messages[0].content"),
]


async def test_what_has_no_meaning_here_is_refused_by_its_name(endpoint: Endpoint, log: EpisodeLog) -> None:
    model = Scripted("42")

    async def agent(client: ClientSettings) -> None:
        async with openai_of(client) as api:
            for change, param in REFUSED:
                with pytest.raises(openai.BadRequestError) as refused:
                    await api.chat.completions.create(**{**BODY, **change})
                assert refused.value.param == param
                assert refused.value.type == "invalid_request_error"
                assert refused.value.code
            with pytest.raises(openai.NotFoundError) as unknown:
                await api.chat.completions.create(**{**BODY, "model": "gpt-4o"})  # type: ignore[call-overload]
            assert unknown.value.code == "model_not_found"
            assert model.seen == []
            # What asks for what happens anyway, and what changes no answer.
            taken = {"n": 1, "temperature": 1.0, "top_p": 1, "stop": None, "user": "me", "store": False,
                     "tool_choice": "none", "response_format": {"type": "text"}, "frequency_penalty": 0,
                     "metadata": {"a": "b"}}  # fmt: skip
            await api.chat.completions.create(**BODY, **taken)

    episode, _ = await played(agent, model, endpoint, log)
    assert len(episode.leaves) == 1


async def test_the_job_s_sampling_counts_whatever_a_client_asks_for_which_is_said_once(
    endpoint: Endpoint, log: EpisodeLog, caplog: pytest.LogCaptureFixture
) -> None:
    """The clients of most agents have a temperature of their own, and one that is right in training is wrong in
    validation."""
    model = Scripted("It is 42, Observation: 43")

    async def agent(client: ClientSettings) -> None:
        async with openai_of(client) as api:
            for _ in range(2):
                wishes: Any = {"temperature": 0.5, "top_p": 0.9, "stop": ["Observation:"]}
                completion = await api.chat.completions.create(**BODY, **wishes)
                assert completion.choices[0].message.content == model.texts[0]

    episode, _ = await played(agent, model, endpoint, log)
    assert [leaf.tokens.ids.tolist() for leaf in episode.leaves] == [said(model.texts[0])] * 2
    assert [record.getMessage() for record in caplog.records if "asks for" in record.getMessage()] == [
        "an agent asks for temperature 0.5, but answers are sampled with the job's 1 (logged once per run)",
        "an agent asks for top_p 0.9, but answers are sampled with the job's 1 (logged once per run)",
        "an agent asks for stop ['Observation:'], but answers continue until the model ends them (logged once per run)",
    ]


async def test_a_body_that_is_none_and_a_path_that_is_none_are_told_so(endpoint: Endpoint, log: EpisodeLog) -> None:
    async def agent(client: ClientSettings) -> None:
        headers = {"Authorization": f"Bearer {client.api_key}"}
        async with aiohttp.ClientSession(headers=headers) as session:
            for data in (b"{", b"[" * 100_000, b'"x"', b"\xff"):
                async with session.post(f"{client.base_url}/chat/completions", data=data) as response:
                    assert response.status == 400
                    assert (await response.json())["error"]["type"] == "invalid_request_error"
            async with session.post(f"{client.base_url}/embeddings", json={}) as response:
                assert response.status == 404
                assert "/embeddings" in (await response.json())["error"]["message"]
        await asked(client, BODY)

    await played(agent, Scripted("42"), endpoint, log)


async def test_each_episode_has_a_key_of_its_own(
    endpoint: Endpoint, log: EpisodeLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared = []

    def compare(given: bytes, wanted: bytes) -> bool:
        compared.append(wanted)
        return given == wanted

    monkeypatch.setattr(hmac, "compare_digest", compare)
    seen: list[ClientSettings] = []

    async def agent(client: ClientSettings) -> None:
        others = [other for other in seen if other is not client]
        seen.append(client)
        wrong = [ClientSettings(client.base_url, "sk-none"), ClientSettings(client.base_url, "")]
        wrong += [ClientSettings(client.base_url, other.api_key) for other in others]
        wrong.append(ClientSettings(client.base_url.replace(client.base_url.split("/")[3], "0" * 16), client.api_key))
        wrong.append(ClientSettings(client.base_url.replace(client.base_url.split("/")[3], "0" * 16), "none"))
        for one in wrong:
            status, told = await asked(one, BODY)
            assert (status, told["error"]["code"]) == (401, "invalid_api_key")
        for other in others:
            # That episode has ended.
            async with openai_of(other) as api:
                with pytest.raises(openai.APIStatusError) as gone:
                    await api.chat.completions.create(**BODY)  # type: ignore[call-overload]
                assert (gone.value.status_code, gone.value.code) == (410, "episode_ended")
        async with openai_of(client) as api:
            assert [one.id async for one in api.models.list()] == [MODEL]
            assert (await api.models.retrieve(MODEL)).owned_by == "rljob"
            await api.chat.completions.create(**BODY)  # type: ignore[call-overload]

    for number in range(2):
        await played(agent, Scripted("42"), endpoint, EpisodeLog(log._folder / str(number)))
    assert len({client.api_key for client in seen} | {client.base_url for client in seen}) == 4
    assert {client.api_key.encode() for client in seen} <= set(compared)


async def test_equal_requests_have_two_answers_unless_the_client_says_that_it_repeats_itself(
    endpoint: Endpoint, log: EpisodeLog
) -> None:
    model = Scripted("first", "second", "third", "fourth")
    answers = []

    async def agent(client: ClientSettings) -> None:
        for headers in (
            {},
            {},
            {"x_stainless_retry_count": "1"},
            {"x_stainless_retry_count": "1"},
            {"Idempotency_Key": "a"},
            {"Idempotency_Key": "a"},
            {"Idempotency_Key": "b"},
        ):
            status, answer = await asked(client, BODY, **headers)
            assert status == 200
            answers.append(answer["choices"][0]["message"]["content"])
        status, told = await asked(client, {**BODY, "max_tokens": 3}, Idempotency_Key="a")
        assert (status, told["error"]["code"]) == (422, "idempotency_key_reused")
        status, told = await asked(client, BODY, x_stainless_retry_count="x")
        assert (status, told["error"]["param"]) == (400, "x-stainless-retry-count")

    episode, _ = await played(agent, model, endpoint, log)
    # Each of the equal ones is repeated once, the later one first.
    assert answers == ["first", "second", "second", "first", "third", "third", "fourth"]
    assert len(model.seen) == 4
    assert len(episode.leaves) == 4


async def test_a_client_that_gives_up_and_tries_again_is_told_the_answer_to_its_first_try(
    endpoint: Endpoint, log: EpisodeLog
) -> None:
    model = Scripted("42")
    model.gate.clear()

    async def agent(client: ClientSettings) -> None:
        async with openai_of(client, timeout=0.5, max_retries=20) as api:
            request = asyncio.create_task(api.chat.completions.create(**BODY))  # type: ignore[call-overload]
            (episode,) = endpoint._open.values()
            while not any(  # noqa: ASYNC110
                one.retries for kept in episode.repeats._by_body.values() for one in kept
            ):
                await asyncio.sleep(0.01)
            model.gate.set()
            assert (await request).choices[0].message.content == "42"

    episode, _ = await played(agent, model, endpoint, log)
    assert len(model.seen) == 1
    assert len(episode.leaves[0].turns) == 1


async def test_the_answer_to_a_client_that_has_gone_is_the_episode_s(endpoint: Endpoint, log: EpisodeLog) -> None:
    model = Scripted("42")
    model.gate.clear()

    async def agent(client: ClientSettings) -> float:
        request = asyncio.create_task(asked(client, BODY))
        while not model.seen:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        request.cancel()
        await asyncio.wait([request])
        asyncio.get_running_loop().call_later(0.05, model.gate.set)
        return 1.0

    episode, _ = await played(agent, model, endpoint, log)
    assert episode.leaves[0].tokens.ids.tolist() == said("42")
    assert episode.returned == 1.0


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_hangs_up_leaves_no_traceback(
    endpoint: Endpoint, log: EpisodeLog, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    """In the middle of its question, and while it is given the answer."""
    model = Scripted("42" * 400)

    async def agent(client: ClientSettings) -> float:
        address = urlsplit(client.base_url)
        body = json.dumps({**BODY, "stream": stream}).encode()
        head = (
            f"POST {address.path}/chat/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {client.api_key}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        ).encode()
        for sent, answered in ((head + body[:10], False), (head + body, False), (head + body, True)):
            before = len(model.seen)
            model.gate.clear()
            _, writer = await asyncio.open_connection(address.hostname, address.port)
            writer.write(sent)
            await writer.drain()
            while sent.endswith(body) and len(model.seen) == before:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            if answered:
                model.gate.set()
            writer.transport.abort()
            model.gate.set()
            async with openai_of(client) as api:  # it has been heard of by then
                await api.chat.completions.create(**BODY)  # type: ignore[call-overload]
        return 1.0

    with caplog.at_level(logging.WARNING):
        episode, _ = await played(agent, model, endpoint, log)
    assert episode.returned == 1.0
    assert caplog.records == []


async def test_an_episode_that_has_had_its_turns_says_so(endpoint: Endpoint, log: EpisodeLog) -> None:
    async def agent(client: ClientSettings) -> float:
        async with openai_of(client) as api:
            await api.chat.completions.create(**BODY)  # type: ignore[call-overload]
            with pytest.raises(openai.BadRequestError, match="its 1 turns") as over:
                await api.chat.completions.create(**BODY)  # type: ignore[call-overload]
            assert over.value.code == "episode_over"
        return 0.5

    episode, _ = await played(agent, Scripted("41", "42"), endpoint, log, turns=1)
    assert (episode.finish, episode.returned) == ("length", 0.5)


async def test_an_agent_may_shorten_a_history_that_leaves_no_room(endpoint: Endpoint, log: EpisodeLog) -> None:
    model = Scripted("x" * 30, "42")

    async def agent(client: ClientSettings) -> float:
        async with openai_of(client) as api:
            first = await api.chat.completions.create(**BODY)  # type: ignore[call-overload]
            assert first.choices[0].finish_reason == "stop"
            longer: Messages = [*ASKED, first.choices[0].message, {"role": "user", "content": "y" * 30}]
            with pytest.raises(openai.BadRequestError) as full:
                await api.chat.completions.create(model=MODEL, messages=longer)
            assert full.value.code == "context_length_exceeded"
            short: Messages = [{"role": "user", "content": "In short?"}]
            assert (await api.chat.completions.create(model=MODEL, messages=short)).choices[0].message.content == "42"
        return 1.0

    # The place in which a question was refused is taken: the model's next turn is its third.
    model.texts = ("x" * 30, "unsaid", "42")
    episode, _ = await played(agent, model, endpoint, log, longest=40)
    assert (episode.finish, episode.returned, len(episode.leaves)) == ("stop", 1.0, 2)


async def test_fewer_tokens_are_said_where_the_client_wants_fewer(endpoint: Endpoint, log: EpisodeLog) -> None:
    async def agent(client: ClientSettings) -> None:
        for limits in ({"max_tokens": 4}, {"max_completion_tokens": 4}, {"max_tokens": 4, "max_completion_tokens": 9}):
            _, answer = await asked(client, {**BODY, **limits})
            assert answer["usage"]["completion_tokens"] == 4
            assert answer["choices"][0]["finish_reason"] == "length"

    await played(agent, Scripted("The answer"), endpoint, log)


async def test_messages_that_the_template_does_not_take_are_refused(
    endpoint: Endpoint, log: EpisodeLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    render = CHAT.render

    def strict(messages: Messages, tools: Any = None, *, generation: bool = True) -> str:
        if [message["role"] for message in messages] == ["user", "user"]:
            raise RuntimeError("roles must alternate")
        return render(messages, tools, generation=generation)

    monkeypatch.setattr(CHAT, "render", strict)

    async def agent(client: ClientSettings) -> None:
        status, told = await asked(client, {**BODY, "messages": [*ASKED, *ASKED]})
        assert (status, told["error"]["param"]) == (400, "messages")
        assert "roles must alternate" in told["error"]["message"]
        await asked(client, BODY)

    episode, _ = await played(agent, Scripted("42"), endpoint, log)
    assert len(episode.leaves) == 1


def test_a_journal_says_again_what_was_asked() -> None:
    rng = random.Random(1)
    for _ in range(200):
        journal, expected, history = RequestJournal(), [], []
        for _ in range(rng.randrange(1, 8)):
            history = history[: rng.randrange(len(history) + 1)]
            history += [{"role": "user", "content": rng.choice("abc")} for _ in range(rng.randrange(1, 4))]
            tools = rng.choice([None, [TOOL], [TOOL, TOOL]])
            longest = rng.choice([None, 5])
            entry = journal.add(list(history), tools, longest)
            kind = rng.choice(["answered", "refused", "withdrawn"])
            if kind == "refused":
                refuse(entry)
            if kind == "withdrawn":
                withdraw(entry)
            expected.append((kind, list(history), tools, longest))
        entries = json.loads(json.dumps(journal.entries))
        assert [tuple(turn) for turn in turns_of(entries)] == [one[1:] for one in expected if one[0] != "withdrawn"]
        assert answers_in(entries) == sum(one[0] == "answered" for one in expected)
