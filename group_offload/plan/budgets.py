"""Amounts of memory: the budgets that a user gives (`vram_budget=`, `ram_budget=`), and the RAM of the machine."""

from __future__ import annotations

import logging
import re
from decimal import Decimal
from functools import lru_cache
from numbers import Integral, Real
from typing import Any, Literal

from ..base.ram import available_ram, memory_limits
from ..base.system import ram_of_machine
from ..base.text import describe_bytes as describe_bytes
from ..errors import ConfigError

logger = logging.getLogger("group_offload")

_UNITS = {
    "": 1,
    "b": 1,
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", 1)},
    **{f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", 1)},
}
_NUMBER = re.compile(r"([0-9]{1,30}(?:\.[0-9]{0,30})?|\.[0-9]{1,30})\s*(%|[a-z]*)", re.IGNORECASE)
_LEAST_PLAIN_BYTES = 1024
_MIN_RESERVE_BYTES = 1 << 30
_RESERVED_SHARE = 0.1


Budget = int | Literal["auto"]
"""Bytes, or as many as there is room for."""


class Default(str):
    """A budget that nobody gave: another option, or a device that cannot have it, comes first."""


def parse_budget(value: Any, name: str, total: int) -> Budget | None:
    """Read a budget as users write it.

    `2 * 2**30`, `"8GiB"` (1024**3 bytes each), `"8 GB"` (1000**3), `"512MiB"`, `"80%"` of `total`, `"auto"`. Capital
    letters make no difference. `"8G"` is refused: it is 8 GiB to some programs and 8 GB to others.

    Args:
        name: the name of the option, for errors.
        total: the bytes of the device's memory, or of the RAM. A larger budget is cut down to it, with a warning.

    Returns:
        Bytes, at least 1; "auto"; or None if `value` is None, which is no budget.

    Raises:
        ConfigError: `value` is none of these.
    """
    if value is None:
        return None
    if isinstance(value, str) and value.strip().lower() == "auto":
        return "auto"

    num_bytes = _parsed(value, name, total, "bytes, '8GiB', '8GB', '80%' or 'auto'")
    if num_bytes > total:
        _warn_of_less(name, f"{value!r:.80}", total)
    return min(num_bytes, total)


@lru_cache(maxsize=64)  # so once, and not for each model of a pipeline
def _warn_of_less(name: str, value: str, total: int) -> None:
    what, there = "host" if name == "ram_budget" else "device", describe_bytes(total, digits=4)
    logger.warning("%s=%s exceeds the %s's %s; using %s.", name, value, what, there, there)


def is_budget(text: str) -> bool:
    """Whether `text` is a budget with a unit, or "auto"."""
    found = _NUMBER.fullmatch(text.strip())
    return text.strip().lower() == "auto" or (found is not None and bool(found[2]))


def parse_bytes(value: str, name: str) -> int:
    """Read an amount of memory that is not a share of anything, such as `"1GiB"`.

    Raises:
        ConfigError: `value` is no such amount.
    """
    return _parsed(value, name, None, "bytes, '8GiB' or '8GB'")


def auto_ram() -> int:
    """Bytes of `ram_budget="auto"` now: the RAM that is available, less a tenth of it or 1 GiB, whichever is more."""
    available = available_ram()
    return max(0, available - max(_MIN_RESERVE_BYTES, int(available * _RESERVED_SHARE)))


def total_ram() -> int:
    """The system's RAM, or the limit of the control groups that the process is in (a container) if that is less."""
    return min([ram_of_machine("total"), *memory_limits()])


def _parsed(value: Any, name: str, total: int | None, forms: str) -> int:
    """
    Args:
        total: What a share is of. None: no share is understood, and 0 bytes are.
        forms: What is understood, for errors.
    """
    try:
        num_bytes = _from_text(value, total) if isinstance(value, str) else _from_number(value)
        if num_bytes <= 0 and total is not None:
            raise ValueError("it must be more than 0.")
    except ValueError as error:
        raise ConfigError(f"{name}={value!r:.80}: {error} Use {forms}.") from None
    return num_bytes


def _from_text(value: str, total: int | None) -> int:
    found = _NUMBER.fullmatch(value.strip())
    if found is None or (found[2] == "%" and total is None):
        raise ValueError("it isn't an amount of memory.")
    number, unit = Decimal(found[1]), found[2].lower()  # a float would round more than 2**53 bytes
    if unit == "%" and total is not None:
        if not 0 < number <= 100:
            raise ValueError("a share must be more than 0% and at most 100%.")
        return max(1, int(total * number / 100))
    if f"{unit}ib" in _UNITS:
        amount = f"{found[1]}{unit.upper()}"
        raise ValueError(f"it is ambiguous. Did you mean '{amount}iB' or '{amount}B'?")
    if unit not in _UNITS:
        raise ValueError(f"{found[2]!r} isn't a unit of memory.")
    return int(number * _UNITS[unit]) if unit else _from_number(int(number))


def _from_number(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ValueError(f"it is a {type(value).__name__}.")
    if isinstance(value, Integral):
        num_bytes = int(value)
    elif float(value).is_integer():
        num_bytes = int(float(value))
    elif 0 < float(value) < 1:
        raise ValueError(f"a share is written {f'{100 * float(value):g}%'!r}.")
    else:
        raise ValueError("bytes must be a whole number.")
    if 0 < num_bytes < _LEAST_PLAIN_BYTES:  # a few are meant to be GiB
        raise ValueError(f"that is {num_bytes} bytes. Did you mean '{num_bytes}GiB'?")
    return num_bytes
