"""A saved state continues bit for bit, on other numbers of ranks too, and damage is said clearly."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cut_for import cut_for
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from whole_state import parts, whole

from rljob_trainer.errors import CheckpointError, UnreadableError, exit_code_of
from rljob_trainer.learner import state as states
from rljob_trainer.learner.adamw import AdamW
from rljob_trainer.learner.backends.fsdp2 import Fsdp2
from rljob_trainer.learner.backends.fsdp2.layout import Fsdp2Layout
from rljob_trainer.learner.protocol import LossSettings, ScoreRequest, SequenceBatch, UpdateRequest
from rljob_trainer.learner.settings import LearnerSettings, OptimizerSettings
from rljob_trainer.storage.bucket import ObjectBucket
from rljob_trainer.weights.shards import Shard as Box

pytestmark = pytest.mark.integrity

State = dict[str, torch.Tensor]


def updated(
    rank: int,
    address: str,
    settings: LearnerSettings,
    batch: SequenceBatch,
    options: dict[str, Any],
) -> tuple[State, int, torch.Tensor]:
    """Loads, updates, saves, updates again; then the whole state, the schedule's clock and a random number. With
    ``score`` the models compute without gradients before each of these, which gathers what is sharded."""
    learner = Fsdp2().start(settings, rank, address, timeout_seconds=60)
    minis = [range(0, 12), range(12, 24)]
    share = cut_for(batch, minis, ranks=settings.ranks, token_budget=settings.micro_batch_tokens).shares[rank]

    def score() -> None:
        if "score" in options:
            learner.score(share, ScoreRequest(0.7, log_probs=True, reference=True, values=True))

    if "load" in options:
        score()
        learner.load(options["load"])
    for _ in range(options.get("before", 0)):
        score()
        learner.update(share, LossSettings(), UpdateRequest(update_critic=True))
        torch.rand(3)
    if "save" in options:
        score()
        learner.save(options["save"])
    for _ in range(options.get("after", 0)):
        score()
        learner.update(share, LossSettings(), UpdateRequest(update_critic=True))
    state = whole([shard for model in learner._trained for shard in model.state()])
    return state, learner.actor.updates, torch.rand(2)


@pytest.mark.slow(stands_for="[2-bfloat16]")
@pytest.mark.parametrize(("count", "dtype"), [(1, "bfloat16"), (2, "float32"), (2, "bfloat16")])
def test_what_a_score_gathers_is_neither_saved_nor_taken_for_a_change(
    count: int,
    dtype: str,
    ranks: Any,
    settings: LearnerSettings,
    make_batch: Callable[..., SequenceBatch],
    tmp_path: Path,
) -> None:
    """FSDP2 keeps the outermost group gathered, and rounded, after a pass without gradients."""
    settings, batch = replace(settings, ranks=count, dtype=dtype, reference=True), make_batch()
    place = str(tmp_path)
    straight = ranks.run(count, updated, settings, batch, {"before": 2, "save": place, "after": 2, "score": True})
    resumed = ranks.run(count, updated, settings, batch, {"load": place, "after": 2, "score": True})
    for (ours, _, _), (theirs, _, _) in zip(straight, resumed, strict=True):
        assert {tensor.dtype for name, tensor in ours.items() if ".model." in name} == {torch.float32}
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.fixture
def settings(tied_folder: Path) -> LearnerSettings:
    optimizer = OptimizerSettings(learning_rate=1e-3, warmup_steps=5)
    return LearnerSettings(tied_folder, actor=optimizer, critic=optimizer, micro_batch_tokens=100)


@pytest.fixture(params=["folder", "bucket"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where a state can be: both kinds."""
    return str(tmp_path) if request.param == "folder" else request.getfixturevalue("object_store").place()


