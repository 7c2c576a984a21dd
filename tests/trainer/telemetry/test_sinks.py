"""What is reported is on disk, once per step, whatever happened in between."""

from __future__ import annotations

import importlib.util
import json
import math
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from rljob_api.spec.lifecycle import Logging, Wandb
from rljob_trainer.errors import DataError, JobFileError, OutputError
from rljob_trainer.telemetry.names import UnknownMetricError
from rljob_trainer.telemetry.run_folder import SampleRow, read_lines, read_samples, sample_files, samples_path
from rljob_trainer.telemetry.sinks import JsonlSink, Sinks, TensorBoardSink, open_sinks
from rljob_trainer.telemetry.trackers import MlflowSink, WandbSink, _flat, open_trackers

ROW = SampleRow(source="gsm8k", prompt="1 + 1 = ?", response='2\n<script>"é"', score=1.0, parts={"exact": 1.0})


def steps_in(folder: Path) -> list[int]:
    return [record["step"] for record in read_lines(folder / "metrics.jsonl")]


def test_a_step_is_on_disk_when_the_call_returns(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "deep" / "run")
    sink.step(1, {"reward/mean": 0.25})
    record = json.loads((tmp_path / "deep/run/metrics.jsonl").read_text())
    assert record["step"] == 1
    assert record["reward/mean"] == 0.25
    assert record["time"].endswith("Z")
    sink.close()


def test_numbers_that_json_lacks_become_null(tmp_path: Path) -> None:
    with open_sinks(tmp_path, tensorboard=False) as sinks:
        sinks.step(1, {"actor/grad_norm": math.nan, "actor/ratio/max": math.inf, "reward/mean": 1})
    (record,) = read_lines(tmp_path / "metrics.jsonl")
    assert record["actor/grad_norm"] is None
    assert record["actor/ratio/max"] is None
    assert record["reward/mean"] == 1.0


def test_an_unknown_name_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with open_sinks(tmp_path, tensorboard=False) as sinks, pytest.raises(UnknownMetricError, match="reward/meen"):
        sinks.step(1, {"reward/mean": 1.0, "reward/meen": 1.0})
    assert steps_in(tmp_path) == []


