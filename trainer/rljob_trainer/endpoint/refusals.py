"""What the endpoint does not do, in the form in which OpenAI's API says so."""

from __future__ import annotations

from typing import Any

INVALID = "invalid_request_error"


class RefusedError(Exception):
    """A request that is not answered by the model. Clients see the ``status`` and ``body``."""

    def __init__(
        self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None, kind: str = INVALID
    ) -> None:
        """``param`` is the field of the body that is wrong, ``code`` a word for programs, ``kind`` the error's type."""
        super().__init__(message)
        self.status = status
        self.code = code
        self.body: dict[str, Any] = {"error": {"message": message, "type": kind, "param": param, "code": code}}


def unsupported(param: str, message: str) -> RefusedError:
    """A parameter, or a value of one, that has no meaning here and is not passed over in silence."""
    return RefusedError(message, param=param, code="unsupported_value")


def invalid(param: str, message: str) -> RefusedError:
    """A field that is not what the API says it is."""
    return RefusedError(message, param=param, code="invalid_value")
