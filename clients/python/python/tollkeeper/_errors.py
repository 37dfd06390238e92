"""The error of this package."""

from __future__ import annotations

from typing import Optional


class TollkeeperError(Exception):
    """Invalid input, an invalid config, or an operation that failed. A refusal is a decision, not an error.

    >>> raise TollkeeperError("invalid_cost", "the cost must be a whole number from 1 to 2147483648", "cost")
    Traceback (most recent call last):
    tollkeeper._errors.TollkeeperError: invalid_cost: the cost must be a whole number from 1 to 2147483648 (at cost)
    """

    #: A code of the HTTP API such as ``invalid_fact``, or ``invalid_config``, ``unavailable``, ``closed``.
    code: str
    #: What is wrong, and what would be right.
    message: str
    #: The field that the error is about, such as ``facts.user``.
    where: Optional[str]

    def __init__(self, code: str, message: str, where: Optional[str] = None) -> None:
        super().__init__(code, message, where)
        self.code = code
        self.message = message
        self.where = where

    def __str__(self) -> str:
        at = f" (at {self.where})" if self.where else ""
        return f"{self.code}: {self.message}{at}"
