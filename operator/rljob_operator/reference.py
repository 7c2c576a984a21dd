"""`python -m rljob_operator.reference FILE`: writes the page of conditions and reasons from the code's constants."""

from __future__ import annotations

import sys
from pathlib import Path

from rljob_operator.conditions import Reason, Type

HEADER = """# Conditions and reasons

Made by `python -m rljob_operator.reference` from `operator/rljob_operator/conditions.py`: change it there.

`kubectl get rlj` prints the reason of `Running` as the status; `kubectl describe rlj NAME` shows all conditions with
their messages. All conditions are positive (True is good) but `Failed`.
"""


def page() -> str:
    """The whole page as Markdown."""
    lines = [HEADER, "## Conditions", "", "| condition | True means |", "|---|---|"]
    lines += [f"| `{kind.title}` | {kind.meaning} |" for kind in Type]
    lines += ["", "## Reasons, and what to do", "", "| reason | what it means | what to do |", "|---|---|---|"]
    lines += [f"| `{reason.title}` | {reason.meaning} | {reason.remedy} |" for reason in Reason]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    Path(sys.argv[1] if len(sys.argv) > 1 else "docs/operator/conditions.md").write_text(page(), encoding="utf-8")
