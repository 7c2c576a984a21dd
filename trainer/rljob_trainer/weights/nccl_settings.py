"""What the members of a weight group tell each other of NCCL before it begins: the settings that it needs alike in all
of them (``rljob_api.nccl`` says which, and why). `rljob validate` compares what the job file sets; here is all that
processes have, also from an image or a shell.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from rljob_api.nccl import ALIKE, settings_alike


def told(environment: Mapping[str, str]) -> str:
    """What a member was told, to be read by ``difference``."""
    return json.dumps(settings_alike(environment))


def difference(ours: str, name: str, others: Mapping[str, str]) -> str | None:
    """The first setting in which one of the others, by name, is not as ours, who are called ``name``; None: none is."""
    mine: dict[str, str] = json.loads(ours)
    for other, text in others.items():
        theirs: dict[str, str] = json.loads(text or "{}")
        for variable in ALIKE:
            if (one := mine.get(variable)) != (two := theirs.get(variable)):
                return (
                    f"{variable} {_said(one)} for {name} but {_said(two)} for {other}: NCCL needs the same value in "
                    "both, or they wait for each other forever; set it to the same value in trainer.env and "
                    "rollout.env (or in the env of both pods)"
                )
    return None


def _said(value: str | None) -> str:
    return "is not set" if value is None else f"is {value}"
