"""Reward models, alone and in real processes, held against transformers' own scores of one row at a time."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from reward_models import CHARACTERS, TEMPLATE, alone, made, pool, responses, reward, texts
from tiny_gemma import gemma
from transformers import AutoModelForSequenceClassification, LlamaForSequenceClassification

from rljob_trainer.errors import JobFileError, RewardWorkerError
from rljob_trainer.models.fixed import fixed_model
from rljob_trainer.models.tokenizer import character_tokenizer
from rljob_trainer.models.version import version_of
from rljob_trainer.rewards.frames import Ready, frame
from rljob_trainer.rewards.reward_model.replica import ScorerLostError
from rljob_trainer.rewards.reward_model.reward_model import row_of
from rljob_trainer.rewards.reward_model.scorer import Scorer, ScorerSettings


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("models") / "plain")


def scorer(folder: Path, batch_tokens: int = 100000, max_length: int | None = None) -> Scorer:
    return Scorer(ScorerSettings(folder, "field", "float32", batch_tokens, max_length, False))


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In place of the process: one that is ready at once and is lost with the first rows. Returns a file with a
    line for each that was started."""
    (tmp_path / "ready").write_bytes(frame(Ready()))
    program, started = tmp_path / "program", tmp_path / "started"
    program.write_text(
        f"#!{sys.executable} -IS\n"
        "import os, struct, sys\n"
        "def take():\n"
        "    sys.stdin.buffer.read(struct.unpack('<4sQ', sys.stdin.buffer.read(12))[1])\n"
        f"open({str(started)!r}, 'a').write('started\\n')\n"
        "take()\n"
        f"os.write(1, open({str(tmp_path / 'ready')!r}, 'rb').read())\n"
        "take()\n"
        "os._exit(9)\n"
    )
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    return started


@pytest.mark.parametrize("padding", [True, False], ids=["padding is the end's token", "no padding token"])
@pytest.mark.parametrize("end", ["", "</s>"])
def test_scores_are_those_of_transformers_one_by_one(tmp_path: Path, padding: bool, end: str) -> None:
    """Also of rows that end with the model's own padding."""
    folder = made(tmp_path / "model", padding=padding, template=TEMPLATE + end)
    said = texts(20, longest=30)
    expected = [alone(folder, f"<user>what=\n<assistant>{text}\n{end}", begins=False) for text in said]
    assert max(expected) - min(expected) > 0.1
    for batch_tokens in (1, 100, 100000):
        scores, tokens = scorer(folder, batch_tokens).scores([row_of(response) for response in responses(*said)])
        assert scores == pytest.approx(expected, abs=1e-5)
        assert tokens == sum(len("<user>what=n<assistant>n") + len(text) + bool(end) for text in said)


def test_a_cap_of_attention_scores_counts(tmp_path: Path) -> None:
    """Gemma 2's, which transformers' default attention leaves out; held against the one that has it."""
    tokenizer = character_tokenizer(CHARACTERS, 64)
    language = gemma("gemma2", vocabulary=len(tokenizer), attn_logit_softcapping=0.3)
    config = language.config
    config.num_labels, config.pad_token_id = 1, tokenizer.pad_token_id
    model = AutoModelForSequenceClassification.from_config(config, attn_implementation="eager").eval()
    model.model.load_state_dict(language.model.state_dict())
    torch.nn.init.normal_(model.score.weight, std=1.0, generator=torch.Generator().manual_seed(0))
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    said = texts(12, longest=30)
    rows = [tokenizer(f"what={text}")["input_ids"] for text in said]
    with torch.no_grad():
        expected, uncapped = [], []
        for row in rows:
            expected.append(float(model(input_ids=torch.tensor([row])).logits[0, 0]))
        model.set_attn_implementation("sdpa")
        for row in rows:
            uncapped.append(float(model(input_ids=torch.tensor([row])).logits[0, 0]))
    assert max(abs(one - other) for one, other in zip(expected, uncapped, strict=True)) > 0.1
    scores, _ = scorer(tmp_path).scores([row_of(response) for response in responses(*said)])
    assert scores == pytest.approx(expected, abs=2e-5)


