"""CEL for the rules about model, data and reward."""

from __future__ import annotations

from collections.abc import Iterator

from rljob_api.crd.checks.check import DATA, FUNCTION, MODEL, RANDOM, REWARD, SPEC, TRAIN, VALIDATION, Check
from rljob_api.crd.expressions import among, one_of
from rljob_api.crd.structural import Path, text
from rljob_api.rules.data import NEEDS_ANSWER, SMALLEST_VLLM_HEAD, TASK_COLUMNS, TEMPLATE

COMMON = r"^([^\\]|\\[dDwWsSbBnrt]|\\[!-/:-@\[-`{-~])*\\?$"
"""What regular expressions look like whose escapes Python and CEL (RE2) share."""
PYTHON_ONLY = r"\(\?[^:]|\{,|\{[0-9]*,?[0-9]{3,}|\{(.|\n)*\{|[*+?}]\+|\[\[|\[[^\]]*\\[bB]"
"""Occurs in those that only Python may take: assertions, possessive and large repetitions, sets of its own."""


def checks() -> Iterator[Check]:
    """In the order of the rules."""
    yield from _model()
    yield from _data()
    yield from _reward()


def _model() -> Iterator[Check]:
    yield Check(
        "model_is_source_or_random",
        MODEL,
        "has(self.source) != has(self.random)",
        "needs exactly one of source and random",
    )
    for name in ("revision", "tokenizer"):
        yield Check(
            "random_model_has_no_source_settings",
            MODEL,
            f"!has(self.random) || !has(self.{name})",
            "has no meaning for a random model; remove it",
            f".{name}",
        )
    yield Check(
        "random_tokenizer_is_characters_or_source",
        (*RANDOM, "tokenizer"),
        "has(self.characters) != has(self.source)",
        "needs exactly one of characters and source",
    )
    yield Check(
        "heads_divide_hidden_size",
        RANDOM,
        "self.hiddenSize % self.heads == 0",
        "must divide hiddenSize; choose heads that divide it",
        ".heads",
    )
    yield Check(
        "kv_heads_divide_heads",
        RANDOM,
        "!has(self.kvHeads) || self.heads % self.kvHeads == 0",
        "must divide heads; choose a divisor",
        ".kvHeads",
    )
    yield Check(
        "vllm_needs_wide_heads",
        SPEC,
        "!has(self.model.random) || self.rollout.engine != 'vllm' || "
        f"self.model.random.hiddenSize >= {SMALLEST_VLLM_HEAD} * self.model.random.heads",
        f"hiddenSize / heads must be {SMALLEST_VLLM_HEAD} or more for vLLM; use fewer heads or rollout.engine: torch",
        ".model.random.heads",
    )
    yield Check(
        "lengths_fit_the_random_models_context",
        SPEC,
        "!has(self.model.random) || "
        "self.data.maxPromptTokens + self.rollout.maxResponseTokens <= self.model.random.contextLength",
        "is less than data.maxPromptTokens + rollout.maxResponseTokens; raise it, or lower one of the two",
        ".model.random.contextLength",
    )
    yield Check(
        "validation_lengths_fit_the_random_models_context",
        SPEC,
        "!has(self.model.random) || !has(self.data.validation) || self.data.validation.all(v, "
        "!has(v.sampling.maxResponseTokens) || "
        "self.data.maxPromptTokens + v.sampling.maxResponseTokens <= self.model.random.contextLength)",
        "sampling.maxResponseTokens and data.maxPromptTokens together exceed the model's context; lower one of them",
        ".data.validation",
    )


