"""What is found by looking at the files that a job names."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from tiny_job import copy_job

from rljob_api import Readable, Violation, load_jobs
from rljob_trainer.data.tokenisation import PromptEncoder, PromptSettings
from rljob_trainer.errors import DataError
from rljob_trainer.models.tokenizer import character_tokenizer
from rljob_trainer.preflight import preflight
from rljob_trainer.preflight.environment import check_environment

Edit = Callable[[str, str], Path]


def found(file: Path) -> list[Violation]:
    (job,) = load_jobs(file)
    return preflight(Readable(job), base=file.parent, code=[file.parent])


def one(file: Path, path: str, *phrases: str) -> None:
    """Exactly one violation, at ``path``, whose text has all phrases."""
    violations = found(file)
    assert [violation.path for violation in violations] == [path]
    for phrase in phrases:
        assert phrase in str(violations[0])
    assert violations[0].remedy


def test_nothing_is_wrong(folder: Path) -> None:
    assert found(folder / "job.yaml") == []


def test_missing_data(edited: Edit) -> None:
    one(edited("train.jsonl", "trian.jsonl"), "spec.data.train.source", "there is no file", "trian.jsonl", "check the")


def test_empty_data(folder: Path) -> None:
    (folder / "train.jsonl").write_text("")
    one(folder / "job.yaml", "spec.data.train.source", "is empty")


def test_truncated_data_names_the_line(folder: Path) -> None:
    with (folder / "train.jsonl").open("a") as file:
        file.write('{"question": "half a')
    one(folder / "job.yaml", "spec.data.train.source", "line 4", "ends in the middle", "download the file again")


def test_a_line_that_is_no_object(folder: Path) -> None:
    (folder / "train.jsonl").write_text('{"question": "a", "answer": "b"}\n[1]\n')
    one(folder / "job.yaml", "spec.data.train.source", "line 2", "one JSON object")


def test_missing_columns(edited: Edit) -> None:
    one(
        edited("prompt: question", "prompt: qestion"),
        "spec.data.prompt",
        'no column "qestion"',
        "did you mean question?",
    )


def test_missing_columns_of_a_template(edited: Edit) -> None:
    file = edited("prompt: question", "prompt: 'Solve {question} for {name}'")
    one(file, "spec.data.prompt", 'no column "name"', "it has question, answer")


def test_columns_may_lie_inside_others(edited: Edit, folder: Path) -> None:
    (folder / "train.jsonl").write_text('{"question": "a", "reward": {"truth": "b"}}\n')
    edited("answer: answer", "answer: reward.truth")
    assert found(folder / "job.yaml") == []
    edited("answer: reward.truth", "answer: reward.lie")
    one(folder / "job.yaml", "spec.data.answer", 'no column "reward.lie"')


def test_a_later_row_without_a_column(edited: Edit, folder: Path) -> None:
    with (folder / "train.jsonl").open("a") as file:
        file.write('{"question": "2+2?", "answr": "4"}\n')
    place = f"{folder / 'train.jsonl'}, line 4"
    one(
        folder / "job.yaml",
        "spec.data.train.source",
        f'{place}: the row has no column "answer" (set by spec.data.answer); it has question, answr',
        "add it to the row",
    )
    assert found(edited("{source: train.jsonl}", "{source: train.jsonl, limit: 3}")) == []


def test_a_later_row_without_a_prompt(edited: Edit, folder: Path) -> None:
    with (folder / "train.jsonl").open("a") as file:
        file.write('{"question": null, "answer": "4"}\n')
    one(
        folder / "job.yaml",
        "spec.data.train.source",
        f'{folder / "train.jsonl"}, line 4: the column "question" (set by spec.data.prompt) is null',
        "fill it in, or remove the row",
    )


def test_an_answer_may_be_missing_where_the_reward_needs_none(edited: Edit, folder: Path) -> None:
    (folder / "train.jsonl").write_text('{"question": "2+2?", "answer": null}\n')
    place = f"{folder / 'train.jsonl'}, line 1"
    one(folder / "job.yaml", "spec.data.train.source", place, "the reward function gsm8k compares with, is null or NaN")
    assert found(edited("[{type: gsm8k}]", "[{type: gsm8k}], onError: score")) == []
    assert found(edited("[{type: gsm8k}]", "[{type: length}]")) == []


@pytest.mark.parametrize(
    ("reward", "good", "bad", "problem"),
    [
        ("math", "7", "+".join(["1"] * 1001), "but math-verify reads only expressions of up to 2000"),
        ("multipleChoice", "C", "E", "the reference answer 'E' is not a letter from A to D"),
        ("multipleChoice, params: {answerIs: index}", "3", "4", "the reference answer '4' is not a number from 0 to 3"),
        ("codeTests", '{"inputs": ["1"], "outputs": ["1"]}', "assert f(1) == 1", "is not JSON"),
    ],
)
def test_reference_answers_that_a_reward_would_misread(
    edited: Edit, folder: Path, reward: str, good: str, bad: str, problem: str
) -> None:
    rows = [{"question": "q", "answer": good}] * 3
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = edited("{type: gsm8k}", f"{{type: {reward}}}")
    assert found(file) == []
    with (folder / "train.jsonl").open("a") as train:
        train.write(json.dumps({"question": "q", "answer": bad}) + "\n")
    one(file, "spec.data.train.source", "train.jsonl, line 4: the reference answer", problem)


def test_a_schema_that_is_none(edited: Edit) -> None:
    file = edited("{type: gsm8k}", "{type: jsonSchema, params: {schema: {type: object}}}")
    assert found(file) == []
    edited("schema: {type: object}", "schema: {type: objct}")
    one(file, "spec.reward.functions[0].params.schema", "it is not a JSON schema: 'objct' is not valid")


def test_a_column_that_is_missing_in_one_row_and_empty_in_another_is_named_for_both(folder: Path) -> None:
    (folder / "train.jsonl").write_text(
        '{"question": "1+1?", "answer": "2"}\n{"question": "2+2?", "answer": NaN}\n{"question": null, "answer": "3"}\n'
        '{"question": "3+3?"}\n{"answer": "8"}\n'
    )
    told = [str(violation) for violation in found(folder / "job.yaml")]
    file = folder / "train.jsonl"
    assert [text.partition(": ")[2].partition(" (set by")[0].partition(", which")[0] for text in told] == [
        f'{file}, line 5: the row has no column "question"',
        f'{file}, line 3: the column "question"',
        f'{file}, line 4: the row has no column "answer"',
        f'{file}, line 2: the column "answer"',
    ]


def test_data_at_a_file_address_is_looked_at(edited: Edit, folder: Path) -> None:
    file = edited("train.jsonl", f"file://{folder}/train.jsonl")
    assert found(file) == []
    (folder / "train.jsonl").unlink()
    one(file, "spec.data.train.source", f"there is no file {folder}/train.jsonl")


def test_parquet(edited: Edit, folder: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"question": ["a"], "solution": ["b"]}), folder / "train.parquet")
    file = edited("train.jsonl", "train.parquet")
    one(file, "spec.data.answer", 'no column "answer"', "it has question, solution")
    (folder / "train.parquet").write_bytes((folder / "train.parquet").read_bytes()[:40])
    one(file, "spec.data.train.source", "cannot be read as Parquet")


def test_validation_data(edited: Edit) -> None:
    file = edited(
        "    prompt: question", "    validation: [{name: held-out, source: ./none.jsonl}]\n    prompt: question"
    )
    one(file, "spec.data.validation[0].source", "there is no file")


def test_tasks_with_too_few_problems(edited: Edit) -> None:
    file = edited("{source: train.jsonl}", "{task: {type: copy, digits: 1, size: 10}}")
    one(file, "spec.data.train.task.size", "different train problems", "lower size")


def test_data_of_the_hub_is_left_alone(edited: Edit) -> None:
    assert found(edited("train.jsonl", "openai/gsm8k")) == []


def test_missing_model(edited: Edit) -> None:
    one(edited("./model", "./modell"), "spec.model.source", "there is no folder", "hub id")


def test_a_folder_that_is_no_model(folder: Path) -> None:
    (folder / "model" / "config.json").unlink()
    one(folder / "job.yaml", "spec.model.source", "config.json")


def test_lengths_beyond_the_models_context(edited: Edit) -> None:
    file = edited("maxResponseTokens: 156", "maxResponseTokens: 157")
    one(
        file,
        "spec.rollout.maxResponseTokens",
        "157 and data.maxPromptTokens = 100",
        "context of 256",
        "lower it to 156",
    )


@pytest.fixture
def cached(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder's model, in a cache of the hub as ``owner/name``, fetched once as main and once by commit."""
    from huggingface_hub import try_to_load_from_cache

    cache = folder / "cache"
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))
    of_model = cache / "models--owner--name"
    (of_model / "snapshots").mkdir(parents=True)
    (of_model / "refs").mkdir()
    (of_model / "refs" / "main").write_text("a" * 40)
    (folder / "model").rename(of_model / "snapshots" / ("a" * 40))
    older = of_model / "snapshots" / ("b" * 40)
    older.mkdir()
    text = (of_model / "snapshots" / ("a" * 40) / "config.json").read_text()
    (older / "config.json").write_text(json.dumps(json.loads(text) | {"max_position_embeddings": 128}))
    for revision, snapshot in ((None, "a" * 40), ("main", "a" * 40), ("b" * 40, "b" * 40)):
        found = try_to_load_from_cache("owner/name", "config.json", cache_dir=cache, revision=revision)
        assert found == str(of_model / "snapshots" / snapshot / "config.json")
    return cache


