"""Experiment trackers in the network: Weights & Biases and MLflow, both optional extras, imported when asked for.

A tracker that fails at the start is an error (the job asked for it); one that fails later is reported once through
``warn`` and left alone, because losing a curve is better than losing a run. What is written stays in
``metrics.jsonl`` in any case.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from rljob_trainer.errors import JobFileError, OutputError
from rljob_trainer.telemetry.run_folder import SampleRow

if TYPE_CHECKING:
    from rljob_api.spec.lifecycle import Logging
    from rljob_trainer.telemetry.sinks import Sink

Warn = Callable[[str], None]


def open_trackers(
    logging: Logging,
    folder: Path,
    *,
    name: str,
    config: Mapping[str, Any],
    resume: bool = False,
    warn: Warn = print,
) -> list[Sink]:
    """The trackers that a job's ``logging`` asks for, none by default. ``config`` is the job as the file has it; values
    of environment variables, which may be keys and passwords, are not sent.

    Raises ``JobFileError`` when an extra is not installed, ``OutputError`` when a tracker cannot be reached.
    """
    trackers: list[Sink] = []
    config = without_env_values(config)
    if logging.wandb is not None:
        asked = logging.wandb
        trackers.append(
            WandbSink(
                folder,
                project=asked.project,
                name=asked.name or name,
                entity=asked.entity,
                tags=asked.tags,
                config=config,
                resume=resume,
                warn=warn,
            )
        )
    if logging.mlflow is not None:
        trackers.append(
            MlflowSink(
                folder,
                experiment=logging.mlflow.experiment,
                name=name,
                tracking_uri=logging.mlflow.tracking_uri,
                parameters=_flat(config),
                resume=resume,
                warn=warn,
            )
        )
    return trackers


def without_env_values(tree: Any) -> Any:
    """A job's document in which variables of every ``env`` (a map, or a list of names and values) have no values."""
    if isinstance(tree, Mapping):
        return {key: _names_of(entry) if key == "env" else without_env_values(entry) for key, entry in tree.items()}
    return [without_env_values(entry) for entry in tree] if isinstance(tree, list | tuple) else tree