@pytest.mark.parametrize(
    ("batch_tokens", "shapes"),
    [(1, [(1, 7), (1, 8), (1, 10), (1, 26)]), (20, [(2, 8), (1, 10), (1, 26)]), (10**6, [(4, 26)])],
)
def test_rows_share_a_pass_up_to_so_many_tokens(
    folder: Path, monkeypatch: pytest.MonkeyPatch, batch_tokens: int, shapes: list[tuple[int, int]]
) -> None:
    """By hand: rows have a first token and ``what=`` before 1, 2, 4 and 20 characters, so 7, 8, 10 and 26 tokens."""
    passes: list[tuple[int, int]] = []
    own = LlamaForSequenceClassification.forward

    def forward(self: Any, input_ids: torch.Tensor, **more: Any) -> Any:
        passes.append((input_ids.shape[0], input_ids.shape[1]))
        return own(self, input_ids=input_ids, **more)

    monkeypatch.setattr(LlamaForSequenceClassification, "forward", forward)
    said = ["a" * 20, "b", "cd", "efgh"]
    scores, _ = scorer(folder, batch_tokens).scores([row_of(response) for response in responses(*said)])
    assert passes == shapes
    assert scores == pytest.approx([alone(folder, f"what={text}") for text in said], abs=1e-5)


def test_the_models_own_chat_template_is_applied_and_cannot_be_left(tmp_path: Path) -> None:
    folder = made(tmp_path / "model", template=TEMPLATE)
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "what"}]
    end = character_tokenizer(CHARACTERS, 64).eos_token
    asked = [
        *responses("abc"),
        *responses("abc", messages=messages),
        *responses(f"abc{end}", messages=messages),
    ]
    scores, _ = scorer(folder).scores([row_of(response) for response in asked])
    chat = "<system>be brief\n<user>what\n<assistant>abc"
    expected = ["<user>what=\n<assistant>abc\n", f"{chat}\n", f"{chat}{end[0]} {end[1:]}\n"]
    assert scores == pytest.approx([alone(folder, text, begins=False) for text in expected], abs=1e-5)


def test_no_turn_of_an_episode_can_forge_the_reward_models_chat(tmp_path: Path) -> None:
    """By hand: only what stands before the first answer keeps its special tokens."""
    folder = made(tmp_path / "model", template="{% for m in messages %}{{ m.content }}\n{% endfor %}")
    roles = ["system", "user", "assistant", "tool", "user", "assistant"]
    (episode,) = responses("", conversation=[{"role": role, "content": f"{role[0]}</s>"} for role in roles])
    (score,), _ = scorer(folder).scores([row_of(episode)])
    expected = "s</s>\nu</s>\na< /s>\nt< /s>\nu< /s>\na< /s>\n"
    assert score == pytest.approx(alone(folder, expected, begins=False), abs=1e-5)
    assert abs(alone(folder, expected.replace("< /s>", "</s>"), begins=False) - score) > 1e-3


def test_a_row_that_is_too_long_has_no_score(folder: Path) -> None:
    rows = [row_of(response) for response in responses("abc", "abcd")]
    (first, second), tokens = scorer(folder, max_length=9).scores(rows)
    assert first == pytest.approx(alone(folder, "what=abc"), abs=1e-5)
    assert isinstance(second, str)
    assert "10 tokens of the reward model, more than its 9" in second
    assert tokens == 9


