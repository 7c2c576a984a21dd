"""Malformed model folders: a tiny model with one thing wrong, held against ``rljob validate`` and the start of a run.

``run(count, seed)`` makes so many of them, the same ones each time. A folder is either refused before anything starts,
by a sentence that names file and field, or it starts: the run's inputs are read, the learner's model and the torch
engine's are built and hold numbers. Values of weights are looked at when a run starts, so what is wrong with those is
refused there. Anything else is a fault: an exception that is not the product's own, one that asks for another try, a
sentence without a place or a remedy.
"""

from __future__ import annotations

import copy
import json
import random
import shutil
import struct
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rljob_api import Readable, RLJob, resolve
from rljob_api.spec.model import Model

REFUSED, STARTS, AT_START, FAULT = "refused by validate", "accepted and starts", "refused at the start", "fault"

ODD: tuple[Any, ...] = (
    None, True, "", "x", "64", -1, 0, 1, 3, 7, 1.5, 1e30, float("nan"), 10**30, [], [1], ["a"], {}, {"a": 1}, [[[]]],
    "\0", "ä" * 300, 2**31, 10**5000,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class FolderRecord:
    """What became of one folder."""

    number: int
    kind: str
    """What was done to it."""
    outcome: str
    says: str


def run(count: int, seed: int) -> list[FolderRecord]:
    """The records of ``count`` folders."""
    with tempfile.TemporaryDirectory(prefix="rljob-malformed-") as scratch:
        bases = list(_bases(Path(scratch)))
        return [_one(number, seed, bases, Path(scratch) / "case") for number in range(count)]


def _bases(scratch: Path) -> Iterator[Path]:
    from rljob_trainer.models import materialise

    tokenizer = {"characters": "0123456789+="}
    shape = {"hiddenSize": 64, "intermediateSize": 96, "layers": 2, "heads": 2, "contextLength": 32}
    for family, tied in (("llama", False), ("qwen2", True)):
        random_model = {**shape, "family": family, "tieEmbeddings": tied, "kvHeads": 1, "tokenizer": tokenizer}
        yield materialise(Model.model_validate({"random": random_model}), scratch / family).path


def _one(number: int, seed: int, bases: list[Path], folder: Path) -> FolderRecord:
    draw = random.Random(f"{seed} {number}")
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(draw.choice(bases), folder / "model")
    kind = draw.choice(list(KINDS))
    done = KINDS[kind](folder / "model", draw)
    outcome, says = _judged(folder)
    return FolderRecord(number, f"{kind}: {done}" if outcome == FAULT else kind, outcome, says.replace(str(folder), ""))


def _judged(folder: Path) -> tuple[str, str]:
    import torch

    from rljob_trainer.driver.assemble import read_inputs
    from rljob_trainer.errors import RLJobError
    from rljob_trainer.learner.models import load_policy
    from rljob_trainer.preflight import preflight
    from rljob_trainer.rollout.decoder import Decoder, read_folder

    job = RLJob.model_validate(JOB)
    try:
        if found := preflight(Readable(job), base=folder, code=[folder]):
            text = "\n".join(map(str, found))
            named = all(violation.path.startswith("spec.") and violation.remedy for violation in found)
            # What is said of a model's files names the file; other fields of the job name themselves.
            files = all(str(folder) in str(v) for v in found if v.path.startswith("spec.model"))
            return (REFUSED if named and files else FAULT), text
        inputs = read_inputs(resolve(job), folder, folder / "made")
        policy = load_policy(inputs.model.path, dtype=torch.float32)
        hidden = Decoder(*read_folder(inputs.model.path, torch.float32)).prefill(torch.tensor([[1, 4]]))
        numbers = torch.isfinite(hidden).all() and all(torch.isfinite(p).all() for p in policy.parameters())
        return (STARTS, "") if numbers else (FAULT, "it starts, and computes no numbers")
    except RLJobError as error:
        good = error.exit_code in (64, 65) and "; " in str(error)
        return (AT_START if good else FAULT), f"{error.exit_code}: {error}"
    except BaseException:  # noqa: BLE001  the libraries' panics are no Exception
        return FAULT, traceback.format_exc()


JOB: dict[str, Any] = {
    "apiVersion": "rljob.dev/v1alpha1",
    "kind": "RLJob",
    "metadata": {"name": "tiny"},
    "spec": {
        "model": {"source": "./model"},
        "data": {
            "train": {"task": {"type": "copy", "digits": 2, "size": 8}},
            "answer": "answer",
            "maxPromptTokens": 6,
        },
        "reward": {"functions": [{"type": "exactMatch"}]},
        "algorithm": {"preset": "grpo"},
        "rollout": {"engine": "torch", "maxResponseTokens": 3},
        "batch": {"groups": 8, "samplesPerPrompt": 4},
        "stop": {"steps": 1},
    },
}


def _paths(document: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    for key, value in document.items() if isinstance(document, dict) else enumerate(document):
        if isinstance(value, dict | list):
            yield from _paths(value, (*path, key))
        else:
            yield (*path, key)


def _odd_field(name: str) -> Callable[[Path, random.Random], str]:
    """One field of a JSON file gets an odd value, or goes, or a new one comes."""

    def change(model: Path, draw: random.Random) -> str:
        file = model / name
        document = json.loads(file.read_text()) if file.exists() else {}
        paths = list(_paths(document)) or [("eos_token_id",)]
        path = draw.choice(paths)
        holder = document
        for part in path[:-1]:
            holder = holder[part]
        if draw.random() < 0.25:
            if path[-1:] and (isinstance(holder, list) or path[-1] in holder):
                del holder[path[-1]]
            said = f"without {path}"
        else:
            value = copy.deepcopy(draw.choice(ODD))
            holder[path[-1]] = value
            said = f"{path} = {'10**5000' if value == 10**5000 else repr(value)[:60]}"
        file.write_text(_dumps(document))
        return said

    return change


def _dumps(document: Any) -> str:
    import sys

    limit = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        return json.dumps(document)
    finally:
        sys.set_int_max_str_digits(limit)


def _odd_bytes(name: str) -> Callable[[Path, random.Random], str]:
    """A file's bytes are cut, turned, or are those of another text."""

    def change(model: Path, draw: random.Random) -> str:
        file = model / name
        data = file.read_bytes()
        at = draw.randrange(len(data))
        ways = {
            "cut": data[:at],
            "empty": b"",
            "flipped": data[:at] + bytes([data[at] ^ (1 << draw.randrange(8))]) + data[at + 1 :],
            "zeros": data[:at] + b"\0" * 16 + data[at + 16 :],
            "noise": data[:at] + draw.randbytes(8) + data[at + 8 :],
            "utf-16": data.decode("latin-1").encode("utf-16"),
            "mark": b"\xef\xbb\xbf" + data,
            "list": b"[" + data + b"]",
            "deep": b"[" * 100_000,
            "removed": None,
        }
        way = draw.choice(list(ways))
        made = ways[way]
        file.unlink() if made is None else file.write_bytes(made)
        return f"{way} at {at}"

    return change


def _odd_header(model: Path, draw: random.Random) -> str:
    """The safetensors header says something else than is there."""
    file = model / "model.safetensors"
    data = file.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    names = [name for name in header if name != "__metadata__"]
    name = draw.choice(names)
    way = draw.choice(["gone", "renamed", "dtype", "shape", "transposed", "offsets", "twice", "length", "one more"])
    if way == "gone":
        del header[name]
    elif way == "renamed":
        header[name.replace("layers.1", "layers.7") + draw.choice(["", "x"])] = header.pop(name)
    elif way == "dtype":
        header[name]["dtype"] = draw.choice(["F16", "I32", "F64", "BOOL", "F8_E4M3", "x", 5, None])
    elif way == "shape":
        header[name]["shape"] = draw.choice([[], [1], [0, 64], [-1], "x", None, [2**40, 2**40]])
    elif way == "transposed":
        header[name]["shape"] = header[name]["shape"][::-1]
    elif way == "offsets":
        start, end = header[name]["data_offsets"]
        header[name]["data_offsets"] = draw.choice([[end, start], [start, end + 4], [start + 4, end], [0], None])
    elif way == "twice":
        shutil.copyfile(file, model / "model-2.safetensors")
    elif way == "one more":
        header["model.layers.0.self_attn.extra.weight"] = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    text = json.dumps(header).encode()
    said = draw.choice([0, 7, 2**40, 2**63]) if way == "length" else len(text)
    file.write_bytes(struct.pack("<Q", said) + text + data[8 + size :])
    return f"{way} {name}"


def _odd_values(model: Path, draw: random.Random) -> str:
    """One number of one tensor is none."""
    from safetensors.numpy import load_file, save_file

    tensors = load_file(model / "model.safetensors")
    name = draw.choice(sorted(tensors))
    value = draw.choice([float("nan"), float("inf"), float("-inf")])
    tensors[name].flat[draw.randrange(tensors[name].size)] = value
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    return f"{name} holds {value}"


def _larger_tokenizer(model: Path, draw: random.Random) -> str:
    """More tokens than the embedding has rows."""
    file = model / "tokenizer.json"
    document = json.loads(file.read_text())
    more = draw.choice([1, 2, 100])
    for number in range(more):
        document["model"]["vocab"][f"more{number}"] = 16 + number
    file.write_text(json.dumps(document))
    return f"{more} more"


KINDS: dict[str, Callable[[Path, random.Random], str]] = {
    "config.json, a field": _odd_field("config.json"),
    "config.json, bytes": _odd_bytes("config.json"),
    "tokenizer.json, a field": _odd_field("tokenizer.json"),
    "tokenizer.json, bytes": _odd_bytes("tokenizer.json"),
    "tokenizer_config.json, a field": _odd_field("tokenizer_config.json"),
    "tokenizer_config.json, bytes": _odd_bytes("tokenizer_config.json"),
    "generation_config.json, a field": _odd_field("generation_config.json"),
    "safetensors, header": _odd_header,
    "safetensors, bytes": _odd_bytes("model.safetensors"),
    "safetensors, values": _odd_values,
    "tokenizer larger than the embedding": _larger_tokenizer,
}
