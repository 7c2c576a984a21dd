"""Anthropic's Messages: blocks in place of texts and calls."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from rljob_trainer.endpoint.chat_answer import ChatAnswer
from rljob_trainer.endpoint.chat_request import ChatRequest
from rljob_trainer.endpoint.dialects import Body, only, server_sent
from rljob_trainer.endpoint.refusals import RefusedError, invalid, unsupported

_SAME = ("model", "max_tokens", "stream", "temperature", "top_p")
"""Fields that Chat Completions has too, with the same meaning."""
_FIELDS = frozenset(
    {
        "cache_control",
        "messages",
        "metadata",
        "service_tier",
        "stop_sequences",
        "system",
        "tool_choice",
        "tools",
        *_SAME,
    }
)
_NEUTRAL: Mapping[str, list[Any]] = {"thinking": [{"type": "disabled"}]}
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_ERRORS = {401: "authentication_error", 404: "not_found_error", 503: "api_error"}


class AnthropicMessages:
    """A dialect (``dialects.py``)."""

    path = "/messages"

    def asked(self, body: Body) -> Body:
        only(body, _FIELDS, _NEUTRAL)
        asked = {name: body[name] for name in _SAME if name in body}
        asked["stop"] = body.get("stop_sequences")
        if "max_tokens" not in body:
            raise invalid("max_tokens", "max_tokens is required")
        if body.get("tools"):
            asked["tools"] = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(body["tools"])]
        if body.get("tool_choice") not in (
            None,
            {"type": "auto"},
            {"type": "auto", "disable_parallel_tool_use": False},
        ):
            raise unsupported("tool_choice", f"tool_choice {body['tool_choice']!r} is not supported; the model chooses")
        messages = [{"role": "system", "content": _texts(body["system"], "system")}] if body.get("system") else []
        given = body.get("messages")
        if not isinstance(given, list) or not given:
            raise invalid("messages", "messages must be a list of at least one")
        for index, message in enumerate(given):
            messages += _of_message(message, f"messages[{index}]")
        if messages[-1]["role"] == "assistant":
            raise unsupported("messages", "prefilling an answer is not supported: end with a user message")
        return {**asked, "messages": messages}

    def whole(self, request: ChatRequest, answer: ChatAnswer) -> Body:
        return _head(answer) | {
            "content": _blocks(answer),
            "stop_reason": _STOP_REASONS[answer.finish_reason],
            "usage": _usage(answer),
        }

    def events(self, request: ChatRequest, answer: ChatAnswer) -> Iterator[str]:
        def event(kind: str, /, **data: Any) -> str:
            return server_sent({"type": kind, **data}, kind)

        begun = _head(answer) | {"content": [], "stop_reason": None, "usage": {**_usage(answer), "output_tokens": 0}}
        yield event("message_start", message=begun)
        for index, block in enumerate(_blocks(answer)):
            if block["type"] == "text":
                empty, delta = {**block, "text": ""}, {"type": "text_delta", "text": block["text"]}
            else:
                empty = {**block, "input": {}}
                delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"], ensure_ascii=False)}
            yield event("content_block_start", index=index, content_block=empty)
            yield event("content_block_delta", index=index, delta=delta)
            yield event("content_block_stop", index=index)
        ended = {"stop_reason": _STOP_REASONS[answer.finish_reason], "stop_sequence": None}
        yield event("message_delta", delta=ended, usage={"output_tokens": _usage(answer)["output_tokens"]})
        yield event("message_stop")

    def refused(self, error: RefusedError) -> Body:
        kind = _ERRORS.get(error.status, "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": str(error)}}


def _tool(tool: Any, where: str) -> Body:
    if not isinstance(tool, dict) or tool.get("type", "custom") not in ("custom", None):
        raise unsupported(f"{where}.type", "only the client's own tools are supported")
    function = {
        "name": tool.get("name"),
        "description": tool.get("description"),
        "parameters": tool.get("input_schema"),
    }
    return {"type": "function", "function": function}


def _of_message(message: Any, where: str) -> list[Body]:
    """The messages that one is: the results of tools come before what the user says with them."""
    if not isinstance(message, dict):
        raise invalid(where, f"{where} is not an object")
    role, content = message.get("role"), message.get("content")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        raise invalid(f"{where}.content", "content is neither text nor a list of blocks")
    texts: list[str] = []
    calls: list[Body] = []
    told: list[Body] = []
    for index, block in enumerate(content):
        there = f"{where}.content[{index}]"
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "text":
            texts.append(_texts([block], there))
        elif kind == "tool_use" and role == "assistant":
            function = {"name": block.get("name"), "arguments": json.dumps(block.get("input"))}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "tool_result" and role == "user":
            result = _texts(block.get("content", ""), f"{there}.content")
            told.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": result})
        else:
            raise unsupported(f"{there}.type", f"a block {kind!r} is not supported in a message of the role {role!r}")
    if role == "assistant":
        return [{"role": role, "content": "".join(texts) or None, **({"tool_calls": calls} if calls else {})}]
    return [*told, *([{"role": role, "content": "".join(texts)}] if texts or not told else [])]


def _texts(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(where, "it is neither text nor a list of blocks")
    for block in content:
        if not isinstance(block, dict) or block.get("type") != "text" or not isinstance(block.get("text"), str):
            raise unsupported(where, "only text blocks are supported")
    return "".join(block["text"] for block in content)


def _head(answer: ChatAnswer) -> Body:
    head = {"id": f"msg_{answer.id}", "type": "message", "role": "assistant", "model": answer.model}
    return {**head, "stop_sequence": None}


def _blocks(answer: ChatAnswer) -> list[Body]:
    texts = [{"type": "text", "text": answer.read.content}] if answer.read.content else []
    ids = [call["id"] for call in answer.message.get("tool_calls", ())]
    calls = [
        {"type": "tool_use", "id": id, "name": call.name, "input": dict(call.arguments)}
        for id, call in zip(ids, answer.read.calls, strict=True)
    ]
    return [*texts, *calls]


def _usage(answer: ChatAnswer) -> dict[str, int]:
    return {"input_tokens": answer.usage["prompt_tokens"], "output_tokens": answer.usage["completion_tokens"]}
