"""What the chart renders with some sets of values, committed as it is: a change of the chart shows what it changes.

`make snapshots` renews the files in `snapshots/`. The CRD is left out (it has its own drift test).
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from testcluster.programs import find

CHART = Path(__file__).parents[2] / "charts" / "rljob-operator"
FOLDER = Path(__file__).parent / "snapshots"
DIGEST = "sha256:" + "0123456789abcdef" * 4

SETS: dict[str, tuple[str, ...]] = {
    "default": (),
    "namespaces": ("--set=watchNamespaces={team-a,team-b}", "--set=replicaCount=1"),
    "everything": (
        f"--set=image.digest={DIGEST}",
        "--set=imagePullSecrets[0].name=pull",
        "--set=tokenKey.existingSecret=mine",
        "--set=serviceAccount.name=mine",
        "--set=serviceAccount.annotations.team=rl",
        "--set=podLabels.team=rl",
        "--set=podAnnotations.note=seen",
        "--set-string=extraEnv[0].name=A,extraEnv[0].value=1",
        "--set=nodeSelector.pool=system",
        '--set-json=tolerations=[{"key":"system","operator":"Exists"}]',
        '--set-json=affinity={"nodeAffinity":{}}',
        "--set=priorityClassName=high",
        "--set=networkPolicy.enabled=true",
        '--set-json=networkPolicy.extraEgress=[{"ports":[{"port":16443}]}]',
        '--set-json=trainingNetworkPolicy.extraIngress=[{"ports":[{"port":8080}]}]',
        "--set=metrics.serviceMonitor.enabled=true",
        "--set=metrics.serviceMonitor.labels.release=prometheus",
        '--set-json=metrics.readers=[{"kind":"ServiceAccount","name":"prometheus-k8s","namespace":"monitoring"}]',
        "--set=metrics.rules.enabled=true",
        "--set=metrics.rules.quotaWait=2h",
        "--set=metrics.dashboard.enabled=true",
        "--set=metrics.dashboard.annotations.grafana_folder=rljob",
    ),
    "least": (
        "--set=trainingNetworkPolicy.enabled=false",
        "--set=metrics.authorization=false",
        "--set=podDisruptionBudget.enabled=false",
        "--set=replicaCount=1",
        "--set=tokenKey.existingSecret=mine",
        "--set=nameOverride=jobs",
        "--set=serviceAccount.create=false,serviceAccount.name=mine",
        "--set=podSecurityContext=null,securityContext=null",
    ),
}
"""Names of the snapshots, and the values that each is rendered with."""


def rendered(helm: Path, name: str) -> str:
    """The chart with one set of values."""
    command = [str(helm), "template", "rl", str(CHART), "--namespace", "ops", "--set=crds.enabled=false", *SETS[name]]
    text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    # The dashboard is a file of the chart, with tests of its own.
    return re.sub(r"(rljob\.json: \|-\n)( {4}.*\n)+", r"\1    (files/dashboard.json)\n", text)


def main() -> int:
    helm = find(build=False, helm=True).path("helm")
    FOLDER.mkdir(exist_ok=True)
    for old in FOLDER.glob("*.yaml"):
        old.unlink()
    for name in SETS:
        (FOLDER / f"{name}.yaml").write_text(rendered(helm, name))
    return 0


if __name__ == "__main__":
    sys.exit(main())
