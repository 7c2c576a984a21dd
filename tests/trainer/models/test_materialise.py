"""spec.model becomes a folder that transformers loads, reads back and generates with."""

from __future__ import annotations

import json
import math
import string
from pathlib import Path
from typing import Any

import pytest
import s3fs
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from rljob_api.spec.model import Model
from rljob_trainer.errors import BucketError, JobFileError
from rljob_trainer.models import materialise, read_folder
from rljob_trainer.models.sharing import send_model
from rljob_trainer.models.tokenizer import load_tokenizer
from rljob_trainer.models.weights import check_values
from rljob_trainer.storage.bucket import ObjectBucket

CHARACTERS = "0123456789+="


def spec(**random: Any) -> Model:
    shape = {"hiddenSize": 64, "layers": 2, "heads": 2, "contextLength": 32, "tokenizer": {"characters": CHARACTERS}}
    return Model.model_validate({"random": shape | random})


def test_random_model_loads_in_transformers_and_generates_to_its_limit(tmp_path: Path) -> None:
    made = materialise(spec(), tmp_path / "model")
    model: Any
    model, tokenizer = AutoModelForCausalLM.from_pretrained(made.path), AutoTokenizer.from_pretrained(made.path)
    inputs = tokenizer(["12+34="], return_tensors="pt")
    out = model.generate(**inputs, max_new_tokens=5, min_new_tokens=5, do_sample=False)
    assert out.shape == (1, 1 + 6 + 5)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id


@pytest.mark.parametrize(
    ("family", "tie"),
    [("llama", True), ("llama", False), ("qwen2", True), ("qwen2", False), ("gemma2", True), ("gemma3_text", False)],
)
def test_facts_of_the_folder_are_those_of_the_spec_and_the_loaded_model(tmp_path: Path, family: str, tie: bool) -> None:
    made = materialise(spec(family=family, tieEmbeddings=tie, kvHeads=1, intermediateSize=96), tmp_path / "model")
    assert (made.family, made.context_length, made.tied) == (family, 32, tie)
    assert (made.hidden_size, made.layers, made.heads, made.kv_heads, made.head_dim) == (64, 2, 2, 1, 32)
    assert made.vocabulary_size == 1 + len(CHARACTERS)
    assert made.pad_token_id == 0
    assert made.eos_token_ids == (0,)
    # By hand: embedding, per layer q/o 64x64, k/v 64x32, three feed-forward matrices, two norms; last norm.
    more = {"llama": 0, "qwen2": 64 + 32 + 32, "gemma2": 2 * 64, "gemma3_text": 2 * 64 + 2 * 32}[family]
    layer = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96 + 2 * 64 + more
    assert made.parameters == 13 * 64 * (1 if tie else 2) + 2 * layer + 64


@pytest.mark.parametrize(
    ("family", "kinds"), [("gemma2", "sfsff"), ("gemma2", "sf"), ("gemma3_text", "sssssfsf"), ("gemma3_text", "sf")]
)
def test_a_random_gemma_has_windows_and_a_last_layer_without(family: str, kinds: str, tmp_path: Path) -> None:
    made = materialise(spec(family=family, layers=len(kinds)), tmp_path / "model")
    config = json.loads((made.path / "config.json").read_text())
    assert "".join(kind[0] for kind in config["layer_types"]) == kinds
    assert config["sliding_window"] == 8
    assert (made.untrainable, made.unsupported) == (None, None)
    # As wide as its query's scale says: the scores of the first step are neither flat nor sharp.
    assert config["query_pre_attn_scalar"] == config["head_dim"] == 32


