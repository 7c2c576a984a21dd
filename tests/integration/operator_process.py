"""Operators as processes of their own, as a Deployment runs them: for tests that kill them and figures about them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from kube.control_plane import ControlPlane, die_with_parent


class OperatorProcess:
    """`python -m rljob_operator` (or another module), alive until killed or stopped. Its log lies beside its key.

    Start it from the main thread: it ends with the thread that started it.
    """

    def __init__(
        self,
        plane: ControlPlane,
        folder: Path,
        name: str,
        arguments: Sequence[str],
        module: str = "",
    ) -> None:
        key = folder / "key"
        key.write_text("k" * 64)
        self.log = folder / f"{name}.log"
        environment = {**os.environ, "KUBECONFIG": str(plane.kubeconfig), "HOME": str(folder)}
        own = ["rljob_operator", f"--key-file={key}"]
        command = [sys.executable, "-m", *([module] if module else own), *arguments]
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        """kill -9: nothing is given back."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(10)

    def stop(self) -> None:
        """SIGTERM, as when a pod is deleted."""
        if self.alive:
            self._process.terminate()
            try:
                self._process.wait(15)
            except subprocess.TimeoutExpired:
                self.kill()
