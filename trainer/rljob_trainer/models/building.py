"""Whether transformers can make a model of a configuration: tried without memory, before anything is started."""

from __future__ import annotations

from pathlib import Path

from rljob_trainer.errors import JobFileError
from rljob_trainer.models.config import COPY


def check_builds(folder: Path, *, trust_remote_code: bool = False) -> None:
    """Makes the model of a folder's ``config.json`` on torch's meta device, where tensors have shapes and no values.

    Raises ``JobFileError`` saying what transformers says of it.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
        with torch.device("meta"):
            AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    except MemoryError:
        raise
    except Exception as problem:
        # Its classes raise what they like: KeyError for an unknown activation, ZeroDivisionError ...
        text = " ".join(str(problem).split())
        raise JobFileError(
            f"{folder / 'config.json'}: transformers cannot build this model ({type(problem).__name__}: {text[:300]}); "
            f"{COPY}"
        ) from problem
