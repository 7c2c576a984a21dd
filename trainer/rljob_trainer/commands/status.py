"""Shows what a run is waiting for now, and where its last ten minutes went.

Pass the run's output folder, or the address of its status service (`rljob run --status-port`, `rljob drive`).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from pydantic import ValidationError

from rljob_api.status import STATUS_PATH, DriverStatus, ReplicaStatus
from rljob_trainer.checkpoints.finding import holds_checkpoints
from rljob_trainer.errors import RLJobError
from rljob_trainer.record.output import is_held
from rljob_trainer.telemetry import run_folder
from rljob_trainer.telemetry.figures import duration, percent

_ANSWER_SECONDS = 10.0
_LARGEST_ANSWER = 4 << 20
_LATE_SECONDS = 30.0
"""A run writes its status every few seconds; one that is older than this is suspicious."""


class NoStatusError(RLJobError):
    """There is nothing to be read."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="DIR|URL", help="output folder, or address such as http://127.0.0.1:8470")
    parser.add_argument("--token-file", type=Path, metavar="FILE", help="token of the status service")
    parser.add_argument("--json", action="store_true", help="print the whole status as JSON")


def run(args: argparse.Namespace) -> int:
    where: str = args.run
    remote = where.startswith(("http://", "https://"))
    text = _from_service(where, args.token_file) if remote else _from_folder(Path(where))
    try:
        status = DriverStatus.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        field = ".".join(map(str, first["loc"]))
        raise NoStatusError(
            f"{where if remote else Path(where) / run_folder.STATUS} is not the status of a run "
            f"({f'{field}: ' if field else ''}{first['msg']}): it is truncated or was written by another program; an "
            "active run rewrites it every few seconds"
        ) from error
    if args.json:
        json.dump(status.model_dump(mode="json", by_alias=True, exclude_none=True), sys.stdout, indent=1)
        print()
    else:
        onwards = None if remote or is_held(Path(where)) is not False else _onwards(status, Path(where))
        print("\n".join(lines(status, datetime.now(UTC), gone=onwards)))
    return 0


def _onwards(status: DriverStatus, folder: Path) -> str:
    """What the same command does after the run's process has gone. The status may be older than the last checkpoint."""
    # A folder other than the run's own is what the run started from.
    in_a_bucket = status.checkpoint is not None and "://" in status.checkpoint.uri
    saved = in_a_bucket or holds_checkpoints(folder)
    return "continues the run" if saved else "starts over, because there is no checkpoint"


def lines(status: DriverStatus, now: datetime, *, gone: str | None = None) -> Iterator[str]:
    """What is printed: one sentence for the trainer and for each engine, and the shares of time. ``gone``: the run's
    process is no more, and this is what the same command does."""
    gone = gone if status.end is None else None
    total = f" of {status.total_steps}" if status.total_steps else ""
    left = status.seconds_left(now)
    facts = [f"step {status.step}{total}", f"version {status.version}", f"attempt {status.attempt}"]
    if status.rewards.mean is not None:
        facts.append(f"reward {status.rewards.mean:.3f}")
    if status.ages is not None:
        facts.append(f"maximum age {status.ages.max} of {status.ages.bound}")
    if left is not None and status.end is None and not gone:
        facts.append(f"{duration(left)} left")
    yield ", ".join(facts)
    age = (now - status.time).total_seconds()
    if gone:
        yield f"the run's process is gone: it was killed, or its machine went down; the same command {gone}"
        yield f"its last status, {duration(age)} ago: {status.doing}"
    elif status.end is None and age > _LATE_SECONDS:
        yield f"the last status is {duration(age)} old: the run was killed, or its machine is overloaded"
    if not gone:
        yield status.doing
    if status.end is None and not gone:
        yield from (_engine(engine) for engine in status.pools.rollout.engines)
        for what, pool in (("reward model", status.pools.reward_model), ("engine", status.pools.judge)):
            yield from (_scorer(what, replica) for replica in (() if pool is None else pool.replicas))
        for wait in status.beside:
            yield f"{wait.who} waits for {wait.reason} ({duration((status.time - wait.since).total_seconds())} so far)"
    if status.shares:
        yield "last 10 minutes: " + ", ".join(
            f"{stage.replace('_', ' ')} {percent(share)}" for stage, share in status.shares.items()
        )
    if status.throughput is not None:
        yield f"engines without a request: {percent(status.throughput.rollout_idle)} of the time"
    if status.mismatch:
        yield f"the log-probs of engines and trainer differ too much: {status.mismatch}"
    if status.unsaved:
        yield f"the newest checkpoint could not be written: {status.unsaved}"
    if status.advice:
        yield f"advice: {status.advice}"
    if status.checkpoint is not None:
        yield f"last checkpoint: step {status.checkpoint.step}, {status.checkpoint.uri}"


def _engine(engine: ReplicaStatus) -> str:
    place = f" in {engine.pod}" if engine.pod else ""
    return f"engine {engine.name}{place}: {engine.state}" + (f", {engine.doing}" if engine.doing else "")


def _scorer(what: str, replica: ReplicaStatus) -> str:
    place = f" in {replica.pod}" if replica.pod else ""
    return f"{what} {replica.name}{place}: {replica.state}" + (f", {replica.doing}" if replica.doing else "")


def _from_folder(folder: Path) -> str:
    try:
        return (folder / run_folder.STATUS).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise NoStatusError(
            f"{folder / run_folder.STATUS} cannot be read ({reason}); check that {folder} is the output folder of a run"
        ) from error


def _from_service(address: str, token_file: Path | None) -> str:
    import http.client
    import urllib.error
    import urllib.request

    request = urllib.request.Request(address.rstrip("/").removesuffix(STATUS_PATH) + STATUS_PATH)
    if token_file is not None:
        try:
            token = token_file.read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise NoStatusError(f"cannot read the token from {token_file}: {error}; check --token-file") from error
        request.add_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(request, timeout=_ANSWER_SECONDS) as answer:
            return str(answer.read(_LARGEST_ANSWER).decode())
    except urllib.error.HTTPError as error:
        hint = "; pass --token-file" if error.code == 401 else ""
        raise NoStatusError(f"{address} answers {error.code} {error.reason}{hint}") from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise NoStatusError(f"{address} does not answer ({error}); check that the run is still active") from error