def _names_of(env: Any) -> list[str]:
    return [str(entry["name"]) if isinstance(entry, Mapping) else str(entry) for entry in env or ()]


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """``{"spec": {"batch": {"groups": 8}}}`` as ``{"spec.batch.groups": 8}``: MLflow's parameters have no depth."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        elif value is not None:
            flat[f"{prefix}{key}"] = value
    return flat


def _load(module: str, *, field: str, extra: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as problem:
        raise JobFileError(
            f"logging.{field} needs the Python package {problem.name}, which is not installed; "
            f'run: pip install "rljob[{extra}]"; or remove logging.{field} from the job'
        ) from problem


def _numbers(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


class WandbSink:
    """Weights & Biases. The key comes from the environment; ``WANDB_MODE=offline`` writes into the folder only.

    The run's id is kept in ``folder``, so that a resumed job continues the same curves.
    """

    def __init__(
        self,
        folder: Path,
        *,
        project: str,
        name: str,
        entity: str | None = None,
        tags: Sequence[str] = (),
        config: Mapping[str, Any] | None = None,
        resume: bool = False,
        warn: Warn = print,
    ) -> None:
        self._wandb = _load("wandb", field="wandb", extra="wandb")
        self._warn = warn
        self._alive = True
        id_file = folder / "wandb" / "run-id"
        known = id_file.read_text().strip() if resume and id_file.exists() else None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._run = self._wandb.init(
                project=project,
                entity=entity,
                name=name,
                tags=list(tags) or None,
                config=dict(config or {}),
                dir=str(folder),
                id=known,
                resume="allow" if known else None,
                settings=self._wandb.Settings(silent=True, console="off"),
            )
            id_file.parent.mkdir(parents=True, exist_ok=True)
            id_file.write_text(f"{self._run.id}\n")
        except (self._wandb.Error, OSError) as problem:
            raise OutputError(
                f"logging.wandb: cannot start the run {name!r} in {project!r}: {problem}; "
                "set WANDB_API_KEY, or WANDB_MODE=offline to write files only"
            ) from problem

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._send(lambda: self._run.log(_numbers(metrics), step=step))

    def samples(self, step: int, rows: Sequence[SampleRow]) -> None:
        columns = ["source", "prompt", "response", "answer", "score", "finish"]
        table = self._wandb.Table(columns=columns, data=[[getattr(row, c) for c in columns] for row in rows])
        self._send(lambda: self._run.log({"samples": table}, step=step))

    def _send(self, call: Callable[[], object]) -> None:
        if not self._alive:
            return
        try:
            call()
        except Exception as problem:  # noqa: BLE001  (whatever a tracker raises must not end the run; it is told once)
            self._alive = False
            self._warn(f"W&B no longer accepts metrics ({problem}); the run continues, see metrics.jsonl")

    def close(self) -> None:
        self._alive, alive = False, self._alive
        if alive:
            self._run.finish()


class MlflowSink:
    """MLflow. ``tracking_uri`` defaults to the environment's MLFLOW_TRACKING_URI; a folder works too.

    The run's id is kept in ``folder``, so that a resumed job continues the same curves.
    """

    _NAME_LIMIT = 250  # of MLflow, for parameters and metrics

    def __init__(
        self,
        folder: Path,
        *,
        experiment: str,
        name: str,
        tracking_uri: str | None = None,
        parameters: Mapping[str, Any] | None = None,
        resume: bool = False,
        warn: Warn = print,
    ) -> None:
        self._mlflow = _load("mlflow", field="mlflow", extra="mlflow")
        self._warn = warn
        self._alive = True
        id_file = folder / "mlflow-run-id"
        known = id_file.read_text().strip() if resume and id_file.exists() else None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._client = self._mlflow.MlflowClient(tracking_uri=tracking_uri)
            self._run_id: str = known or self._create_run(experiment, name, parameters or {})
            id_file.write_text(f"{self._run_id}\n")
        except (self._mlflow.exceptions.MlflowException, OSError) as problem:
            raise OutputError(
                f"logging.mlflow: cannot start the run {name!r} in experiment {experiment!r}: {problem}; "
                "check logging.mlflow.trackingUri or MLFLOW_TRACKING_URI"
            ) from problem

    def _create_run(self, experiment: str, name: str, parameters: Mapping[str, Any]) -> str:
        found = self._client.get_experiment_by_name(experiment)
        experiment_id = found.experiment_id if found else self._client.create_experiment(experiment)
        run_id: str = self._client.create_run(experiment_id, run_name=name).info.run_id
        for key, value in parameters.items():
            self._client.log_param(run_id, key[: self._NAME_LIMIT], str(value)[: self._NAME_LIMIT])
        return run_id

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        # MLflow does not allow the @ of mean@8 in names.
        entries = [(name.replace("@", "_at_"), value) for name, value in _numbers(metrics).items()]
        self._send(lambda: self._log(step, entries))

    def _log(self, step: int, entries: Sequence[tuple[str, float]]) -> None:
        from mlflow.entities import Metric
        from mlflow.utils.time import get_current_time_millis

        now = get_current_time_millis()
        self._client.log_batch(self._run_id, metrics=[Metric(name, value, now, step) for name, value in entries])

    def samples(self, step: int, rows: Sequence[SampleRow]) -> None:
        table = {"rows": [asdict(row) for row in rows]}
        self._send(lambda: self._client.log_dict(self._run_id, table, f"samples/step-{step:06d}.json"))

    def _send(self, call: Callable[[], object]) -> None:
        if not self._alive:
            return
        try:
            call()
        except Exception as problem:  # noqa: BLE001  (whatever a tracker raises must not end the run; it is told once)
            self._alive = False
            self._warn(f"MLflow no longer accepts metrics ({problem}); the run continues, see metrics.jsonl")

    def close(self) -> None:
        if self._alive:
            self._send(lambda: self._client.set_terminated(self._run_id))
        self._alive = False