def test_a_resume_leaves_no_step_twice(tmp_path: Path) -> None:
    with open_sinks(tmp_path, tensorboard=False) as sinks:
        for step in range(1, 8):
            sinks.step(step, {"reward/mean": step})
            sinks.samples(step, [ROW])
    before = (tmp_path / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    with open_sinks(tmp_path, tensorboard=False, restored_step=4) as sinks:
        assert steps_in(tmp_path) == [1, 2, 3, 4]
        assert list(sample_files(tmp_path)) == [1, 2, 3, 4]
        sinks.step(5, {"reward/mean": 50})
    assert steps_in(tmp_path) == [1, 2, 3, 4, 5]
    assert (tmp_path / "metrics.jsonl").read_bytes().splitlines(keepends=True)[:4] == before[:4]


def test_a_resumed_run_may_tell_its_restored_step_anew(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with open_sinks(tmp_path) as sinks:
        for step in range(1, 5):
            sinks.step(step, {"reward/mean": step})
    with open_sinks(tmp_path, restored_step=3) as sinks:
        sinks.step(3, {"reward/mean": 30})
        sinks.step(4, {"reward/mean": 40})
    told = [(record["step"], record["reward/mean"]) for record in read_lines(tmp_path / "metrics.jsonl")]
    assert told == [(1, 1), (2, 2), (3, 30), (4, 40)]
    read = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in read.Scalars("reward/mean")] == told


@pytest.mark.parametrize("torn", [b'{"step": 3, "rew', b'{"step": 3, "reward/mean": 1}', b"\x00\x00\x00\n"])
def test_a_line_torn_by_a_crash_is_cut_off_at_resume(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2}\n' + torn)
    JsonlSink(tmp_path, restored_step=5).close()
    assert path.read_bytes() == b'{"step": 1}\n{"step": 2}\n'


def test_resuming_without_a_record_starts_one(tmp_path: Path) -> None:
    with open_sinks(tmp_path, tensorboard=False, restored_step=10) as sinks:
        sinks.step(11, {"reward/mean": 1})
    assert steps_in(tmp_path) == [11]


def test_a_new_run_in_an_old_folder_starts_anew(tmp_path: Path) -> None:
    for _ in range(2):
        with open_sinks(tmp_path) as sinks:
            sinks.step(1, {"reward/mean": 1})
            sinks.samples(1, [ROW])
    assert steps_in(tmp_path) == [1]
    assert len(list((tmp_path / "tensorboard").iterdir())) == 1


def test_reading_forgives_a_torn_end_but_not_a_bad_middle(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": ')
    assert [record["step"] for record in read_lines(path)] == [1]
    path.write_text('{"step": 1}\nnonsense\n{"step": 2}\n')
    with pytest.raises(DataError, match=r"metrics.jsonl, line 2: not JSON"):
        list(read_lines(path))
    assert list(read_lines(tmp_path / "absent.jsonl")) == []


def test_samples_come_back_as_they_were(tmp_path: Path) -> None:
    with open_sinks(tmp_path, tensorboard=False) as sinks:
        sinks.samples(10, [ROW, SampleRow(source="gsm8k", prompt="p", response="r", score=math.nan)])
    path = samples_path(tmp_path, 10)
    assert path.name == "step-000010.jsonl"
    first, second = read_samples(path)
    assert first == ROW
    assert second.score is None
    assert set(json.loads(path.read_text().splitlines()[0])) == {"source", "prompt", "response", "score", "parts"}


def test_a_full_disk_stops_nothing_and_is_an_error_at_the_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    sink = JsonlSink(tmp_path)
    for step in (1, 2):
        sink.step(step, {"reward/mean": 1})
    assert caplog.text.count("metrics.jsonl: No space left on device; make room") == 1
    with pytest.raises(OutputError, match=r"cannot write .*metrics.jsonl: No space left on device; .*--output"):
        sink.close()


def test_lines_that_a_full_disk_tore_are_whole_once_there_is_room(tmp_path: Path) -> None:
    """In a process of its own: the limit of a file's size stands for the disk's."""
    program = """
import resource, signal, sys
from pathlib import Path
from rljob_trainer.telemetry.sinks import JsonlSink
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
sink = JsonlSink(Path(sys.argv[1]))
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
for step in range(1, 31):
    sink.step(step, {"reward/mean": step / 10})
    if step == 25:
        assert (Path(sys.argv[1]) / "metrics.jsonl").stat().st_size == 1000
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
sink.close()
"""
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True, timeout=60)
    records = list(read_lines(tmp_path / "metrics.jsonl"))
    assert [(r["step"], r["reward/mean"]) for r in records] == [(s, s / 10) for s in range(1, 31)]


def test_tensorboard_files_that_a_full_disk_cuts_stop_nothing(tmp_path: Path) -> None:
    program = """
import resource, signal, sys, time
from pathlib import Path
from rljob_trainer.telemetry.sinks import TensorBoardSink
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
sink = TensorBoardSink(Path(sys.argv[1]))
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))
for step in range(1, 4):
    sink.step(step, {f"reward/part/{i}/mean": 1.0 for i in range(20_000)})
    time.sleep(1)
sink.close()
"""
    command = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(command, check=True, timeout=60, capture_output=True, text=True)
    assert done.stderr.count("(File too large); metrics.jsonl continues") == 1


def test_a_folder_that_cannot_be_made_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match=r"cannot write .*file/run/metrics.jsonl: Not a directory"):
        open_sinks(tmp_path / "file" / "run")


