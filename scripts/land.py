"""What CI will do with HEAD (`make land`): `.ci/run` in a clean clone beside this checkout, in the background.

It prints where its log is; `make land` again says where it stands, and `make land ANEW=1` tries a commit that has its
verdict once more. The verdict is the last line of the log and stands in `~/.cache/rljob/land/COMMIT`, whose first word
is green or red. Then the run is also a line of `benchmarks/ci/runs.jsonl`, and what it has forgiven stands in
`tests/unsteady.yaml`, both to be committed.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))

import again  # noqa: E402
import unsteady  # noqa: E402

RUNS = ROOT / "benchmarks" / "ci" / "runs.jsonl"


class Landing:
    """Of one commit: where everything of it lies."""

    def __init__(self, commit: str) -> None:
        folder = Path.home() / ".cache" / "rljob" / "land"
        self.commit, self.verdict = commit, folder / commit
        self.log, self.process = folder / f"{commit}.log", folder / f"{commit}.pid"
        self.forgiven, self.line = folder / f"{commit}.unsteady", folder / f"{commit}.line"
        self.clone = ROOT.parent / f"land-{commit[:8]}"
        folder.mkdir(parents=True, exist_ok=True)

    def runs(self) -> bool:
        """Whether the process that began it is still there, and is it."""
        with suppress(OSError, ValueError):
            return self.commit in Path(f"/proc/{int(self.process.read_text())}/cmdline").read_text()
        return False

    def stands_at(self) -> str:
        """The command that its log shows last."""
        commands = [line for line in self.log.read_text(errors="replace").splitlines() if line.startswith(".venv/bin/")]
        return commands[-1] if commands else "beginning"

    def begin(self) -> None:
        for path in (self.clone, self.forgiven):
            shutil.rmtree(path, ignore_errors=True)
        subprocess.run(["git", "clone", "--quiet", ROOT, self.clone], check=True)
        subprocess.run(["git", "checkout", "--quiet", "--detach", self.commit], cwd=self.clone, check=True)
        with self.log.open("w") as log:
            command = [sys.executable, __file__, self.commit]
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        self.process.write_text(str(process.pid))
        self.verdict.unlink(missing_ok=True)

    def run(self) -> None:
        """What happens in the background."""
        began = time.monotonic()
        environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
        environment |= {again.FOLDER: str(self.forgiven), "RLJOB_CI_LINE": str(self.line)}
        code = subprocess.run([".ci/run"], cwd=self.clone, env=environment).returncode
        if self.line.exists():
            self._keep(code)
        word = "red" if code else "green"
        verdict = f"{word}: {self.commit}, exit code {code}, {time.monotonic() - began:.0f} s; {self.log}\n"
        print(verdict, end="", flush=True)
        self.verdict.write_text(verdict)
        shutil.rmtree(self.clone, ignore_errors=True)
        self.process.unlink()

    def _keep(self, code: int) -> None:
        """Enters the run, and what it has forgiven."""
        RUNS.parent.mkdir(parents=True, exist_ok=True)
        with RUNS.open("a") as file:
            file.write(json.dumps({"code": code} | json.loads(self.line.read_text())) + "\n")
        self.line.unlink()
        for each in again.read(self.forgiven):
            unsteady.write(unsteady.forgiven(unsteady.read(), each.test, each.error, date.today()))


def main() -> None:
    if sys.argv[1:] not in ([], ["--anew"]):
        Landing(sys.argv[1]).run()
        return
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    changed = subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True, check=True)
    landing = Landing(head.stdout.strip())
    if landing.verdict.exists() and not sys.argv[1:]:
        print(landing.verdict.read_text(), end="")
    elif landing.runs():
        print(f"under way, see {landing.log}: {landing.stands_at()}")
    else:
        if changed.stdout:
            print("not committed, so not tried:", *changed.stdout.splitlines(), sep="\n")
        landing.begin()
        print(f"{landing.commit} in {landing.clone}; log {landing.log}")
        print(f"to end it: kill -- -{shlex.quote(landing.process.read_text())}")


if __name__ == "__main__":
    main()
