"""The layers that an adapter is to be trained beside: whether the model has them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rljob_api import Readable, Violation
from rljob_api.problems import did_you_mean
from rljob_trainer.errors import JobFileError
from rljob_trainer.preflight.places import HUB, local_path

_ATTENTION = tuple(f"self_attn.{name}_proj" for name in ("q", "k", "v", "o"))
_FEED_FORWARD = tuple(f"mlp.{name}_proj" for name in ("gate", "up", "down"))


def check_lora(found: Readable, base: Path) -> Iterator[Violation]:
    """Names that none of the model's matrices has, as far as its files are on this machine."""
    model, path = found.job.spec.model, "spec.model.lora.targets"
    if model.lora is None or not model.lora.targets or not found.says("spec.model"):
        return
    from rljob_trainer.models.config import MIXTURES

    if model.random is None:
        known = _matrices(model.source, base)
    else:
        known = _ATTENTION if model.random.family in MIXTURES else (*_ATTENTION, *_FEED_FORWARD)
    if not known:
        return
    for target in model.lora.targets:
        if not any(f".{name}".endswith(f".{target}") for name in known):
            last = sorted({name.rpartition(".")[2] for name in known})
            close = did_you_mean(target, last)
            yield Violation(
                path,
                f"no layer of the model has a matrix called {target}; it has {', '.join(last)}",
                f"did you mean {close}?" if close else "use some of them, or remove targets to use all",
            )


def _matrices(source: str | None, base: Path) -> tuple[str, ...]:
    """Names of matrices below a layer; none where the files are not here, or are wrong, which is said elsewhere."""
    from rljob_trainer.models.weights import layer_matrices, stored_tensors

    folder = local_path(source, base) if source and not source.startswith(f"{HUB}://") else None
    if folder is None or not folder.is_dir():
        return ()
    try:
        return layer_matrices(stored_tensors(folder))
    except JobFileError:
        return ()
