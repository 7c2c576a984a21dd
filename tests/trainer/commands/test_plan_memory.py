"""`rljob plan --memory`: what it prints, where it finds the model's shape, what it refuses; and notes of validate."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import yaml

from rljob_trainer.cli import main

ROOT = Path(__file__).parents[3]
JOB = str(ROOT / "examples" / "gsm8k.yaml")
TINY = {
    "model_type": "qwen2",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 50,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
# Embedding, last norm; of each layer queries, keys and values with biases, output, feed-forward, two norms.
TINY_PARAMETERS = 50 * 64 + 64 + 2 * (64 * 64 + 64 + 2 * (32 * 64 + 32) + 64 * 64 + 3 * 96 * 64 + 2 * 64)


def shown() -> list[tuple[str, str]]:
    """The commands of docs/memory.md, and what the page says that each of them prints."""
    page = (ROOT / "docs" / "memory.md").read_text(encoding="utf-8")
    return re.findall(r"```sh\n(rljob plan [^\n]*)\n```\n\n```\n(.*?)```\n", page, re.DOTALL)


@pytest.mark.parametrize(("command", "printed"), shown(), ids=("fits", "does not fit"))
def test_the_page_shows_what_is_printed(
    command: str, printed: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert main(shlex.split(command)[1:]) == 0
    assert capsys.readouterr().out == printed


def test_json_holds_every_moment_in_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", JOB, "--memory", "--gpu-memory", "24Gi", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["model"]["parameters"] == 494_032_768
    trainer = plan["devices"][0]
    assert (trainer["name"], trainer["count"], trainer["capacity"]) == ("trainer GPU", 1, 24 << 30)
    peak = max(moment["total"] for moment in trainer["moments"])
    assert trainer["missing"] == peak - (24 << 30) > 0
    assert all(sum(moment["parts"].values()) == moment["total"] for moment in trainer["moments"])
    assert not plan["fits"]
    assert plan["changes"] == {"trainer GPU": {"spec.trainer.microBatchTokens": "4096"}}


def folder_with(tmp_path: Path, **changed: object) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY | changed))
    return folder


def test_the_shape_is_read_from_the_models_folder_the_cache_or_a_folder_that_is_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_with(tmp_path)
    said = f"{TINY_PARAMETERS:,} parameters (from {folder / 'config.json'})"
    assert main(["plan", JOB, "--memory", "--set", f"model.source={folder}"]) == 0
    assert said in capsys.readouterr().out
    assert main(["plan", JOB, "--memory", "--model", str(folder)]) == 0
    assert said in capsys.readouterr().out
    cached = tmp_path / "models--Qwen--Qwen2.5-0.5B-Instruct" / "snapshots" / "main"
    cached.mkdir(parents=True)
    (cached / "config.json").write_text(json.dumps(TINY))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert main(["plan", JOB, "--memory"]) == 0
    assert f"{TINY_PARAMETERS:,} parameters" in capsys.readouterr().out


PPO_WITH_CRITIC = ["--set", "algorithm.preset=ppo", "--set", "algorithm.critic.model.source=somebody/scores"]


def test_a_critics_own_model_is_known_by_its_folder_and_otherwise_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = folder_with(tmp_path)
    plan = ["plan", JOB, "--memory", *PPO_WITH_CRITIC]
    assert main(plan) == 64
    said = capsys.readouterr().err
    assert "spec.algorithm.critic.model: somebody/scores has no config.json on this machine" in said
    assert "--critic-model DIR" in said
    assert main([*plan, "--critic-model", str(folder)]) == 0
    assert f"; critic somebody/scores: {TINY_PARAMETERS:,}; shard 1" in capsys.readouterr().out
    assert main([*plan, "--critic-model", str(folder), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["critic"] == {"name": "somebody/scores", "parameters": TINY_PARAMETERS}
    assert main(["plan", JOB, "--memory", "--critic-model", str(folder)]) == 64
    assert "--critic-model: the job has no algorithm.critic.model" in capsys.readouterr().err


def test_what_is_not_known_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", JOB, "--memory", "--set", "model.source=somebody/something"]) == 64
    assert "somebody/something has no config.json on this machine" in capsys.readouterr().err
    random = "model={random: {contextLength: 4096, tokenizer: {source: somebody/something}}}"
    assert main(["plan", JOB, "--memory", "--set", random]) == 64
    assert "spec.model.random: memory can be predicted only for the families llama, mistral" in capsys.readouterr().err
    folder = folder_with(tmp_path, model_type="gpt_oss")
    assert main(["plan", JOB, "--memory", "--model", str(folder)]) == 64
    assert "the model type 'gpt_oss' is not one of llama, mistral, qwen2, qwen3" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["plan", JOB, "--memory", "--gpu-memory", "plenty"])
    said = " ".join(capsys.readouterr().err.split())
    assert "plenty is neither a size like 80Gi nor one of the known products: A10, A100-80GB-PCIe, " in said
    assert " H100-80GB-HBM3, " in said
    assert main(["plan", JOB, "--memory"]) == 0
    assert "The available memory is unknown" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("size", "said"),
    [
        ("24", "24 is less than 1 GiB; did you mean 24Gi?"),
        ("512Mi", "512Mi is less than 1 GiB"),
    ],
)
def test_a_size_that_no_gpu_has_is_refused(size: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", JOB, "--memory", "--gpu-memory", size])
    assert capsys.readouterr().err.rstrip().endswith(said)
    assert main(["plan", JOB, "--memory", "--gpu-memory", "1073741824"]) == 0


def test_validate_knows_the_model_by_its_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model of the name alone would not fit; the tiny one that stands in the folder of that name does."""
    job = yaml.safe_load((ROOT / "examples" / "gsm8k.yaml").read_text())
    spec = job["spec"]
    spec["trainer"]["pod"] = {"nodeSelector": {"nvidia.com/gpu.memory": "8192"}}
    for name in ("train", "validation"):
        sources = spec["data"][name] if isinstance(spec["data"][name], list) else [spec["data"][name]]
        for source in sources:
            source["source"] = str(ROOT / "examples" / source["source"])
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(job))
    assert main(["validate", "--schema-only", str(path)]) == 0
    assert "note: spec.trainer.gpusPerReplica: trainer GPU: " in capsys.readouterr().out
    folder = tmp_path / "Qwen" / "Qwen2.5-0.5B-Instruct"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(TINY))
    main(["validate", str(path)])
    assert "note: spec.trainer.gpusPerReplica" not in capsys.readouterr().out