def test_tensorboard_reads_back_what_was_written(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with Sinks([TensorBoardSink(tmp_path)]) as sinks:
        for step in (1, 2, 3):
            sinks.step(step, {"reward/mean": step / 4, "validation/gsm8k/mean@8": 0.5})
    read = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert set(read.Tags()["scalars"]) == {"reward/mean", "validation/gsm8k/mean@8"}
    assert [(e.step, e.value) for e in read.Scalars("reward/mean")] == [(1, 0.25), (2, 0.5), (3, 0.75)]


def test_tensorboard_shows_no_step_twice_after_a_resume(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with Sinks([TensorBoardSink(tmp_path)]) as sinks:
        for step in range(1, 6):
            sinks.step(step, {"reward/mean": 0})
    with Sinks([TensorBoardSink(tmp_path, restored_step=2)]) as sinks:
        for step in range(3, 5):
            sinks.step(step, {"reward/mean": 1})
    read = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in read.Scalars("reward/mean")] == [(1, 0), (2, 0), (3, 1), (4, 1)]


def test_writing_tensorboard_files_imports_neither_torch_nor_tensorflow(tmp_path: Path) -> None:
    program = (
        "import sys, pathlib; from rljob_trainer.telemetry.sinks import open_sinks\n"
        f"sinks = open_sinks(pathlib.Path({str(tmp_path)!r})); sinks.step(1, {{'reward/mean': 1}}); sinks.close()\n"
        "print([m for m in ('torch', 'tensorflow', 'ray') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


class _Failing:
    closed = False

    def step(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def samples(self, step: int, rows: Sequence[SampleRow]) -> None: ...

    def close(self) -> None:
        self.closed = True
        raise OutputError("first")


def test_closing_closes_every_sink_and_raises_the_first_failure() -> None:
    failing = [_Failing(), _Failing()]
    with pytest.raises(OutputError, match="first"):
        Sinks(failing).close()
    assert all(sink.closed for sink in failing)


@pytest.mark.skipif(importlib.util.find_spec("wandb") is not None, reason="the extra is installed")
def test_wandb_without_its_extra_says_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(JobFileError, match=r'logging.wandb needs .* wandb.* pip install "rljob\[wandb\]"'):
        WandbSink(tmp_path, project="p", name="n")


@pytest.mark.skipif(importlib.util.find_spec("mlflow") is not None, reason="the extra is installed")
def test_mlflow_without_its_extra_says_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(JobFileError, match=r'logging.mlflow needs .* mlflow.* pip install "rljob\[mlflow\]"'):
        MlflowSink(tmp_path, experiment="e", name="n")


def test_a_job_without_trackers_opens_none(tmp_path: Path) -> None:
    assert open_trackers(Logging(), tmp_path, name="n", config={}) == []


@pytest.mark.skipif(importlib.util.find_spec("wandb") is not None, reason="the extra is installed")
def test_a_tracker_that_a_job_asks_for_is_opened(tmp_path: Path) -> None:
    with pytest.raises(JobFileError, match=r"logging\.wandb needs"):
        open_trackers(Logging(wandb=Wandb(project="p")), tmp_path, name="n", config={})


def test_a_job_becomes_flat_parameters() -> None:
    tree = {"spec": {"batch": {"groups": 8}, "kl": None, "stop": [1]}, "kind": "RLJob"}
    assert _flat(tree) == {"spec.batch.groups": 8, "spec.stop": [1], "kind": "RLJob"}


def test_wandb_offline_continues_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    ids = []
    for resume in (False, True):
        sink = WandbSink(tmp_path, project="p", name="n", tags=("a",), config={"x": 1}, resume=resume)
        sink.step(1, {"reward/mean": 1.0, "actor/grad_norm": math.nan})
        sink.samples(1, [ROW])
        sink.close()
        sink.step(2, {"reward/mean": 1.0})
        ids.append((tmp_path / "wandb/run-id").read_text())
    assert ids[0] == ids[1]
    assert list((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))


def test_mlflow_writes_into_a_folder_and_continues_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = (tmp_path / "store").as_uri()
    for step, resume in ((1, False), (2, True)):
        sink = MlflowSink(
            tmp_path / "run", experiment="e", name="n", tracking_uri=uri, parameters={"preset": "grpo"}, resume=resume
        )
        sink.step(step, {"reward/mean": step / 2, "validation/gsm8k/mean@8": 1.0, "actor/grad_norm": math.nan})
        sink.samples(step, [ROW])
        sink.close()
    client = mlflow.MlflowClient(tracking_uri=uri)
    run_id = (tmp_path / "run/mlflow-run-id").read_text().strip()
    history = client.get_metric_history(run_id, "reward/mean")
    assert [(m.step, m.value) for m in history] == [(1, 0.5), (2, 1.0)]
    run = client.get_run(run_id)
    assert run.data.params == {"preset": "grpo"}
    assert "validation/gsm8k/mean_at_8" in run.data.metrics
    assert run.info.status == "FINISHED"


def test_a_tracker_that_is_lost_is_reported_once_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    store, told = tmp_path / "store", []
    sink = MlflowSink(tmp_path, experiment="e", name="n", tracking_uri=store.as_uri(), warn=told.append)
    store.rename(tmp_path / "gone")
    store.write_text("not a folder any more")
    for step in (1, 2, 3):
        sink.step(step, {"reward/mean": 1.0})
    sink.close()
    assert len(told) == 1
    assert "the run continues" in told[0]
