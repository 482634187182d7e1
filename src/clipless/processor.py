"""Which processor this is, as Linux reports it. Virtual machines give all processors of a maker one name, not one number."""

from functools import cache
from pathlib import Path
from typing import NamedTuple

AMD = "AuthenticAMD"


class Processor(NamedTuple):
    """The maker and its numbers of the family and the model."""

    vendor: str
    family: int
    model: int


def cpuinfo() -> str:
    """What Linux reports about its processors; nothing elsewhere."""
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return ""


def processor_of(cpuinfo: str) -> Processor | None:
    """The first processor of a report; None if it has no numbers, as on ARM.

    >>> processor_of("vendor_id : AuthenticAMD\\ncpu family : 26\\nmodel : 2\\n")
    Processor(vendor='AuthenticAMD', family=26, model=2)
    """
    first = cpuinfo.partition("\n\n")[0]
    found = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in first.splitlines())}
    try:
        return Processor(found["vendor_id"], int(found["cpu family"]), int(found["model"]))
    except (KeyError, ValueError):
        return None


@cache
def processor() -> Processor | None:
    """This machine's processor."""
    return processor_of(cpuinfo())
