"""Errors in the format of OpenAI's API."""

from __future__ import annotations

from typing import Any

from lemma.core.errors import UserError

KINDS = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error",
    500: "server_error", 503: "server_error",
}  # fmt: skip


class ApiError(Exception):
    """One sentence with an HTTP status; `param` names the field at fault, `code` the kind of error for programs."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    @classmethod
    def of(cls, error: UserError, status: int = 400) -> ApiError:
        return cls(status, str(error))

    def as_dict(self) -> dict[str, Any]:
        kind = KINDS.get(self.status, "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}