def test_seed_decides_the_weights_and_the_callers_random_numbers_are_left_alone(tmp_path: Path) -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    folders = [materialise(spec(seed=s), tmp_path / str(i)).path for i, s in enumerate((1, 1, 2))]
    assert torch.equal(torch.rand(3), expected)
    first, again, other = ((f / "model.safetensors").read_bytes() for f in folders)
    assert first == again
    assert first != other


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "gemma3_text"])
def test_a_random_model_of_any_family_reads_every_character_it_lists(tmp_path: Path, family: str) -> None:
    characters = "".join(sorted({*string.printable, *"éßж数🙂"}))
    random = {"family": family, "hiddenSize": 32, "layers": 1, "heads": 1, "tokenizer": {"characters": characters}}
    made = materialise(Model.model_validate({"random": random}), tmp_path / "model")
    tokenizer = load_tokenizer(made.path)
    for text in (characters, "it's 12 345\n\n  \tIt'll\r\n", "数 and é"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.convert_ids_to_tokens(ids) == list(text)
        assert tokenizer.decode(ids) == text


def test_character_tokenizer_gives_one_token_per_character_and_the_text_back(tmp_path: Path) -> None:
    characters = "ab \n{}é<>/s"
    tokenizer = AutoTokenizer.from_pretrained(
        materialise(spec(tokenizer={"characters": characters}), tmp_path / "m").path
    )
    text = " b\n\n{a}  é<s/>a "
    for token in ("<", "s", ">"):
        assert tokenizer.convert_tokens_to_ids(token) == 1 + characters.index(token)
    ids = tokenizer(text)["input_ids"]
    assert ids == [0] + [1 + characters.index(c) for c in text]
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_a_model_with_a_character_tokenizer_generates_nothing_but_its_characters_and_the_end(tmp_path: Path) -> None:
    """Else a token that shows in no text would be part of its answers."""
    made = materialise(spec(), tmp_path / "m")
    tokenizer = AutoTokenizer.from_pretrained(made.path)
    assert tokenizer.convert_ids_to_tokens(range(made.vocabulary_size)) == ["</s>", *CHARACTERS]
    assert made.eos_token_ids == (0,)
    assert set(tokenizer.all_special_ids) == {0}
    assert tokenizer("z", add_special_tokens=False)["input_ids"] == [0]


def test_a_folder_made_from_the_same_spec_is_reused_and_another_spec_replaces_it(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    weights = materialise(spec(), folder).path / "model.safetensors"
    stamp = weights.stat().st_mtime_ns
    materialise(spec(), folder)
    assert weights.stat().st_mtime_ns == stamp
    assert materialise(spec(layers=1), folder).layers == 1
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_made_folder_that_can_no_longer_be_read_is_made_again(tmp_path: Path, name: str) -> None:
    first = materialise(spec(), tmp_path / "model")
    whole = (first.path / name).read_bytes()
    (first.path / name).write_text('{"half')
    assert materialise(spec(), tmp_path / "model") == first
    assert (first.path / name).read_bytes() == whole


def test_a_local_folder_is_used_where_it_lies(tmp_path: Path) -> None:
    made = materialise(spec(), tmp_path / "here")
    used = materialise(Model(source="here"), tmp_path / "unused", base=tmp_path)
    assert used == made
    assert not (tmp_path / "unused").exists()


def test_chat_template_of_the_job_replaces_the_tokenizers_and_the_weights_are_links(tmp_path: Path) -> None:
    here = materialise(spec(), tmp_path / "here")
    template = "{% for m in messages %}{{ m.content }}={% endfor %}"
    used = materialise(Model(source=str(here.path), chat_template=template), tmp_path / "there")
    tokenizer = AutoTokenizer.from_pretrained(used.path)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "1+2"}], tokenize=False) == "1+2="
    assert (used.path / "model.safetensors").resolve() == (here.path / "model.safetensors").resolve()
    assert getattr(AutoTokenizer.from_pretrained(here.path), "chat_template", None) is None


def test_a_random_model_may_take_the_tokenizer_of_a_folder(tmp_path: Path) -> None:
    materialise(spec(), tmp_path / "here")
    made = materialise(spec(tokenizer={"source": "here"}), tmp_path / "model", base=tmp_path)
    assert AutoTokenizer.from_pretrained(made.path)("1+2=")["input_ids"] == [0, 2, 11, 3, 12]


def test_end_tokens_of_generation_settings_configuration_and_tokenizer_all_count(tmp_path: Path) -> None:
    made = materialise(spec(), tmp_path / "model")
    (made.path / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 2]}))
    assert read_folder(made.path).eos_token_ids == (9, 2, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: (f / "config.json").unlink(), "has no config.json"),
        (lambda f: (f / "config.json").write_text("{"), "is not valid JSON"),
        (lambda f: (f / "config.json").write_text("{}"), "decoder-only"),
        (lambda f: (f / "model.safetensors").unlink(), "no \\*.safetensors"),
        (lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:-9]), "truncated"),
        (lambda f: (f / "tokenizer.json").unlink(), "has no tokenizer"),
    ],
)
def test_a_damaged_folder_is_refused_with_the_file_that_is_wrong(tmp_path: Path, change: Any, message: str) -> None:
    made = materialise(spec(), tmp_path / "model")
    change(made.path)
    with pytest.raises(JobFileError, match=message):
        materialise(Model(source=str(made.path)), tmp_path / "unused")


def test_a_hub_id_without_a_network_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(JobFileError, match=r"(?s)spec.model.source.*nobody/nothing.*HF_HUB_OFFLINE"):
        materialise(Model(source="nobody/nothing"), tmp_path / "unused")
    with pytest.raises(JobFileError, match="there is no folder"):
        materialise(Model(source="./nothing"), tmp_path / "unused")