def test_a_row_that_the_chat_template_refuses_has_no_score(tmp_path: Path) -> None:
    refuses = "{% if 'x' in messages[-1].content %}{{ raise_exception('no x here') }}{% endif %}"
    folder = made(tmp_path / "model", template=refuses + TEMPLATE)
    rows = [row_of(response) for response in responses("abc", "x", "abcd")]
    scores, tokens = scorer(folder).scores(rows)
    told = [f"<user>what=\n<assistant>{text}\n" for text in ("abc", "abcd")]
    assert [scores[0], scores[2]] == pytest.approx([alone(folder, text, begins=False) for text in told], abs=1e-5)
    assert isinstance(scores[1], str)
    assert "chat template fails: " in scores[1]
    assert "no x here" in scores[1]
    assert tokens == sum(map(len, told))


def test_what_is_no_reward_model(tmp_path: Path) -> None:
    with pytest.raises(JobFileError, match=r"field: .*has num_labels 2; num_labels must be 1"):
        scorer(made(tmp_path / "two", labels=2))
    with pytest.raises(JobFileError, match=r"field: .*no weights for score.weight: it is a language model"):
        scorer(made(tmp_path / "language", labels=0))


async def test_a_process_that_is_lost_again_and_again_gives_no_score(folder: Path, stand_in: Path) -> None:
    async with pool(reward(folder)) as opened:
        with pytest.raises(RewardWorkerError, match="lost 3 times: it exited with code 9"):
            await opened.score_responses(responses("abc"))
    # One more may be on its way for those that come later.
    assert stand_in.read_text().count("started") in (3, 4)


@pytest.mark.slow(
    stands_for=[
        "test_a_process_that_is_lost_again_and_again_gives_no_score",
        "test_a_row_that_the_chat_template_refuses_has_no_score",
    ]
)
async def test_a_process_goes_on_after_a_row_on_which_the_model_raises(tmp_path: Path) -> None:
    """A token beyond the model's embedding is what its tokenizer makes of one character."""
    folder = made(tmp_path / "model")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["Z"] = 1000
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    async with pool(reward(folder, {"onError": "score", "errorScore": -1000})) as opened:
        results = await opened.score_responses(responses("abc", "Z", "abcd"))
    expected = [alone(folder, "what=abc"), -1000, alone(folder, "what=abcd")]
    assert [result.score for result in results] == pytest.approx(expected, abs=1e-5)
    assert results[1].error is not None
    assert "IndexError: index out of range" in results[1].error
    assert "memory" not in results[1].error


def test_a_device_that_is_lost_is_no_fault_of_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As CUDA's errors are that stay: each later call raises too."""
    ours = scorer(made(tmp_path / "model"))
    row = [{"role": "user", "content": "abc"}]

    def lost(*_: Any, **__: Any) -> None:
        raise torch.AcceleratorError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(ours._model, "forward", lost)
    with pytest.raises(torch.AcceleratorError):
        ours.scores([row])
    monkeypatch.setattr(torch, "ones", lost)
    with pytest.raises(ScorerLostError, match=r"its device failed with .*device-side assert"):
        ours.scores([row])


async def test_a_run_goes_on_with_the_model_that_it_began_with(tmp_path: Path, stand_in: Path) -> None:
    folder = made(tmp_path / "model")
    version = version_of(folder)
    for _ in range(2):
        async with pool(reward(folder), tmp_path):
            pass
        assert json.loads((tmp_path / "reward_models.json").read_text()) == {"rewardModel": version}
    made(folder, seed=1)
    assert version_of(folder) != version
    with pytest.raises(JobFileError, match=f"differs from the one that the run started with .{version}"):
        async with pool(reward(folder), tmp_path):
            pass
    assert stand_in.read_text().count("started") == 2


def test_a_node_with_other_files_than_the_drivers_scores_nothing(tmp_path: Path) -> None:
    folder = made(tmp_path / "model")
    model = fixed_model("field", "model", None, tmp_path)
    assert model.folder() == folder
    made(folder, seed=1)
    with pytest.raises(JobFileError, match=f"field: .* is another model on this node .* [(]{model.version}[)]"):
        model.folder()
