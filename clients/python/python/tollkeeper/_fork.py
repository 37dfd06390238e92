"""A lock that a forked process can take, whatever the other threads of its parent did."""

from __future__ import annotations

import os
import threading
import weakref
from types import TracebackType
from typing import Optional, Type


class ForkSafeLock:
    """A lock that is free after a fork: the thread that held it does not exist in the child."""

    _all: "weakref.WeakSet[ForkSafeLock]" = weakref.WeakSet()

    def __init__(self) -> None:
        self._lock = threading.Lock()
        ForkSafeLock._all.add(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(
        self, kind: Optional[Type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        self._lock.release()


def _free() -> None:
    for lock in list(ForkSafeLock._all):
        lock._lock = threading.Lock()


os.register_at_fork(after_in_child=_free)
