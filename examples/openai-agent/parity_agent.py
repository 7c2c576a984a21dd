"""An agent that knows nothing of rljob: it talks to its model as to any other that OpenAI's client reaches."""

from __future__ import annotations

from typing import Any

from openai import OpenAI

OPENAI = OpenAI(api_key="none")
"""Keeps its connection from one episode to the next."""


def run(task: dict[str, Any], client: dict[str, str]) -> float:
    """``0110=``: the model answers 0 or 1, or writes ``?``, which asks a tool. Returns 1 for the right answer."""
    policy = OPENAI.with_options(base_url=client["base_url"], api_key=client["api_key"])
    messages = task["messages"]
    while True:
        completion = policy.chat.completions.create(model=client["model"], messages=messages, max_tokens=1)
        said = completion.choices[0].message.content
        if said != "?" or len(messages) > 1:
            return float(said == task["answer"])
        told = f"{task['prompt'].count('1') % 2}="
        messages = [*messages, {"role": "assistant", "content": said}, {"role": "user", "content": told}]
