"""Where a job's state lies: in its output folder, or in a bucket.

A folder (on a volume that all nodes mount, or on the one machine there is) is written in place. A bucket knows neither
renames nor locks nor appending, so the run works in a local folder and

- a checkpoint goes up as it is made: each rank writes its own shards, the driver its part, and ``manifest.json`` last
  (``checkpoints/bucket.py``). A checkpoint is one that has a manifest; its objects are compared with what it lists;
- ``attempt.json`` is one object, read and written there (``record/fence.py``);
- the run's own files (metrics, report, samples, logs) are copied once a minute and before each checkpoint becomes one,
  and brought back where the next attempt starts (``copies.py``);
- the model is copied once, and each node that has not got it takes it from there (``models/nodes.py``).

    s3://BUCKET/PATH/NAMESPACE/NAME-UID/
      attempt.json  job.yaml  metrics.jsonl  summary.json  report.html ...
      start/
      checkpoints/step-00000020-1f6c09ab/manifest.json ...

Addresses and credentials are fsspec's business (``AWS_ACCESS_KEY_ID``, ``AWS_ENDPOINT_URL`` ... for ``s3://``).
"""

from __future__ import annotations


def is_address(place: object) -> bool:
    """Whether a place is an address in a store (``s3://bucket/path``) and not a path of this machine."""
    return "://" in str(place)
