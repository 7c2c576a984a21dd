"""What was delivered in a publication: one version, whoever sent and whoever received it."""

from __future__ import annotations

from collections.abc import Iterable

from rljob_trainer.errors import EngineError
from rljob_trainer.weights.manifest import Version


def one_of(versions: Iterable[Version]) -> Version:
    """The version that all of them are. Raises ``EngineError`` when the manifests of senders or receivers differ."""
    different = sorted(set(versions), key=str)
    if len(different) != 1:
        raise EngineError(
            f"a publication has several manifests ({', '.join(map(str, different))}): the learner's ranks have "
            "different weights. Start again: the run continues from its last checkpoint; if it happens again, please "
            "report it with model family and versions"
        )
    return different[0]


def check_unchanged(sent: Version, published: Version | None) -> None:
    """Raises ``EngineError`` when what was sent once more under a number is not what was published under it."""
    if published is not None and sent != published:
        raise EngineError(
            f"the learner's weights of {published} have changed since they were published: sent again, they are "
            f"{sent}. Only an update may change them; start again: the run continues from its last checkpoint"
        )