@pytest.mark.parametrize("source", ["owner/name", "hf://owner/name"])
def test_lengths_beyond_the_context_of_a_hubs_model_that_is_here(edited: Edit, cached: Path, source: str) -> None:
    file = edited("./model", source)
    assert found(file) == []
    edited("maxResponseTokens: 156", "maxResponseTokens: 157")
    one(file, "spec.rollout.maxResponseTokens", "157 and data.maxPromptTokens = 100", "context of 256")


def test_the_revision_of_a_hubs_model_counts(edited: Edit, cached: Path) -> None:
    file = edited("source: ./model", f"source: owner/name, revision: {'b' * 40}")
    one(file, "spec.rollout.maxResponseTokens", "context of 128", "lower it to 28")
    assert found(edited("b" * 40, "v2")) == []


@pytest.mark.parametrize(
    ("home", "cache"),
    [
        ({"HF_HOME": "x"}, "x/hub"),
        ({"XDG_CACHE_HOME": "x"}, "x/huggingface/hub"),
        ({"HOME": "x"}, "x/.cache/huggingface/hub"),
        ({"HUGGINGFACE_HUB_CACHE": "x/y"}, "x/y"),
    ],
)
def test_the_cache_is_where_the_hub_has_it(
    edited: Edit, cached: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, home: dict[str, str], cache: str
) -> None:
    """As huggingface_hub documents its environment variables."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(folder / "nobody"))
    file = edited("source: ./model", f"source: owner/name, revision: {'b' * 40}")
    assert found(file) == []
    for name, value in home.items():
        monkeypatch.setenv(name, str(folder / value))
    (folder / cache).parent.mkdir(parents=True)
    cached.rename(folder / cache)
    one(file, "spec.rollout.maxResponseTokens", "context of 128")


def test_a_hubs_model_that_is_not_here_is_left_to_the_run(edited: Edit, cached: Path) -> None:
    assert found(edited("./model", "owner/other")) == []


def test_heads_too_narrow_for_vllm(folder: Path) -> None:
    config = json.loads((folder / "model" / "config.json").read_text())
    (folder / "model" / "config.json").write_text(
        json.dumps(config | {"num_attention_heads": 8, "num_key_value_heads": 4})
    )
    one(folder / "job.yaml", "spec.model.source", "its head size is 16", "rollout.engine: torch")


def test_a_backend_that_nobody_has(edited: Edit) -> None:
    file = edited("reward:", "trainer: {backend: 'absent_trainers:Own'}\n  reward:")
    one(file, "spec.trainer.backend", "no module absent_trainers", "put it beside the job file")


def test_a_backend_beside_the_job_file_is_found_and_not_run(edited: Edit, folder: Path) -> None:
    (folder / "my_trainer.py").write_text("raise SystemExit('it was run')\n")
    assert found(edited("reward:", "trainer: {backend: 'my_trainer:Own'}\n  reward:")) == []


def custom(edited: Edit, function: str) -> Path:
    return edited("{type: gsm8k}", f"{{type: custom, function: '{function}'}}")


def test_custom_reward_without_module(edited: Edit) -> None:
    one(custom(edited, "absent_rewards:score"), "spec.reward.functions[0].function", "no module absent_rewards")


def test_a_function_is_in_a_module_and_not_in_a_file(edited: Edit) -> None:
    file = edited("{type: gsm8k}", "{type: custom, function: 'rewards.py:positions'}")
    (file.parent / "rewards.py").write_text("def positions(response): return 1.0\n")
    one(file, "spec.reward.functions[0].function", "write the module, without .py: rewards:positions")


def test_custom_reward_is_found_and_not_run(edited: Edit, folder: Path) -> None:
    (folder / "my_rewards.py").write_text("raise SystemExit('it was run')\ndef score(response): return 1\n")
    assert found(custom(edited, "my_rewards:score")) == []


def test_custom_reward_in_a_package(edited: Edit, folder: Path) -> None:
    (folder / "mine").mkdir()
    (folder / "mine" / "__init__.py").write_text("raise SystemExit('it was run')")
    (folder / "mine" / "rewards.py").write_text("async def score(response): return 1\n")
    assert found(custom(edited, "mine.rewards:score")) == []
    one(edited("mine.rewards:score", "mine.others:score"), "spec.reward.functions[0].function", "no module mine.others")


def test_custom_reward_without_the_function(edited: Edit, folder: Path) -> None:
    (folder / "my_rewards.py").write_text("def scores(response): return 1\n")
    one(custom(edited, "my_rewards:score"), "spec.reward.functions[0].function", "no function score", "mean scores?")


def test_custom_reward_that_is_not_python(edited: Edit, folder: Path) -> None:
    (folder / "my_rewards.py").write_text("def score(response):\n  return (\n")
    one(custom(edited, "my_rewards:score"), "spec.reward.functions[0].function", "line 2", "not valid Python")


def test_custom_reward_that_imports_something_absent(edited: Edit, folder: Path) -> None:
    (folder / "beside.py").write_text("raise SystemExit('it was run')\n")
    module = folder / "my_rewards.py"
    module.write_text(
        "import os.path, sys, beside\n"
        "from numpy import array\n"
        "try:\n    import no_such_extra\nexcept ImportError:\n    no_such_extra = None\n"
        "def score(response):\n    import no_such_rarity\n    return 1\n"
    )
    file = custom(edited, "my_rewards:score")
    assert found(file) == []
    module.write_text(
        "import json\nfrom no_such_package.deeper import judge\ndef score(response): return judge(response)\n"
    )
    said = f"{module}, line 2 imports no_such_package.deeper, but there is no module no_such_package in {folder}, "
    one(file, "spec.reward.functions[0].function", said, "install no_such_package")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_unwritable_checkpoint_folder(edited: Edit, folder: Path) -> None:
    (folder / "closed").mkdir(mode=0o500)
    file = edited("  rollout:", "  checkpoint: {uri: ./closed/run}\n  rollout:")
    one(file, "spec.checkpoint.uri", "is not writable")


def test_checkpoint_folder_that_is_a_file(edited: Edit) -> None:
    file = edited("  rollout:", "  checkpoint: {uri: ./train.jsonl/run}\n  rollout:")
    one(file, "spec.checkpoint.uri", "is a file, not a folder")


def test_checkpoint_folder_that_will_be_made(edited: Edit) -> None:
    assert found(edited("  rollout:", "  checkpoint: {uri: ./new/run}\n  rollout:")) == []


def test_restore_from_nowhere(edited: Edit) -> None:
    one(edited("  rollout:", "  restore: {from: ./none}\n  rollout:"), "spec.restore.from", "there is no folder")


SCORE = "spec.reward.functions[0].function"


@pytest.mark.parametrize(
    ("signature", "problem", "remedy"),
    [
        ("response, anser", "needs 'anser', which samples of the source 'train' don't have", "did you mean answer?"),
        ("response, *, difficulty", "needs 'difficulty'", "give it a default, set it in params, or add the column"),
        ("response, /, answer", "takes response only by position", "remove the / from its parameters"),
        ("data_source, solution_str, ground_truth, step", "needs 'step', which no sample has in verl's", "default"),
        ("data_source, solution_str, ground_truht", "needs 'ground_truht'", "did you mean ground_truth?"),
        ("solution_strs, ground_truths", "verl's signature for whole batches", "take data_source, solution_str"),
        ("completions, level, **kwargs", "needs 'level', which samples of the source 'train' don't", "add the column"),
        ("completions, trainer_state", "needs trainer_state, which is an object of TRL's", "give it a default"),
        ("prompt, completions", "takes prompt (this trainer's) and completions (TRL's)", "names of one convention"),
    ],
)
def test_what_a_custom_reward_asks_for_has_to_be_there(
    edited: Edit, folder: Path, signature: str, problem: str, remedy: str
) -> None:
    (folder / "my_rewards.py").write_text(f"raise SystemExit('it was run')\n\ndef score({signature}): return 1\n")
    one(custom(edited, "my_rewards:score"), SCORE, "my_rewards.py, line 3", problem, remedy)


@pytest.mark.parametrize(
    "signature",
    [
        "response, question",
        "response, anser=None",
        "response, *, anser='x'",
        "**everything",
        "prompt, tokens, finish, source",
        "data_source, solution_str, ground_truth, extra_info=None, **kwargs",
        "solution_str, ground_truth, reward_router_address=None",
        "prompts, completions, answer, log_metric=None, **kwargs",
        "completions, **kwargs",
    ],
)
def test_what_a_custom_reward_may_ask_for(edited: Edit, folder: Path, signature: str) -> None:
    (folder / "my_rewards.py").write_text(f"async def score({signature}): return 1\n")
    assert found(custom(edited, "my_rewards:score")) == []


def test_verls_functions_need_reference_answers(edited: Edit, folder: Path) -> None:
    (folder / "my_rewards.py").write_text("def score(data_source, solution_str, ground_truth, extra_info): return 1\n")
    custom(edited, "my_rewards:score")
    file = edited("answer: answer", "answer: null")
    one(file, SCORE, "score needs ground_truth, but the job sets no reference answer", "reward_model.ground_truth")


@pytest.mark.parametrize(
    "code", ["@wrapped\ndef score(anser): return 1", "score = lambda anser: 1", "def score(a): 1\ndef score(b): 1"]
)
def test_what_reading_cannot_tell_is_left_to_the_run(edited: Edit, folder: Path, code: str) -> None:
    (folder / "my_rewards.py").write_text(code)
    assert found(custom(edited, "my_rewards:score")) == []


@pytest.mark.parametrize("value", ["3", "'text'", "[score]", "{}"])
def test_a_value_that_cannot_be_called_is_named_before_the_run(edited: Edit, folder: Path, value: str) -> None:
    (folder / "my_rewards.py").write_text(f"def other(): pass\nscores = {value}\n")
    file = custom(edited, "my_rewards:scores")
    one(file, "spec.reward.functions[0].function", "scores in", "my_rewards.py, line 2 is not a function")


def test_parameters_of_custom_rewards(edited: Edit, folder: Path) -> None:
    (folder / "my_rewards.py").write_text("def score(response, *, strict): return 1\n")
    file = edited("{type: gsm8k}", "{type: custom, function: 'my_rewards:score', params: {strict: true}}")
    assert found(file) == []
    edited("params: {strict: true}", "params: {strict: true, stirct: 1}")
    one(file, "spec.reward.functions[0].params", "score has no parameter 'stirct'", "did you mean strict?")


def test_parts_name_their_own_columns(edited: Edit, folder: Path) -> None:
    (folder / "more.jsonl").write_text(
        '{"text": "a", "truth": 1, "from": "x"}\n{"text": null, "truth": 2, "from": 3}\n'
    )
    (folder / "train.jsonl").write_text('{"question": "a", "answer": "b", "from": "y"}\n')
    more = "{name: new, source: more.jsonl, prompt: 'Do {text}', answer: truth}"
    file = edited(
        "{source: train.jsonl}", f"{{parts: [{{name: old, source: train.jsonl}}, {more}], sourceColumn: from}}"
    )
    told = [str(violation) for violation in found(file)]
    assert len(told) == 1
    assert 'line 2: the column "text" (set by spec.data.train.parts[1].prompt) is null' in told[0]
    (folder / "more.jsonl").write_text('{"text": "a", "truth": "1", "from": "x"}\n')
    assert found(file) == []
    one(edited("answer: truth", "answer: turth"), "spec.data.train.parts[1].answer", 'no column "turth"')
    edited("answer: turth", "answer: truth")
    told = [violation.path for violation in found(edited("sourceColumn: from", "sourceColumn: form"))]
    assert told == ["spec.data.train.sourceColumn"] * 2


def test_a_column_that_one_of_two_sources_lacks(edited: Edit, folder: Path) -> None:
    (folder / "more.jsonl").write_text('{"question": "a", "answer": "b", "level": 1}\n')
    (folder / "my_rewards.py").write_text("def score(response, level): return 1\n")
    edited("{source: train.jsonl}", "{parts: [{name: old, source: train.jsonl}, {name: new, source: more.jsonl}]}")
    file = edited("{type: gsm8k}", "{type: custom, function: 'my_rewards:score'}")
    one(file, SCORE, "needs 'level', which samples of the source 'old' don't have")
    parts = "{type: custom, function: 'my_rewards:score', sources: [new]}, {type: length, sources: [old]}"
    assert found(edited("{type: custom, function: 'my_rewards:score'}", parts)) == []


@pytest.mark.parametrize(
    ("old", "new", "path", "remedy"),
    [
        ("train.jsonl", "s4://bucket/train.jsonl", "spec.data.train.source", "use s3://, pvc://"),
        ("train.jsonl", "what://bucket/train.jsonl", "spec.data.train.source", "use s3://, pvc://, file://, hf://"),
        ("./model", "hff://owner/name", "spec.model.source", "did you mean hf://?"),
        ("./model}", "./model, tokenizer: 'htp://owner/name'}", "spec.model.tokenizer", "did you mean http://?"),
        ("train.jsonl", "webhdfs://host/train.jsonl", "", ""),
        ("train.jsonl", "pvc://claim/train.jsonl", "", ""),
    ],
)
def test_addresses_that_nobody_reads(edited: Edit, old: str, new: str, path: str, remedy: str) -> None:
    file = edited(old, new)
    if path:
        one(file, path, "is not a known scheme", remedy)
    else:
        assert found(file) == []


MESSAGES = '{"question": [{"role": "user", "content": "2+2?"}], "answer": "4"}\n'


def test_chat_messages_need_a_template(edited: Edit, folder: Path) -> None:
    (folder / "train.jsonl").write_text(MESSAGES)
    place = f"{folder / 'train.jsonl'}, line 1"
    one(folder / "job.yaml", "spec.data.train.source", place, "no chat template is applied", "set spec.model.chatTem")
    file = edited("{source: ./model}", "{source: ./model, chatTemplate: '{{ messages[0].content }}'}")
    assert found(file) == []
    edited("    prompt: question", "    chat: never\n    prompt: question")
    one(file, "spec.data.train.source", "no chat template is applied")


def test_settings_that_need_a_template(edited: Edit) -> None:
    file = edited("    prompt: question", "    chat: always\n    prompt: question")
    one(file, "spec.data.chat", "the model's has none", "set spec.model.chatTemplate, or use chat: never")
    edited("chat: always", "systemPrompt: Be brief.")
    one(file, "spec.data.systemPrompt", "needs a chat template")


@pytest.mark.parametrize(
    "message",
    [
        '{"role": "tool", "content": "4"}',
        '{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add"}}]}',
        '{"role": 1, "content": "4"}',
        '{"role": "user", "content": null}',
    ],
)
def test_messages_that_no_prompt_can_have(edited: Edit, folder: Path, message: str) -> None:
    (folder / "train.jsonl").write_text(MESSAGES + MESSAGES.replace("}]", "}, " + message + "]"))
    file = edited("{source: ./model}", "{source: ./model, chatTemplate: '{{ messages[0].content }}'}")
    one(file, "spec.data.train.source", f"{folder / 'train.jsonl'}, line 2, message 1")


def test_a_chat_template_that_is_none(edited: Edit, folder: Path) -> None:
    file = edited("{source: ./model}", "{source: ./model, chatTemplate: '{% for m in messages %}'}")
    one(file, "spec.model.chatTemplate", "is not a Jinja template (line 1", "correct it")
    edited(", chatTemplate: '{% for m in messages %}'", "")
    (folder / "model" / "chat_template.jinja").write_bytes("{{ 'Fähre' }}".encode("latin-1"))
    one(file, "spec.model.source", "chat_template.jinja is not UTF-8 text (byte 5)", "save it as UTF-8")


def test_a_chat_template_that_refuses_a_row(edited: Edit, folder: Path) -> None:
    template = "{{ messages[0].content }}{% if messages|length > 1 %}{{ raise_exception('one turn') }}{% endif %}"
    (folder / "model" / "chat_template.jinja").write_text(template)
    assert found(folder / "job.yaml") == []
    two = MESSAGES.replace("}]", '}, {"role": "assistant", "content": "4"}]')
    (folder / "train.jsonl").write_text(MESSAGES + two)
    place = f"{folder / 'train.jsonl'}, line 2: the chat template cannot render the prompt (one turn)"
    one(folder / "job.yaml", "spec.data.train.source", place, "correct the row or the template")
    (folder / "train.jsonl").write_text(MESSAGES)
    file = edited("    prompt: question", "    systemPrompt: Be brief.\n    prompt: question")
    one(file, "spec.data.train.source", "line 1: the chat template cannot render the prompt (one turn)")


@pytest.mark.parametrize("template", ["{{ bos_token }}{{ messages[0].content }}?", "{{ messages[0].content }}</s>"])
def test_prompts_are_held_against_the_characters_as_the_chat_template_writes_them(
    edited: Edit, folder: Path, template: str
) -> None:
    """A run refuses the same: the special tokens that a text holds are no characters."""
    tokenizer = character_tokenizer("12+?", 256)
    tokenizer.chat_template = template
    encoder = PromptEncoder(tokenizer, PromptSettings(prompt="question"))
    random = "random: {family: qwen2, hiddenSize: 64, intermediateSize: 128, layers: 2, heads: 2, contextLength: 256"
    file = edited("{source: ./model}", f"{{{random}, tokenizer: {{characters: '12+?'}}}}, chatTemplate: '{template}'}}")
    for question, known in (("1+2</s>", True), ("1+3", False)):
        (folder / "train.jsonl").write_text(json.dumps({"question": question, "answer": "3"}) + "\n")
        if known:
            assert found(file) == []
            encoder.encode([{"question": question}], ["line 1"])
        else:
            one(file, "spec.data.train.source", "line 1: the tokenizer does not know every character")
            with pytest.raises(DataError, match="line 1: the tokenizer does not know every character"):
                encoder.encode([{"question": question}], ["line 1"])


def test_a_chat_template_that_refuses_a_generated_problem(edited: Edit) -> None:
    file = edited("{source: ./model}", "{source: ./model, chatTemplate: '{{ raise_exception(\"never\") }}'}")
    edited("{source: train.jsonl}", "{task: {type: copy, digits: 3}}")
    one(file, "spec.data.train.task", "the chat template cannot render the prompt (never)")


def test_a_chat_template_may_use_all_that_transformers_offers(edited: Edit, folder: Path) -> None:
    (folder / "model" / "chat_template.jinja").write_text(
        "{{ bos_token + strftime_now('%Y') }}{% for m in messages %}{% if tools %}{% break %}{% endif %}"
        "{% generation %}{{ m | tojson(indent=1) }}{% endgeneration %}{% endfor %}"
    )
    assert found(folder / "job.yaml") == []


def test_what_the_torch_engine_does_not_compute(edited: Edit, folder: Path) -> None:
    config = json.loads((folder / "model" / "config.json").read_text())
    (folder / "model" / "config.json").write_text(json.dumps(config | {"hidden_act": "gelu"}))
    file = edited("rollout: {", "rollout: {engine: torch, ")
    said = "the torch engine does not support the activation 'gelu'"
    one(file, "spec.rollout.engine", said, "use rollout.engine: vllm")


def test_ranks_of_a_row_divide_the_heads(edited: Edit) -> None:
    file = edited("rollout: {", "trainer: {replicas: 3, parallelism: {context: 3}}\n  rollout: {")
    path = "spec.trainer.parallelism.context"
    one(file, path, "the model's 4 attention heads cannot be divided among 3 ranks", "use a divisor of 4")
    assert found(edited("replicas: 3, parallelism: {context: 3}", "replicas: 2, parallelism: {context: 2}")) == []


def test_ranks_of_a_layer_divide_its_heads(edited: Edit) -> None:
    ways, path = "replicas: 8, parallelism: {context: 4, tensor: 2}", "spec.trainer.parallelism"
    file = edited("rollout: {", f"trainer: {{{ways}}}\n  rollout: {{")
    said = "the model's 4 attention heads cannot be divided among 4 x 2 (tensor) ranks"
    one(file, f"{path}.context", said, "use a divisor of 2")
    fits = "replicas: 4, parallelism: {context: 2, tensor: 2}"
    assert found(edited(ways, fits)) == []
    one(
        edited(fits, "replicas: 4, parallelism: {tensor: 4}"),
        f"{path}.tensor",
        "the model's 2 key heads cannot be divided among 4 ranks",
        "use a divisor of 2",
    )


def test_heads_are_known_of_a_model_by_its_name(edited: Edit, cached: Path) -> None:
    """Before any of its files is here."""
    edited("./model", "meta-llama/Llama-3.1-70B-Instruct")
    file = edited("rollout: {", "trainer: {replicas: 16, parallelism: {tensor: 16}}\n  rollout: {")
    said = [v for v in found(file) if v.path == "spec.trainer.parallelism.tensor"]
    assert [v.problem for v in said] == ["the model's 8 key heads cannot be divided among 16 ranks"]
    fits = edited("replicas: 16, parallelism: {tensor: 16}", "replicas: 8, parallelism: {tensor: 8}")
    assert not [v for v in found(fits) if v.path.startswith("spec.trainer")]


def test_layers_of_a_mixture_are_not_divided(edited: Edit, folder: Path, cached: Path) -> None:
    config = cached / "models--owner--name" / "snapshots" / ("a" * 40) / "config.json"
    experts = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    config.write_text(json.dumps(json.loads(config.read_text()) | experts))
    edited("./model", "owner/name")
    file = edited("rollout: {", "trainer: {replicas: 2, parallelism: {tensor: 2}}\n  rollout: {")
    one(file, "spec.trainer.parallelism.tensor", ", not for qwen3_moe", "use 1")
    assert found(edited("parallelism: {tensor: 2}", "parallelism: {context: 2}")) == []


@pytest.mark.parametrize("engine", ["torch", "vllm"])
def test_a_family_that_the_learner_does_not_compute(edited: Edit, folder: Path, engine: str) -> None:
    config = json.loads((folder / "model" / "config.json").read_text())
    (folder / "model" / "config.json").write_text(json.dumps(config | {"model_type": "olmo2"}))
    file = edited("rollout: {", f"rollout: {{engine: {engine}, ")
    known = "llama, mistral, qwen2, qwen3, gemma2, gemma3_text, qwen3_moe"
    one(file, "spec.model.source", f"the learner supports the model types {known}, but", "train another model")
    # What computes it may be the job's own.
    (folder / "mine.py").write_text("class Mine: ...\n")
    file = edited("  algorithm:", "  trainer: {backend: 'mine:Mine'}\n  algorithm:")
    assert [v.path for v in found(file)] == (["spec.rollout.engine"] if engine == "torch" else [])


def test_remedies_are_never_to_look_elsewhere() -> None:
    from rljob_trainer.errors import DataError
    from rljob_trainer.preflight.places import as_violation

    assert as_violation(DataError("data.jsonl is odd"), "spec.data").remedy == "correct it, or use another one"


def test_an_empty_folder_that_is_named_for_its_tokenizer(edited: Edit, folder: Path) -> None:
    (folder / "words").mkdir()
    file = edited("{source: ./model}", "{source: ./model, tokenizer: ./words}")
    one(file, "spec.model.tokenizer", f"{folder / 'words'} has no tokenizer", "or use another folder")


def test_csv_has_to_be_converted(edited: Edit, folder: Path) -> None:
    (folder / "train.csv").write_text("question,answer\n1+1,2\n")
    one(
        edited("train.jsonl", "train.csv"),
        "spec.data.train.source",
        "train.csv is neither",
        "convert CSV to one of them",
    )


@pytest.mark.parametrize(
    ("environment", "path", "problem"),
    [
        ({"type": "custom", "function": "env_of_user:episode"}, None, None),
        ({"type": "custom", "function": "env_of_user:episod"}, "function", "has no episod"),
        ({"type": "agent", "function": "env_of_user:episode"}, None, None),
        ({"type": "agent", "function": "env_of_user:episod"}, "function", "has no episod"),
        ({"type": "custom", "function": "env_of_nobody:episode"}, "function", "there is no module env_of_nobody"),
        ({"type": "custom", "function": "env_broken:episode"}, "function", "is not valid Python"),
        ({"type": "custom", "function": "env_that_imports:episode"}, "function", "imports absent_package"),
        (
            {"type": "tools", "tools": [{"type": "calculator"}, {"type": "custom", "function": "env_of_user:search"}]},
            "tools[1].function",
            "has no search",
        ),
    ],
)
def test_programs_and_tools_are_found_without_being_run(
    tmp_path: Path, environment: dict[str, Any], path: str | None, problem: str | None
) -> None:
    (tmp_path / "env_of_user.py").write_text("1 / 0\nasync def episode(task, model, world): ...\n")
    (tmp_path / "env_broken.py").write_text("def episode(:\n")
    (tmp_path / "env_that_imports.py").write_text("import absent_package\nasync def episode(t, m, w): ...\n")
    document = copy_job(rollout={"engine": "torch", "maxResponseTokens": 4, "environment": environment})
    document["spec"]["model"]["chatTemplate"] = "{{ messages }}"
    (job,) = load_jobs(yaml.safe_dump(document))
    violations = list(check_environment(Readable(job), [tmp_path], tmp_path))
    assert [v.path for v in violations] == ([] if path is None else [f"spec.rollout.environment.{path}"])
    assert problem is None or problem in violations[0].problem


@pytest.mark.parametrize(
    ("text", "changes", "path", "problem"),
    [
        ('{"text": "a"}\n{"text": "b"}\n', {}, None, None),
        (None, {}, "source", "there is no file"),
        ("", {}, "source", "is empty"),
        ('{"text": "a"}\n{"text"\n', {}, "source", "line 2: not valid JSON"),
        ('{"text": "a"}\n{"words": "b"}\n', {}, "source", 'line 2: the row has no column "text"'),
        ('{"text": "a"}\n{"text": null}\n', {}, "source", 'line 2: the column "text"'),
        ('{"text": "a"}\n{"text": 3}\n', {}, "source", "is int, not text"),
        ('{"text": "a"}\n{"text": "b"}\n', {"title": "name"}, "source", 'line 1: the row has no column "name"'),
        ('{"text": "a"}\n{"text": "b"}\n', {"passages": 3}, "passages", "3 per call is more than the 2 of"),
        ('{"text": "a"}\n{"text": 3}\n{"text": "c"}\n', {}, "source", 'line 2: the column "text"'),
        (None, {"source": "pvc://claim/a.jsonl"}, None, None),
        (None, {"source": "s4://bucket/a.jsonl"}, "source", "s4:// is not a known scheme"),
    ],
)
def test_passages_of_a_search_are_looked_at(
    tmp_path: Path, text: str | None, changes: dict[str, Any], path: str | None, problem: str | None
) -> None:
    if text is not None:
        (tmp_path / "facts.jsonl").write_text(text)
    corpus = {"source": "facts.jsonl", "passages": 1, **changes}
    environment = {"type": "tools", "tools": [{"type": "search", "corpus": corpus}]}
    document = copy_job(rollout={"engine": "torch", "maxResponseTokens": 4, "environment": environment})
    document["spec"]["model"]["chatTemplate"] = "{{ messages }}"
    (job,) = load_jobs(yaml.safe_dump(document))
    violations = list(check_environment(Readable(job), [tmp_path], tmp_path))
    at = "spec.rollout.environment.tools[0].corpus"
    assert [v.path for v in violations] == ([] if path is None else [f"{at}.{path}"])
    assert problem is None or problem in violations[0].problem
