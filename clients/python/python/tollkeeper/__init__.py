"""Rate limiting with Tollkeeper: the engine in this process, or a client of a server, behind one class.

>>> from tollkeeper import Limiter
>>> limiter = Limiter(limits=[{"name": "per-user", "by": "user", "rate": "100/min", "burst": 20}])
>>> if not limiter.check({"user": "alice"}): ...
"""

from ._decision import Decision, LimitState
from ._errors import TollkeeperError
from ._limiter import Acquiring, AsyncHeld, AsyncLimiter, Held, Limiter
from ._wire import Facts

__all__ = [
    "Acquiring",
    "AsyncHeld",
    "AsyncLimiter",
    "Decision",
    "Facts",
    "Held",
    "LimitState",
    "Limiter",
    "TollkeeperError",
]
