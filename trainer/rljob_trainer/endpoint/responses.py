"""OpenAI's Responses: items in place of messages. Nothing is stored between requests: the whole chat is in each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import count
from typing import Any

from rljob_trainer.endpoint.chat_answer import ChatAnswer
from rljob_trainer.endpoint.chat_request import ChatRequest
from rljob_trainer.endpoint.dialects import Body, only, server_sent
from rljob_trainer.endpoint.refusals import RefusedError, invalid, unsupported

_SAME = ("model", "stream", "temperature", "top_p", "parallel_tool_calls", "top_logprobs")
"""Fields that Chat Completions has too, with the same meaning."""
_FIELDS = frozenset(
    {"input", "instructions", "max_output_tokens", "metadata", "prompt_cache_key", "prompt_cache_retention",
     "safety_identifier", "service_tier", "store", "stream_options", "tool_choice", "tools", "user", *_SAME}
)  # fmt: skip
_NEUTRAL: Mapping[str, list[Any]] = {
    "background": [False],
    "include": [[], ["reasoning.encrypted_content"]],
    "text": [{}, {"format": {"type": "text"}}],
    "truncation": ["disabled"],
    "reasoning": [{}],
}
_TEXT = ("input_text", "output_text", "text")


class Responses:
    """A dialect (``dialects.py``)."""

    path = "/responses"

    def asked(self, body: Body) -> Body:
        only(body, _FIELDS, _NEUTRAL)
        asked = {name: body[name] for name in _SAME if name in body}
        if "max_output_tokens" in body:
            asked["max_tokens"] = body["max_output_tokens"]
        if body.get("tools"):
            asked["tools"] = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(body["tools"])]
        if body.get("tool_choice") is not None:
            asked["tool_choice"] = body["tool_choice"]
        messages = [{"role": "system", "content": body["instructions"]}] if body.get("instructions") else []
        given = body.get("input")
        items = [{"role": "user", "content": given}] if isinstance(given, str) else given
        if not isinstance(items, list):
            raise invalid("input", "input is neither text nor a list of items")
        return {**asked, "messages": [*messages, *_messages(items)]}

    def whole(self, request: ChatRequest, answer: ChatAnswer) -> Body:
        return _response(request, answer, _items(answer))

    def events(self, request: ChatRequest, answer: ChatAnswer) -> Iterator[str]:
        items, numbers = _items(answer), count()

        def event(kind: str, /, **data: Any) -> str:
            return server_sent({"type": kind, "sequence_number": next(numbers), **data}, kind)

        begun = _response(request, answer, []) | {"status": "in_progress", "incomplete_details": None, "usage": None}
        yield event("response.created", response=begun)
        yield event("response.in_progress", response=begun)
        for index, item in enumerate(items):
            where = {"output_index": index, "item_id": item["id"]}
            if item["type"] == "message":
                (part,) = item["content"]
                empty = {**item, "status": "in_progress", "content": []}
                yield event("response.output_item.added", output_index=index, item=empty)
                there = {**where, "content_index": 0}
                yield event("response.content_part.added", **there, part={**part, "text": ""})
                yield event("response.output_text.delta", **there, delta=part["text"], logprobs=[])
                yield event("response.output_text.done", **there, text=part["text"], logprobs=[])
                yield event("response.content_part.done", **there, part=part)
            else:
                empty = {**item, "status": "in_progress", "arguments": ""}
                yield event("response.output_item.added", output_index=index, item=empty)
                yield event("response.function_call_arguments.delta", **where, delta=item["arguments"])
                named = {**where, "name": item["name"]}
                yield event("response.function_call_arguments.done", **named, arguments=item["arguments"])
            yield event("response.output_item.done", output_index=index, item=item)
        whole = _response(request, answer, items)
        yield event(f"response.{whole['status']}", response=whole)

    def refused(self, error: RefusedError) -> Body:
        return error.body


def _tool(tool: Any, where: str) -> Body:
    """A function, whose fields lie one level deeper in Chat Completions."""
    if not isinstance(tool, dict) or tool.get("type") != "function":
        raise unsupported(f"{where}.type", "of tools, only functions are supported")
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def _messages(items: list[Any]) -> list[Body]:
    """The messages that the items are: calls belong to the answer before them."""
    messages: list[Body] = []
    answering = False
    for index, item in enumerate(items):
        where = f"input[{index}]"
        if not isinstance(item, dict):
            raise invalid(where, f"{where} is not an object")
        kind = item.get("type", "message")
        if kind == "message":
            role = item.get("role")
            messages.append({"role": role, "content": _content(item.get("content"), f"{where}.content")})
            answering = role == "assistant"
        elif kind == "function_call":
            if not answering:
                messages.append({"role": "assistant", "content": None})
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            messages[-1].setdefault("tool_calls", []).append(call)
            answering = True
        elif kind == "function_call_output":
            told = _content(item.get("output"), f"{where}.output")
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": told})
            answering = False
        else:
            raise unsupported(f"{where}.type", f"items of the type {kind!r} are not supported")
    return messages


def _content(content: Any, where: str) -> Any:
    if not isinstance(content, list):
        return content
    for index, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") not in _TEXT:
            raise unsupported(f"{where}[{index}]", "only text parts are supported")
    return [{"type": "text", "text": part.get("text")} for part in content]


def _items(answer: ChatAnswer) -> list[Body]:
    message = answer.message
    items: list[Body] = []
    if message["content"] is not None:
        part = {"type": "output_text", "text": message["content"], "annotations": []}
        of_message = {"id": f"msg_{answer.id}", "type": "message", "role": "assistant", "status": "completed"}
        items.append({**of_message, "content": [part]})
    for call in message.get("tool_calls", ()):
        named = {"id": f"fc_{call['id']}", "type": "function_call", "call_id": call["id"], "status": "completed"}
        items.append({**named, "name": call["function"]["name"], "arguments": call["function"]["arguments"]})
    return items


def _response(request: ChatRequest, answer: ChatAnswer, items: list[Body]) -> Body:
    cut, usage = answer.finish_reason == "length", answer.usage
    return {
        "id": f"resp_{answer.id}",
        "object": "response",
        "created_at": answer.created,
        "model": answer.model,
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "error": None,
        "output": items,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [{"type": "function", "strict": False, **tool["function"]} for tool in request.tools or ()],
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        },
    }
