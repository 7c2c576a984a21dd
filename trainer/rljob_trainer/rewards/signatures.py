"""How a custom reward function is called: our way, verl's or TRL's, told apart by the names of its parameters.

- ours: one sample; what it names among ``OWN`` and the columns of its row;
- verl: one sample; ``data_source``, ``solution_str``, ``ground_truth``, ``extra_info``
  (https://verl.readthedocs.io/en/latest/preparation/reward_function.html);
- TRL: lists, here of one sample; ``prompts``, ``completions`` and the columns of the data set
  (https://huggingface.co/docs/trl/grpo_trainer#using-a-custom-reward-function).

Names only: ``rljob validate`` reads them from a file that it does not run, a worker process from the function.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from rljob_trainer.episodes.episode import is_cut

if TYPE_CHECKING:
    from rljob_trainer.rewards.terms import Response

Convention = Literal["rljob", "verl", "trl"]

OWN = ("prompt", "response", "answer", "source", "tokens", "finish", "conversation", "returned")
"""What every sample has, besides the columns of its row."""
VERL = ("data_source", "solution_str", "ground_truth", "extra_info")
TRL = ("prompts", "completions")
NOT_COLUMNS_OF_TRL = ("prompt", "completion", "completion_ids")
"""Columns that TRL keeps to itself."""

_MARKS: Mapping[Convention, frozenset[str]] = {
    # Without answer and source, which may well be columns of a TRL data set.
    "rljob": frozenset(OWN) - {"answer", "source"},
    "verl": frozenset({"solution_str"}),
    "trl": frozenset({*TRL, "completion_ids", "completions_ids"}),
}
"""A function that takes one of these is meant to be called so."""
_BATCHES = frozenset({"data_sources", "solution_strs", "ground_truths", "extra_infos"})
_NOT_HERE: Mapping[Convention, Mapping[str, str]] = {
    "rljob": {},
    "verl": dict.fromkeys(
        ("reward_router_address", "reward_model_tokenizer"), "of a reward model, but none is served here"
    ),
    "trl": {
        **dict.fromkeys(("completion_ids", "completions_ids"), "token ids, but reward functions get text here"),
        **dict.fromkeys(("trainer_state", "log_extra", "log_metric", "environments"), "an object of TRL's trainer"),
    },
}
"""What verl and TRL give and we don't, and why."""
NAMES: Mapping[Convention, str] = {"rljob": "this trainer's", "verl": "verl's", "trl": "TRL's"}


class SignatureError(Exception):
    """A function can be called in none of the ways."""

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(problem)
        self.problem, self.remedy = problem, remedy


@dataclass(frozen=True, slots=True)
class Parameters:
    """What is known of a function's parameters."""

    names: tuple[str, ...]
    """Those that can be given by name."""
    optional: frozenset[str] = frozenset()
    """Those among them that have a default."""

    @property
    def required(self) -> list[str]:
        return [name for name in self.names if name not in self.optional]


def convention_of(parameters: Parameters, given: Collection[str] = ()) -> Convention:
    """How a function is called. ``given``: names that the job's ``params`` set.

    Raises ``SignatureError`` where names of several conventions are mixed, and where something is required that its
    convention gives elsewhere and we don't have.
    """
    names = set(parameters.names) - set(given)
    if whole := sorted(names & _BATCHES):
        raise SignatureError(
            f"takes {', '.join(whole)}, which is verl's signature for whole batches, but functions are called for one "
            "sample at a time here",
            f"take {', '.join(VERL)}",
        )
    meant: list[Convention] = [convention for convention, marks in _MARKS.items() if names & marks]
    if len(meant) > 1:
        said = " and ".join(f"{', '.join(sorted(names & _MARKS[c]))} ({NAMES[c]})" for c in meant)
        raise SignatureError(f"takes {said}, so its calling convention is ambiguous", "use the names of one convention")
    found: Convention = meant[0] if meant else "rljob"
    for name in parameters.required:
        if name not in given and name in _NOT_HERE[found]:
            raise SignatureError(
                f"needs {name}, which is {_NOT_HERE[found][name]}", "give it a default, or set it in params"
            )
    return found


def has(convention: Convention, columns: Collection[str]) -> tuple[str, ...]:
    """The names that a function may require of samples whose rows have these columns."""
    if convention == "verl":
        return VERL
    if convention == "trl":
        return (*TRL, *(name for name in columns if name not in NOT_COLUMNS_OF_TRL))
    return tuple(dict.fromkeys([*OWN, *columns]))


def verl_arguments(response: Response) -> dict[str, Any]:
    """What verl's reward managers give. ``ground_truth`` is the cell that ``data.answer`` names, as it is."""
    told = response.columns.get("extra_info")
    turns = sum(message.get("role") != "system" for message in response.conversation)
    extra = {
        **(told if isinstance(told, Mapping) else {}),
        "num_turns": turns or 2,
        "truncated": is_cut(response.finish),
        "rollout_reward_scores": {},
    }
    return {
        "data_source": response.data_source or response.source,
        "solution_str": response.response,
        "ground_truth": response.answer if response.reference is None else response.reference,
        "extra_info": extra,
    }


def trl_arguments(response: Response) -> dict[str, Any]:
    """What TRL's trainer gives, for one sample: lists of one. Where the row's prompt is messages, messages."""
    messages = [dict(message) for message in response.messages]
    prompt: Any = response.prompt
    completion: Any = response.response
    if response.conversational:
        prompt = messages
        later = [dict(message) for message in response.conversation[len(messages) :]]
        completion = later or [{"role": "assistant", "content": response.response}]
    elif messages:
        # The row's text, and not what the chat template has made of it.
        prompt = messages[-1]["content"]
    columns = {name: [value] for name, value in response.columns.items() if name not in NOT_COLUMNS_OF_TRL}
    return {**columns, "prompts": [prompt], "completions": [completion]}
