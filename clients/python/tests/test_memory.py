"""Resident memory stays flat, over a million checks here and ten million in `make soak`."""

import os
import resource
from pathlib import Path

from tollkeeper import Limiter

CHECKS = int(os.environ.get("TOLLKEEPER_CHECKS", "1000000"))


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_resident_memory_is_flat() -> None:
    limits = [{"name": "per-user", "by": "user", "rate": "1000/s", "burst": 1000}]
    limiter = Limiter(limits=limits, memory={"max_keys": 1000})
    facts = [{"user": f"user-{number}", "admin": True, "n": number} for number in range(5_000)]

    def run(checks: int) -> None:
        for turn in range(checks):
            decision = limiter.check(facts[turn % 5_000])
            if turn % 100 == 0:
                assert decision.limits and limiter.headers(decision) and limiter.usage(facts[0])

    run(CHECKS // 5)
    before = resident()
    run(CHECKS)
    assert resident() < before * 1.05 + 1_000_000
