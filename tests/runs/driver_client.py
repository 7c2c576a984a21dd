"""Calls the HTTP interface of a driver on this machine."""

from __future__ import annotations

import urllib.request
from typing import Any

from rljob_api.status import Desired, DriverStatus

TOKEN = "a-token-of-the-test"


class Client:
    """Calls one driver with the token."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.address = f"http://127.0.0.1:{port}"

    def call(self, path: str, method: str = "GET", body: bytes | None = None) -> str:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        request = urllib.request.Request(self.address + path, body, headers, method=method)
        with urllib.request.urlopen(request, timeout=20) as answer:
            return str(answer.read().decode())

    def status(self) -> DriverStatus:
        return DriverStatus.model_validate_json(self.call("/v1/status"))

    def answers(self) -> bool:
        try:
            return bool(self.call("/v1/status"))
        except OSError:
            return False

    def tell(self, **desired: Any) -> DriverStatus:
        body = Desired(**desired).model_dump_json(by_alias=True, exclude_none=True).encode()
        return DriverStatus.model_validate_json(self.call("/v1/desired", "PUT", body))