def test_shapes_that_do_not_divide_are_refused_and_leave_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(JobFileError, match="kvHeads = 3 must divide heads"):
        materialise(spec(kvHeads=3), tmp_path / "model")
    with pytest.raises(JobFileError, match="lists '1' more than once"):
        materialise(spec(tokenizer={"characters": "121"}), tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_a_tokenizer_larger_than_the_embedding_is_refused(tmp_path: Path) -> None:
    small = materialise(spec(), tmp_path / "small")
    large = materialise(spec(tokenizer={"characters": CHARACTERS + "abc"}), tmp_path / "large")
    with pytest.raises(JobFileError, match="has 16 tokens, but the model's embedding has only 13 rows"):
        materialise(Model(source=str(small.path), tokenizer=str(large.path)), tmp_path / "both")


def test_a_folder_in_a_bucket(object_store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = materialise(spec(), tmp_path / "here")
    bucket = ObjectBucket(object_store.place())
    send_model(made.path, bucket)
    fetched = materialise(Model(source=bucket.address), tmp_path / "run" / "model")
    assert fetched.parameters == made.parameters
    with pytest.raises(JobFileError, match=r"spec.model.source: s3://.*/other cannot be read"):
        materialise(Model(source=f"{bucket}/other"), tmp_path / "run" / "other")

    # A store that does not answer now may do so later: the job file is not to blame.
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    s3fs.S3FileSystem.clear_instance_cache()
    try:
        with pytest.raises(BucketError, match=r"EndpointConnectionError: .*check the address, the network"):
            materialise(Model(source=bucket.address), tmp_path / "run" / "later")
    finally:
        s3fs.S3FileSystem.clear_instance_cache()


def test_a_remote_folder_is_copied_through_fsspec(tmp_path: Path) -> None:
    import fsspec

    made = materialise(spec(), tmp_path / "here")
    fsspec.filesystem("memory").put(f"{made.path}/", "memory://bucket/model/", recursive=True)
    fetched = materialise(Model(source="memory://bucket/model"), tmp_path / "run" / "model")
    assert fetched.path == tmp_path / "run" / "model-source"
    assert fetched.parameters == made.parameters
    with pytest.raises(JobFileError, match=r"spec.model.source: memory://bucket/other cannot be read"):
        materialise(Model(source="memory://bucket/other"), tmp_path / "run" / "other")
    with pytest.raises(JobFileError, match="a volume of the cluster"):
        materialise(Model(source="pvc://claim/model"), tmp_path / "run" / "other")


def config_with(folder: Path, **fields: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": 12}, r"has the shape \[13, 64\], but config.json requires \[12, 64\] \(vocab_size"),
        ({"num_hidden_layers": 3}, "config.json: num_hidden_layers = 3, but .* has the weights of 2"),
        ({"num_hidden_layers": 1}, "config.json: num_hidden_layers = 1, but .* has the weights of 2"),
        ({"intermediate_size": 100}, r"gate_proj.weight has the shape .*intermediate_size"),
        ({"hidden_size": "64"}, "config.json: hidden_size must be a whole number above 0, not '64'"),
        ({"rms_norm_eps": None}, "config.json: rms_norm_eps must be set or omitted, not None"),
        ({"rope_parameters": 3}, "config.json: rope_parameters must be an object, not 3"),
        ({"eos_token_id": 99}, "config.json: eos_token_id = 99 is outside the embedding"),
        ({"attention_bias": True}, "lacks the tensor model.layers.0.self_attn.q_proj.bias, which config.json requires"),
        ({"tie_word_embeddings": False}, "lacks the tensor lm_head.weight"),
    ],
)
def test_a_configuration_that_contradicts_the_weights_is_refused_with_its_field(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    made = materialise(spec(), tmp_path / "model")
    config_with(made.path, **change)
    with pytest.raises(JobFileError, match=f"(?s){message}"):
        materialise(Model(source=str(made.path)), tmp_path / "unused")


def test_a_models_own_tokenizer_that_is_larger_than_its_embedding_is_refused(tmp_path: Path) -> None:
    made = materialise(spec(), tmp_path / "model")
    file = made.path / "tokenizer.json"
    content = json.loads(file.read_text())
    content["model"]["vocab"] |= {"more": 13}
    file.write_text(json.dumps(content))
    with pytest.raises(JobFileError, match="has 14 tokens, but the model's embedding has only 13 rows"):
        materialise(Model(source=str(made.path)), tmp_path / "unused")


@pytest.mark.parametrize("kind", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("value", "called"), [(math.nan, "NaN"), (-math.nan, "NaN"), (math.inf, "an infinity"), (-math.inf, "an infinity")]
)
def test_a_weight_that_is_no_number_is_refused_with_the_tensors_name(
    tmp_path: Path, kind: torch.dtype, value: float, called: str
) -> None:
    made = materialise(spec(), tmp_path / "model")
    file = made.path / "model.safetensors"
    tensors = {name: tensor.to(kind) for name, tensor in load_file(file).items()}
    some = tensors["model.layers.1.mlp.up_proj.weight"]
    # The largest number, and one below the normal ones.
    some[0, :2] = torch.tensor([torch.finfo(kind).max, torch.finfo(kind).smallest_normal / 2], dtype=kind)
    save_file(tensors, file, metadata={"format": "pt", "dtype": "F32"})
    check_values(made.path)
    some[3, 5] = value
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(JobFileError, match=f"model.safetensors: model.layers.1.mlp.up_proj.weight contains {called}"):
        check_values(made.path)
