"""The one error that a request can end in on purpose."""

from __future__ import annotations


class RequestError(Exception):
    """A request that cannot be answered.

    Attributes:
        status: The HTTP status code, 400 or 404.
        message: What was expected, what came, what to do.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
