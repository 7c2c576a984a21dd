"""Debian packages, unpacked without being installed: installing etcd or containerd would start a service."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from testcluster.commands import CommandFailedError, fetch, run


def unpack(packages: Sequence[str], to: Path) -> list[str]:
    """Downloads the packages and unpacks them over each other into a folder.

    Returns:
        The control file of each.

    Raises:
        CommandFailedError: there is no apt-get, or it doesn't have one of them.
    """
    with tempfile.TemporaryDirectory() as downloads:
        # apt's unprivileged downloader must be able to write here.
        os.chmod(downloads, 0o777)
        try:
            run(["apt-get", "download", *packages], Path(downloads))
        except CommandFailedError:
            fetch(["apt-get", "update"])
            fetch(["apt-get", "download", *packages], Path(downloads))
        controls: list[str] = []
        for archive in sorted(Path(downloads).glob("*.deb")):
            controls.append(run(["dpkg-deb", "--field", str(archive)]))
            # As `dpkg -x`, but a folder that is a link (/bin -> /usr/bin) stays one.
            with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", str(archive)], stdout=subprocess.PIPE) as package:
                unpacking = ["tar", "-x", "--keep-directory-symlink", "-C", str(to)]
                done = subprocess.run(unpacking, stdin=package.stdout, capture_output=True, text=True)
            if done.returncode or package.returncode:
                raise CommandFailedError(f"{archive.name} can't be unpacked: {done.stderr.strip()}")
    return controls