@pytest.mark.slow(stands_for=["[folder-2]", "[bucket-1]"])
@pytest.mark.parametrize("count", [1, 2])
def test_save_and_load_then_update_equals_going_on(
    count: int, ranks: Any, settings: LearnerSettings, make_batch: Callable[..., SequenceBatch], place: str
) -> None:
    settings, batch = replace(settings, ranks=count), make_batch()
    straight = ranks.run(count, updated, settings, batch, {"before": 2, "save": place, "after": 2})
    resumed = ranks.run(count, updated, settings, batch, {"load": place, "after": 2})
    for (ours, updates, drawn), (theirs, more_updates, also_drawn) in zip(straight, resumed, strict=True):
        assert updates == more_updates == 4
        assert torch.equal(drawn, also_drawn)
        assert ours.keys() == theirs.keys()
        for name, tensor in ours.items():
            assert torch.equal(tensor, theirs[name]), name


class Resting:
    """A sharded parameter of a learner on GPUs and its moments, all in host memory while an engine has the device."""

    name, updates, adapter = "actor", 3, None

    def __init__(self, rank: int) -> None:
        # There is no such device here: whoever takes a shard to it fails.
        mesh = DeviceMesh("cuda", torch.arange(2))
        meta = TensorMeta(torch.Size((6, 2)), (2, 1), torch.float32)
        shard = torch.randn(3, 2, generator=torch.Generator().manual_seed(rank))
        whole = DTensor(shard, DTensorSpec(mesh, (Shard(0),), tensor_meta=meta), requires_grad=False)
        self.parameter = torch.nn.Parameter(whole)
        self.layout = Fsdp2Layout(None)
        self.rule = AdamW([self.parameter], OptimizerSettings(learning_rate=1e-3), self.layout)
        self.rule.apply([0], [shard + 1], 1e-3)

    def state(self) -> list[Box]:
        kept = {"actor.parameter": self.layout.local(self.parameter.detach()), **self.rule.state(0)}
        return [self.layout.shard(n, self.parameter if t.ndim else t, t) for n, t in kept.items()]

    def shards(self) -> dict[str, torch.Tensor]:
        return parts(self.state())


def saved_at_rest(rank: int, address: str, folder: Path) -> tuple[State, State]:
    dist.init_process_group("gloo", init_method=f"tcp://{address}", rank=rank, world_size=2)
    model: Any = Resting(rank)
    before = {name: shard.clone() for name, shard in model.shards().items()}
    states.save(folder, [model], states.StateOwner("fsdp2", rank, 2))
    dist.barrier()  # rank 0 writes the description last
    for shard in model.shards().values():
        shard.zero_()
    states.load(folder, [model], states.StateOwner("fsdp2", rank, 2))
    return before, model.shards()


def test_what_rests_in_host_memory_is_saved_from_there(ranks: Any, tmp_path: Path) -> None:
    for before, after in ranks.run(2, saved_at_rest, tmp_path):
        assert set(before) == {"actor.parameter", "step", "exp_avg", "exp_avg_sq"}
        assert all(shard.abs().sum() > 0 for shard in before.values())
        assert all(torch.equal(after[name], shard) for name, shard in before.items())


@pytest.mark.slow(stands_for=["[folder-4-2]", "[bucket-1-2]"])
@pytest.mark.parametrize(("writers", "readers"), [(2, 1), (1, 2), (4, 2)])
def test_another_number_of_ranks_reads_the_same_state(
    writers: int,
    readers: int,
    ranks: Any,
    settings: LearnerSettings,
    make_batch: Callable[..., SequenceBatch],
    place: str,
) -> None:
    batch = make_batch()
    written = ranks.run(writers, updated, replace(settings, ranks=writers), batch, {"before": 2, "save": place})
    read = ranks.run(readers, updated, replace(settings, ranks=readers), batch, {"load": place})
    for state, updates, _ in read:
        assert updates == 2
        assert state.keys() == written[0][0].keys()
        assert any(name.endswith("exp_avg_sq") and tensor.any() for name, tensor in state.items())
        for name, tensor in written[0][0].items():
            assert torch.equal(tensor, state[name]), name


