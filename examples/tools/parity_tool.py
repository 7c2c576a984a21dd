"""An environment of two turns: the model may ask for a tool, and answers when it has seen what the tool says."""

from __future__ import annotations

from rljob_trainer.episodes import Task, Voice, World


async def episode(task: Task, model: Voice, world: World) -> float:
    """``0110=``: the model answers 0 or 1, or writes ``?``, which asks a tool. Returns 1 for the right answer."""
    answer = await model.chat(task.messages, max_tokens=1)
    if answer.text == "?":
        told = await world.call("parity", parity, task.prompt.text.rstrip("="))
        messages = [*task.messages, answer.message, {"role": "tool", "content": f"{told}="}]
        answer = await model.chat(messages, max_tokens=1)
    return float(answer.text == task.prompt.answer)


async def parity(bits: str) -> str:
    """The tool: whether the number of ones is odd."""
    return str(bits.count("1") % 2)
