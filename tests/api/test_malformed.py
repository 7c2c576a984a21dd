"""Malformed job files: each is refused with the path of what is wrong and a sentence that helps.

A file is the minimal job with one piece of its text replaced.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from rljob_api import JobInvalid, check, check_text, load_jobs
from rljob_api.violations import touches

SPEC = "  algorithm: {preset: grpo}\n"
"""The last line of the minimal job; what follows it is added to the spec."""


def more(text: str) -> tuple[str, str]:
    """A replacement that adds lines to the spec."""
    return SPEC, SPEC + "".join(f"  {line}\n" for line in text.splitlines())


# (name, text that is replaced, text in its place, path, part of the message)
CASES: list[tuple[str, str, str, str, str]] = [
    # the document
    ("wrong kind", "kind: RLJob", "kind: RLJobs", "kind", "did you mean RLJob?"),
    ("wrong version", "v1alpha1", "v1", "apiVersion", "is not one of rljob.dev/v1alpha1"),
    ("no kind", "kind: RLJob\n", "", "kind", "is required"),
    ("no metadata", "metadata:\n  name: tiny\n", "", "metadata", "is required; add it"),
    ("a section at the root", SPEC, SPEC + "rollout: {}\n", "rollout", "did you mean spec.rollout?"),
    ("list", "apiVersion: rljob.dev/v1alpha1", "- 1", "line 2, column 1", "fix the YAML"),
    # names
    ("capitals", "name: tiny", "name: Tiny", "metadata.name", "use lower-case letters"),
    ("underscore", "name: tiny", "name: my_job", "metadata.name", "use lower-case letters"),
    ("a name by the server", "name: tiny", "name: tiny\n  generateName: tiny-", "metadata.generateName",
     "write metadata.name"),
    ("number", "name: tiny", "name: 7", "metadata.name", "must be text, not 7; put it in quotes: '7'"),
    ("boolean name", "name: tiny", "name: on", "metadata.name", "YAML reads words such as yes, no, on and off"),
    ("too long", "name: tiny", f"name: {'x' * 41}", "metadata.name", "has 41 characters"),
    ("dots", "name: tiny", "name: a.b", "metadata.name", "cannot be part of a host name"),
    ("starts with a digit", "name: tiny", "name: 1st", "metadata.name", "starting with a letter"),
    ("reserved", "name: tiny", "name: head", "metadata.name", "is reserved"),
    ("a queue too long for a label", *more(f"queueName: {'q' * 64}"), "spec.queueName", "has 64 characters; use 1 to"),
    # types
    ("huge number", *more(f"seed: {'9' * 5000}"), "spec.seed", "is too large for one"),
    ("huge hexadecimal", *more(f"seed: 0x{'f' * 300}"), "spec.seed", "is too large for one"),
    ("hexadecimal beyond 64 bits", *more(f"stop: {{steps: 0x{'f' * 30}}}"), "spec.stop.steps", "is too large for one"),
    ("huge exponent", *more("seed: 1e400"), "spec.seed", "is too large for one"),
    ("quoted number", *more('seed: "3"'), "spec.seed", 'must be a whole number, not the text "3"; remove the quotes'),
    ("float seed", *more("seed: 1.5"), "spec.seed", "must be a whole number, not 1.5"),
    ("boolean seed", *more("seed: true"), "spec.seed", "must be a whole number, not true"),
    ("negative seed", *more("seed: -1"), "spec.seed", "-1 is too small; must be 0 to 2147483647"),
    ("huge seed", *more("seed: 1e12"), "spec.seed", "1000000000000 is too large"),
    ("text for a boolean", *more('suspend: "yes"'), "spec.suspend", "write true or false, without quotes"),
    ("boolean for text", "source: org/model", "source: off", "spec.model.source", "'false'"),
    ("number for text", *more("image: 3"), "spec.image", "put it in quotes: '3'"),
    ("map for a list", "[{type: gsm8k}]", "{type: gsm8k}", "spec.reward.functions", "must be a list, not a map of 1"),
    ("list for a map", "{preset: grpo}", "[grpo]", "spec.algorithm", "must be a map, not a list of 1"),
    ("text for a map", "{source: org/model}", "org/model", "spec.model", "must be a map, not the text"),
    ("empty section", "model: {source: org/model}", "model:", "spec.model", "is required"),
    ("empty list", "[{type: gsm8k}]", "[]", "spec.reward.functions", "has 0 items; use 1 to 32 items"),
    ("number below 0", *more("trainer: {optimizer: {learningRate: 0}}"), "spec.trainer.optimizer.learningRate",
     "0 is too small; must be above 0, at most 1"),
    ("three betas", *more("trainer: {optimizer: {betas: [0.9, 0.9, 0.9]}}"), "spec.trainer.optimizer.betas",
     "use 2 items"),
    ("beta of one", *more("trainer: {optimizer: {betas: [0.9, 1]}}"), "spec.trainer.optimizer.betas[1]",
     "1 is too large; must be at least 0, below 1"),
    ("value of a variable", *more("trainer: {env: {A: 3}}"), "spec.trainer.env.A", "put it in quotes: '3'"),
    ("name of a variable", *more("trainer: {env: {A-B: x}}"), "spec.trainer.env", 'the name "A-B"'),
    ("quantity", *more("trainer: {pod: {resources: {limits: {memory: 3 GB}}}}"),
     "spec.trainer.pod.resources.limits.memory", "write a quantity such as 4, 500m or 16Gi"),
    ("label", *more("head: {pod: {labels: {a b: c}}}"), "spec.head.pod.labels", 'the name "a b"'),
    ("mount path", *more("head: {pod: {volumes: [{name: a}], volumeMounts: [{name: a, mountPath: data}]}}"),
     "spec.head.pod.volumeMounts[0].mountPath", "use an absolute path"),
    ("function", "type: gsm8k", "type: custom, function: my_rewards.score", "spec.reward.functions[0].function",
     "write module:function"),
    ("backend", *more("trainer: {backend: megatron}"), "spec.trainer.backend",
     "write fsdp2, or your own class as module:Class"),
    ("backend in part", *more("trainer: {backend: 'megatron:'}"), "spec.trainer.backend",
     "write fsdp2, or your own class"),
    # unknown fields and values
    ("typing error", "answer: answer", "anwser: answer", "spec.data.anwser", "did you mean answer?"),
    ("snake case", *more("trainer: {micro_batch_tokens: 5}"), "spec.trainer.micro_batch_tokens",
     "did you mean microBatchTokens?"),
    ("wrong section", *more("trainer: {learningRate: 1e-6}"), "spec.trainer.learningRate",
     "did you mean spec.trainer.optimizer.learningRate"),
    ("unknown", *more("zzz: 1"), "spec.zzz", "the fields here are image, model, data"),
    ("Python's name of lambda", "{preset: grpo}", "{preset: ppo, advantage: {lambda_: 1}}",
     "spec.algorithm.advantage.lambda_", "did you mean lambda?"),
    ("preset", "preset: grpo", "preset: gropo", "spec.algorithm.preset", "did you mean grpo?"),
    ("preset's spelling", "preset: grpo", "preset: drGrpo", "spec.algorithm.preset", "did you mean dr_grpo?"),
    ("mode", *more("pipeline: {mode: fully_async}"), "spec.pipeline.mode", "did you mean fullyAsync?"),
    ("boolean mode", "{preset: grpo}", "{preset: grpo, rolloutCorrection: {mode: off}}",
     "spec.algorithm.rolloutCorrection.mode", "choose one of none, bypass, decoupled"),
    ("KL that a reward cannot have", "{preset: grpo}", "{preset: grpo, kl: {inReward: {kind: k3Straight}}}",
     "spec.algorithm.kl.inReward.kind", "is not one of k1, k2, k3, abs, full"),
    ("engine argument", *more("rollout: {engineArgs: {gpu_memory_utilisation: 0.8}}"),
     "spec.rollout.engineArgs.gpu_memory_utilisation", "did you mean gpu_memory_utilization?"),
    ("a word of a mode", *more("pipeline: {mode: async}"), "spec.pipeline.mode", "did you mean fullyAsync?"),
    ("letters that changed places", "preset: grpo", "preset: gpro", "spec.algorithm.preset", "did you mean grpo?"),
    ("initials", *more("trainer: {optimizer: {lr: 1e-6}}"), "spec.trainer.optimizer.lr", "did you mean learningRate?"),
    ("initials in the wrong section", *more("trainer: {lr: 1e-6}"), "spec.trainer.lr",
     "did you mean spec.trainer.optimizer.learningRate?"),
    ("a letter of a field that is also a word of another", *more("rollout: {replica: 2}"), "spec.rollout.replica",
     "did you mean replicas?"),
    ("a word of a field", *more("trainer: {gpus: 1}"), "spec.trainer.gpus", "did you mean gpusPerReplica?"),
    ("a field of a section far away", "{source: org/model}", "{source: org/model, path: here}", "spec.model.path",
     "the fields here are source"),
    ("a file of a function", "type: gsm8k", "type: custom, function: './rewards.py:positions'",
     "spec.reward.functions[0].function", "write the module, without .py: rewards:positions"),
    ("a file of a function elsewhere", "type: gsm8k", "type: custom, function: '../my/rewards.py:positions'",
     "spec.reward.functions[0].function",
     "put the file beside the job file, and write its name without .py: rewards:positions"),
    # what one mistake leads to
    ("the name of a required field", "  algorithm:", "  algoritm:", "spec.algoritm", "did you mean algorithm?"),
    ("what others depend on", *more("pipeline: {mode: fully, syncEvery: 2, staleness: {maxAge: 4}}"),
     "spec.pipeline.mode", "did you mean fullyAsync?"),
    ("what another compares itself with", *more("batch: {groups: many, miniBatchGroups: 7}"), "spec.batch.groups",
     "must be a whole number"),
    ("an item that another needs", *more(
        "rollout: {environment: {type: tools, tools: [{type: pyton}], sandbox: {isolation: auto}}}"),
     "spec.rollout.environment.tools[0].type", "did you mean python?"),
    ("a section whose default does not fit", "{source: org/model}", "{random: {contextLength: 32, "
     "tokenizer: {characters: abc}}}\n  rollout: 3", "spec.rollout", "must be a map"),
    # YAML
    ("twice", "  name: tiny\n", "  name: tiny\n  name: other\n", "line 5, column 3", "'name' appears twice"),
    ("tab", "  name: tiny", "\tname: tiny", "line 4, column 1", "cannot start any token"),
    ("not a number", *more("stop: {reward: .nan}"), "line 13, column 18", "not a JSON number"),
    ("unclosed", "{preset: grpo}", "{preset: grpo", "line 13, column 1", "expected ',' or '}'"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("old", "new", "path", "phrase"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_refused_with_path_and_remedy(minimal_text: str, old: str, new: str, path: str, phrase: str) -> None:
    assert minimal_text.count(old) == 1
    found = [violation for outcome in check_text(minimal_text.replace(old, new)) for violation in outcome.violations]
    assert [violation.path for violation in found] == [path]
    assert phrase in str(found[0])
    assert found[0].remedy


def test_there_are_enough_of_them() -> None:
    assert len(CASES) >= 40


def test_the_minimal_job_is_valid_and_short(minimal_text: str) -> None:
    (job,) = load_jobs(minimal_text)
    assert job.metadata.name == "tiny"
    assert len(minimal_text.splitlines()) <= 15


def test_everything_wrong_is_said_at_once(minimal_text: str) -> None:
    text = minimal_text.replace("name: tiny", "name: Tiny").replace("preset: grpo", "preset: ppo, sed: 1")
    text += "  batch: {groups: 10, miniBatchGroups: 3}\n  rollout: {sampling: {topK: 5, topP: 2}}\n"
    with pytest.raises(JobInvalid) as caught:
        load_jobs(text)
    assert {violation.path for violation in caught.value.violations} == {
        "metadata.name",
        "spec.algorithm.sed",
        "spec.batch.miniBatchGroups",
        "spec.rollout.sampling.topK",
        "spec.rollout.sampling.topP",
    }
    assert str(caught.value).count("\n") == 4


def test_what_follows_from_a_wrong_value_is_not_said_too(minimal_text: str) -> None:
    # Without replicas the job would be colocated, and then minReplicas would be refused.
    text = minimal_text + '  rollout: {replicas: "2", minReplicas: 1}\n  placement: separate\n'
    assert [v.path for outcome in check_text(text) for v in outcome.violations] == ["spec.rollout.replicas"]


@pytest.mark.parametrize(
    ("function", "wrong"),
    [
        ("type: rewardModell, rewardModel: {source: a/b}", ["type"]),
        ("type: rewardModel, rewardModel: {source: 3}", ["rewardModel.source"]),
        ("type: rewardModel, rewardModel: {source: a/b, dtyp: x}", ["rewardModel.dtyp"]),
    ],
)
def test_a_mistake_in_the_only_reward_function_does_not_leave_its_pool_without_work(
    minimal_text: str, function: str, wrong: list[str]
) -> None:
    text = minimal_text.replace("{type: gsm8k}", f"{{{function}}}") + "  rewardModel: {replicas: 2}\n"
    (outcome,) = check_text(text)
    paths = [violation.path for violation in outcome.violations]
    assert paths == [f"spec.reward.functions[0].{name}" for name in wrong]


def test_null_is_absent(minimal_text: str) -> None:
    text = minimal_text.replace("{preset: grpo}", "{preset: grpo, kl: {inLoss: null}, critic: ~, aggregation:}")
    (job,) = load_jobs(text)
    assert job == load_jobs(minimal_text)[0]


def test_what_an_api_server_adds_is_left_out(minimal_text: str) -> None:
    added = "  name: tiny\n  uid: 7a\n  generation: 2\n  creationTimestamp: '2026-11-21T05:08:00Z'\n"
    text = minimal_text.replace("  name: tiny\n", added) + "status: {attempt: 1}\n"
    assert load_jobs(text) == load_jobs(minimal_text)


def test_several_jobs_and_other_kinds_in_one_file(minimal_text: str) -> None:
    other = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: code}\ndata: {a: b}\n"
    second = minimal_text.replace("name: tiny", "name: second")
    jobs = load_jobs(f"---\n{minimal_text}---\n{other}---\n{second}")
    assert [job.metadata.name for job in jobs] == ["tiny", "second"]


def test_mistakes_of_several_jobs_are_told_apart(minimal_text: str) -> None:
    bad = minimal_text.replace("name: tiny", "name: Tiny")
    with pytest.raises(JobInvalid) as raised:
        load_jobs(f"{minimal_text}---\n{bad}---\n{bad}")
    paths = [violation.path for violation in raised.value.violations]
    assert paths == ["job 2: metadata.name", "job 3: metadata.name"]


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n", "apiVersion: v1\nkind: ConfigMap\n"])
def test_a_file_without_a_job(text: str) -> None:
    ((outcome,)) = check_text(text + "\n")
    assert "contains no RLJob" in str(outcome.violations[0])


def test_a_file_by_its_path(tmp_path: Path, minimal_text: str) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(minimal_text)
    assert load_jobs(file) == load_jobs(str(file)) == load_jobs(minimal_text)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(JobInvalid, match="UTF-8"):
        load_jobs(file)


def test_what_is_said_about_the_rest_of_a_job_whose_sections_cannot_be_read(minimal_text: str) -> None:
    text = minimal_text.replace("name: tiny", "name: 1a").replace("preset: grpo", "preset: [grpo]")
    # What depends on the preset can't be known: a single sample is right for ppo.
    text += "  batch: {samplesPerPrompt: 1}\n  code: [{configMap: a, pvc: b}]\n"
    (outcome,) = check_text(text)
    paths = sorted(violation.path for violation in outcome.violations)
    assert paths == ["metadata.name", "spec.algorithm.preset", "spec.code[0]"]


def test_a_field_that_does_not_exist_is_wrong_even_without_a_value(minimal_text: str) -> None:
    (outcome,) = check_text(minimal_text + "  phase: null\n  image: null\n")
    assert [violation.path for violation in outcome.violations] == ["spec.phase"]


@pytest.mark.parametrize("name", ["foo..com/x", ".com/x", "a-/x", "/x", "a/b/c"])
def test_names_of_labels_are_those_of_kubernetes(minimal_text: str, name: str) -> None:
    (outcome,) = check_text(minimal_text + f'  head: {{pod: {{labels: {{"{name}": x}}}}}}\n')
    assert [violation.path for violation in outcome.violations] == ["spec.head.pod.labels"]


@pytest.mark.parametrize(
    ("path", "other", "touch"),
    [
        ("spec.rollout.env", "spec.rollout.env", True),
        ("spec.rollout.env", "spec.rollout", True),
        ("spec.rollout", "spec.rollout.env", True),
        ("spec.data.validation[0].name", "spec.data.validation[0]", True),
        ("spec.data.validation[0]", "spec.data.validation", True),
        ("spec.rollout.environment.function", "spec.rollout.env", False),
        ("spec.data.validation[10]", "spec.data.validation[1]", False),
        ("spec.rollout.env", "spec.rollout.environment", False),
    ],
)
def test_a_path_touches_what_is_at_above_or_below_it(path: str, other: str, touch: bool) -> None:
    assert touches(path, [other]) is touch


def test_a_wrong_field_hides_no_mistake_in_one_whose_name_begins_like_it() -> None:
    rollout = {"env": {"a b": "/data"}, "environment": {"function": "a:b"}}
    _, violations = check(
        {
            "apiVersion": "rljob.dev/v1alpha1",
            "kind": "RLJob",
            "metadata": {"name": "t"},
            "spec": {
                "model": {"source": "org/model"},
                "data": {"train": {"source": "t.jsonl"}, "answer": "a"},
                "reward": {"functions": [{"type": "gsm8k"}]},
                "algorithm": {"preset": "grpo"},
                "rollout": rollout,
            },
        }
    )
    assert {violation.path for violation in violations} == {"spec.rollout.env", "spec.rollout.environment.function"}