@pytest.fixture(scope="module")
def saved(
    tmp_path_factory: pytest.TempPathFactory, tied_folder: Path, make_batch: Callable[..., SequenceBatch]
) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    Fsdp2().start(LearnerSettings(tied_folder, critic=OptimizerSettings())).save(folder)
    return folder


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("missing data", "cannot be read.*distcp"),
        ("truncated data", "cannot be read"),
        ("garbage metadata", "cannot be read"),
        ("missing metadata", r"cannot be read.*\.metadata"),
        ("missing random", "cannot be read.*random-0000"),
        ("broken digests", "cannot be read.*JSONDecodeError"),
        ("broken description", r"learner\.json cannot be read"),
        ("newer description", "has format 99, this program reads 3"),
        ("not a checkpoint", r"learner\.json is missing"),
    ],
)
def test_damage_is_a_checkpoint_error(
    damage: str, message: str, saved: Path, settings: LearnerSettings, tmp_path: Path
) -> None:
    folder = tmp_path / "state"
    shutil.copytree(saved, folder)
    data = next(folder.glob("*.distcp"))
    match damage:
        case "missing data":
            data.unlink()
        case "truncated data":
            data.write_bytes(data.read_bytes()[: data.stat().st_size // 2])
        case "garbage metadata":
            (folder / ".metadata").write_bytes(b"garbage" * 100)
        case "missing metadata":
            (folder / ".metadata").unlink()
        case "missing random":
            (folder / "random-0000.pt").unlink()
        case "broken digests":
            (folder / "digests-0000.json").write_text("{")
        case "broken description":
            (folder / "learner.json").write_text("{")
        case "newer description":
            (folder / "learner.json").write_text('{"format": 99, "updates": {}}')
        case "not a checkpoint":
            (folder / "learner.json").unlink()
    with pytest.raises(CheckpointError, match=message) as caught:
        Fsdp2().start(settings).load(folder)
    assert exit_code_of(caught.value) == 66


@pytest.mark.parametrize("part", ["*.distcp", ".metadata", "learner.json", "random-0000.pt", "digests-0000.json"])
def test_a_file_that_cannot_be_read_is_not_called_damaged(
    part: str, saved: Path, settings: LearnerSettings, tmp_path: Path
) -> None:
    folder = tmp_path / "state"
    shutil.copytree(saved, folder)
    file = next(folder.glob(part))
    file.unlink()
    file.symlink_to(file)  # it cannot be opened, not even by root
    with pytest.raises(
        UnreadableError, match=r"cannot be read.*[Tt]oo many levels of symbolic links.*try again"
    ) as caught:
        Fsdp2().start(settings).load(folder)
    assert exit_code_of(caught.value) == 75


def no_memory() -> None:
    torch.empty(1 << 50)


def no_memory_on_rank_1() -> None:
    raise CheckpointException("read", {1: (MemoryError(), [])})  # type: ignore[arg-type]


def no_memory_on_the_device() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


def no_network() -> None:
    raise dist.DistNetworkError("the connection was lost")


@pytest.mark.parametrize("failure", [no_memory, no_memory_on_rank_1, no_memory_on_the_device, no_network])
def test_a_machine_that_fails_while_it_reads_is_no_damage(
    failure: Callable[[], None], saved: Path, settings: LearnerSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = Fsdp2().start(settings)
    monkeypatch.setattr(states, "load_tensors", lambda *_, **__: failure())
    with pytest.raises(UnreadableError, match="its content may be intact: try again") as caught:
        learner.load(saved)
    assert exit_code_of(caught.value) == 75


def test_a_rank_that_does_not_answer_while_others_read_is_no_damage(
    saved: Path, ranks: Any, settings: LearnerSettings
) -> None:
    alone, _ = ranks.run(2, load_alone, replace(settings, ranks=2), saved)
    assert alone == ["UnreadableError", 75]


def load_alone(rank: int, address: str, settings: LearnerSettings, folder: Path) -> list[str | int]:
    learner = Fsdp2().start(settings, rank, address, timeout_seconds=5)
    if rank == 1:
        return []
    with pytest.raises(CheckpointError) as caught:
        learner.load(folder)
    return [type(caught.value).__name__, exit_code_of(caught.value)]


@pytest.mark.parametrize(
    ("lost", "message"),
    [
        (".distcp", "cannot be read.*distcp"),
        (".metadata", r"cannot be read.*\.metadata"),
        ("random-0000.pt", "cannot be read.*random-0000"),
        ("learner.json", r"learner\.json is missing"),
    ],
)
def test_a_lost_object_is_a_checkpoint_error(
    lost: str, message: str, saved: Path, settings: LearnerSettings, object_store: Any
) -> None:
    bucket = ObjectBucket(object_store.place())
    for file in saved.iterdir():
        if not file.name.endswith(lost):
            bucket.upload(file, file.name)
    with pytest.raises(CheckpointError, match=message):
        Fsdp2().start(settings).load(bucket.address)


def test_a_state_that_cannot_be_written_is_a_checkpoint_error(settings: LearnerSettings, object_store: Any) -> None:
    with pytest.raises(CheckpointError, match=r"cannot be written to s3://no-such-bucket/x: .*does not exist"):
        Fsdp2().start(settings).save("s3://no-such-bucket/x")


def test_a_folder_that_was_given_up_is_not_made_anew(settings: LearnerSettings, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"cannot be written to .*gone.*: .*No such file"):
        Fsdp2().start(settings).save(tmp_path / "gone")
    assert not list(tmp_path.iterdir())


def test_the_state_of_another_model_or_algorithm(
    saved: Path, settings: LearnerSettings, untied_folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match="belongs to another model"):
        Fsdp2().start(replace(settings, model_path=untied_folder)).load(saved)
    Fsdp2().start(replace(settings, critic=None)).save(tmp_path)
    with pytest.raises(CheckpointError, match=r"has no critic \(it has: actor\)"):
        Fsdp2().start(settings).load(tmp_path)


def test_damage_is_an_error_on_every_rank(saved: Path, ranks: Any, settings: LearnerSettings, tmp_path: Path) -> None:
    folder = tmp_path / "state"
    shutil.copytree(saved, folder)
    data = next(folder.glob("*.distcp"))
    data.write_bytes(data.read_bytes()[: data.stat().st_size // 2])
    messages = ranks.run(2, failing_load, replace(settings, ranks=2), folder)
    assert all("cannot be read" in message for message in messages)


def failing_load(rank: int, address: str, settings: LearnerSettings, folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        Fsdp2().start(settings, rank, address, timeout_seconds=60).load(folder)
    return str(caught.value)


def test_a_state_of_another_optimizer_is_called_that(saved: Path, settings: LearnerSettings) -> None:
    muon = OptimizerSettings("muon")
    with pytest.raises(CheckpointError, match=r"written with another optimizer.*set trainer\.optimizer\.type"):
        Fsdp2().start(replace(settings, actor=muon, critic=muon)).load(saved)


def test_a_learners_part_of_another_run_or_step_is_refused(settings: LearnerSettings, tmp_path: Path) -> None:
    rank = Fsdp2().start(settings)
    rank.save(tmp_path, "run a, step 2")
    rank.load(tmp_path, "run a, step 2")
    rank.load(tmp_path)  # of a checkpoint that nobody put into a run
    with pytest.raises(CheckpointError, match=r"belongs to run a, step 2, but the driver's part .* to run a, step 3"):
        rank.load(tmp_path, "run a, step 3")


def test_an_optimizer_that_was_saved_with_another_model_is_named(
    saved: Path, tied_folder: Path, tmp_path: Path
) -> None:
    """The tensors are those of a sound checkpoint, but not those whose digests lie beside them."""
    folder = tmp_path / "state"
    shutil.copytree(saved, folder)
    digests = json.loads((folder / "digests-0000.json").read_text())
    moved = {name: digest + name.startswith("critic.optimizer.") for name, digest in digests.items()}
    (folder / "digests-0000.json").write_text(json.dumps(moved))
    settings = LearnerSettings(tied_folder, critic=OptimizerSettings())
    with pytest.raises(CheckpointError, match=r"^critic\.optimizer in .* tensors are not those that were saved with"):
        Fsdp2().start(settings).load(folder)