def _data() -> Iterator[Check]:
    yield Check(
        "training_data_has_one_origin",
        TRAIN,
        "[has(self.source), has(self.task), has(self.parts) && size(self.parts) > 0].filter(x, x).size() == 1",
        "needs exactly one of source, task and parts",
    )
    part: Path = (*TRAIN, "parts", "[]")
    for at in (part, VALIDATION):
        rule = "training_data_has_one_origin" if at == part else "validation_sets_have_one_origin"
        yield Check(rule, at, "has(self.source) != has(self.task)", "needs exactly one of source and task")
    yield Check(
        "parts_have_names",
        part,
        "has(self.name)",
        "is required for each of several parts; give the part a name",
        ".name",
    )
    yield Check(
        "parts_have_names",
        TRAIN,
        "!has(self.parts) || self.parts.all(p, !has(p.name) || "
        "self.parts.filter(q, has(q.name) && q.name == p.name).size() == 1)",
        "two parts have the same name; give each its own",
        ".parts",
    )
    for name in ("name", "split", "limit"):
        yield Check(
            "parts_stand_alone",
            TRAIN,
            f"!has(self.parts) || size(self.parts) == 0 || !has(self.{name})",
            "has no meaning beside parts; set it on the parts",
            f".{name}",
        )
    for at in (TRAIN, part, VALIDATION):
        yield Check(
            "tasks_have_no_split",
            at,
            "!has(self.task) || !has(self.split)",
            "a generated task has no splits; remove it",
            ".split",
        )
        # The largest size a job may ask for is 1e8, so larger powers need not be known.
        copies = [10**digits for digits in range(9)]
        additions = [0, 100, *((9 * 10 ** (digits - 1)) ** 2 for digits in range(2, 5))]
        yield Check(
            "tasks_have_enough_problems",
            (*at, "task"),
            f"!has(self.size) || (self.type == 'copy' ? "
            f"self.digits >= {len(copies)} || self.size <= {copies}[self.digits] : "
            f"self.digits >= {len(additions)} || self.size <= {additions}[self.digits])",
            "there are fewer different problems; lower size, or raise digits",
            ".size",
        )
    yield Check(
        "greedy_validation_takes_one_sample",
        VALIDATION,
        "self.samplesPerPrompt == 1 || self.sampling.temperature > 0.0",
        "several samples at temperature 0 are all the same; set sampling.temperature above 0",
        ".samplesPerPrompt",
    )
    yield Check(
        "prompt_template_is_well_formed",
        (*DATA, "prompt"),
        f"!self.matches('[{{}}]') || self.matches({text(f'^{TEMPLATE}$')})",
        "is a malformed template; name a column in braces, as in {question}, and write {{ and }} for braces themselves",
    )
    has_none = (
        "(has(self.model.random) && has(self.model.random.tokenizer.characters) && !has(self.model.chatTemplate))"
    )
    yield Check(
        "chat_has_a_template",
        SPEC,
        f"self.data.chat != 'always' || !{has_none}",
        "always needs a chat template, and a tokenizer of characters has none; set spec.model.chatTemplate",
        ".data.chat",
    )
    yield Check(
        "chat_has_a_template",
        SPEC,
        "!has(self.data.systemPrompt) || self.data.systemPrompt == '' || self.data.chat == 'always' || "
        f"(self.data.chat == 'auto' && !{has_none})",
        "needs a chat template, and none is applied here; write the text into the template of spec.data.prompt",
        ".data.systemPrompt",
    )
    tasks = (
        "(has(self.train.task) || (has(self.train.parts) && self.train.parts.exists(p, has(p.task))) || "
        "(has(self.validation) && self.validation.exists(v, has(v.task))))"
    )
    columns = f"a generated task has the columns {' and '.join(TASK_COLUMNS)} only"
    places = text(rf"^([^{{}}]|\{{\{{|\}}\}}|\{{({'|'.join(TASK_COLUMNS)})\}})*$")
    yield Check(
        "tasks_have_the_columns",
        DATA,
        f"!{tasks} || {among('self.prompt', TASK_COLUMNS)} || "
        f"(self.prompt.matches('[{{}}]') && self.prompt.matches({places}))",
        f"{columns}; name one of them",
        ".prompt",
    )
    yield Check(
        "tasks_have_the_columns",
        DATA,
        f"!{tasks} || !has(self.answer) || {among('self.answer', TASK_COLUMNS)}",
        f"{columns}; name one of them",
        ".answer",
    )
    yield Check(
        "answers_are_there_for_rewards_that_compare",
        SPEC,
        f"has(self.data.answer) || !self.reward.functions.exists(f, f.type in {one_of(NEEDS_ANSWER)}) || "
        "has(self.data.train.task) || (has(self.data.train.parts) && size(self.data.train.parts) > 0 && "
        "self.data.train.parts.all(p, has(p.task)))",
        "is required by a reward function that compares; name the column with the reference answer",
        ".data.answer",
    )


def _reward() -> Iterator[Check]:
    # `function` is a reserved word of CEL; Kubernetes escapes it.
    yield Check(
        "custom_rewards_name_a_function",
        FUNCTION,
        "(self.type == 'custom') == has(self.__function__)",
        "belongs to type custom, which needs it; write module:function",
        ".function",
    )
    yield Check(
        "pattern_rewards_have_a_pattern",
        FUNCTION,
        "(self.type == 'pattern') == has(self.pattern)",
        "belongs to type pattern, which needs it; write a regular expression",
        ".pattern",
    )
    yield Check(
        "patterns_compile",
        (*FUNCTION, "pattern"),
        # A regular expression that is none ends the evaluation with an error, which refuses the job.
        f"!self.matches({text(COMMON)}) || self.matches({text(PYTHON_ONLY)}) ? true : [''.matches(self)].size() == 1",
        "is not a regular expression",
    )
    name = "(has({0}.name) ? {0}.name : {0}.type)"
    yield Check(
        "reward_names_differ",
        REWARD,
        f"self.functions.all(f, self.functions.filter(g, {name.format('g')} == {name.format('f')}).size() == 1)",
        "two functions have the same name (or, without names, the same type); give each its own name",
        ".functions",
    )
    yield Check(
        "some_reward_counts",
        REWARD,
        "self.functions.exists(f, f.weight != 0.0)",
        "all weights are 0, so every sample scores 0; give one a weight",
        ".functions",
    )
    yield Check(
        "overlong_buffer_is_shorter_than_the_response",
        SPEC,
        "!has(self.reward.overlong) || self.reward.overlong.bufferTokens < self.rollout.maxResponseTokens",
        "must be less than rollout.maxResponseTokens; lower it (a fifth is usual)",
        ".reward.overlong.bufferTokens",
    )
    yield Check(
        "reward_clip_is_a_range", (*REWARD, "clip"), "self.low < self.high", "must be below high; lower it", ".low"
    )
    yield Check(
        "error_score_belongs_to_on_error_score",
        REWARD,
        "self.errorScore == 0.0 || self.onError == 'score'",
        "has no meaning without onError: score; set that, or remove it",
        ".errorScore",
    )
