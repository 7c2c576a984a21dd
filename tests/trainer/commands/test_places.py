"""Where a job's state is kept on one machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from rljob_api import RLJob, resolve
from rljob_api.loading import load_jobs
from rljob_trainer.commands.places import on_this_machine

JOB = Path(__file__).parents[3] / "examples" / "quickstart.yaml"


def job_with(uri: str | None) -> RLJob:
    (job,) = load_jobs(JOB, [] if uri is None else [f"checkpoint.uri={uri}"])
    return resolve(job)


@pytest.mark.parametrize(
    ("uri", "asked", "output", "state"),
    [
        (None, None, "runs/quickstart", None),
        (None, "here", "here", None),
        ("pvc://claim/x", None, "runs/quickstart", None),
        ("kept", None, "base/kept/default/quickstart-local", None),
        ("/abs/kept", None, "/abs/kept/default/quickstart-local", None),
        ("/abs/kept", "here", "here", None),
        ("s3://bucket/x/", None, "runs/quickstart", "s3://bucket/x/default/quickstart-local"),
        ("s3://bucket", "here", "here", "s3://bucket/default/quickstart-local"),
    ],
)
def test_state_is_where_the_user_says_or_where_the_job_file_says(
    uri: str | None, asked: str | None, output: str, state: str | None
) -> None:
    places = on_this_machine(job_with(uri), None if asked is None else Path(asked), Path("base"))
    assert (places.output, places.state) == (Path(output), state)
    assert places.kept == (state or output)
