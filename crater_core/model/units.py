"""Whole-number units: reads what people write ("32GiB", "500m", "2m") and writes what people read.

CPU is counted in thousandths of a core, memory and disk in bytes, GPU compute in thousandths of a device, GPU memory in
MiB, time in milliseconds. "GB" is 10**9 bytes and "GiB" is 2**30 bytes, as in IEC 80000-13.
"""

from __future__ import annotations

import math
import re
from decimal import Decimal

_BYTES = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgtp", start=1):
    _BYTES[_letter] = _BYTES[_letter + "b"] = 1000**_power
    _BYTES[_letter + "i"] = _BYTES[_letter + "ib"] = 1024**_power
_SECONDS = {"ms": Decimal("0.001"), "s": Decimal(1), "m": Decimal(60), "h": Decimal(3600), "d": Decimal(86400)}
_QUANTITY = re.compile(r"\s*([0-9]{1,40}(?:\.[0-9]{1,40})?)\s*([a-zA-Z]{0,20})\s*")

MIB = 1024**2
GIB = 1024**3
GB = 1000**3
MILLI = 1000
BYTES_MAX = 2**60
"""The largest amount accepted anywhere (1 EiB): beyond it the value is a slip of the pen."""


def _split(value: object, what: str) -> tuple[Decimal, str]:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError(f"{what} must be a number or text with a unit, found {value!r}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{what} must be finite, found {value!r}")
    number, unit = Decimal(0), ""
    if isinstance(value, str):
        match = _QUANTITY.fullmatch(value)
        if match is None:
            raise ValueError(f"{what} is not a quantity: {value[:100]!r}")
        number, unit = Decimal(match[1]), match[2]
    else:
        number = Decimal(str(value))
    if number < 0:
        raise ValueError(f"{what} must not be negative, found {value!r}")
    return number, unit


def parse_bytes(value: int | float | str, what: str = "size") -> int:
    """Bytes from 1024, "10GB", "1.5 GiB"; fractions of a byte round up. Raises ValueError with the units that exist."""
    number, unit = _split(value, what)
    if unit.lower() not in _BYTES:
        raise ValueError(f"{what} has an unknown unit {unit!r} in {value!r}; use B, kB, MB, GB, TB, KiB, MiB, GiB or TiB")
    result = math.ceil(number * _BYTES[unit.lower()])
    if result > BYTES_MAX:
        raise ValueError(f"{what} is more than 1 EiB: {value!r}")
    return result


def parse_mib(value: int | float | str, what: str = "GPU memory") -> int:
    """Whole MiB, rounded up, from a text with a unit or from a number of bytes."""
    return -(-parse_bytes(value, what) // MIB)


def parse_milli(value: int | float | str, what: str = "amount") -> int:
    """Thousandths from 2, 0.5 or "500m"; more than three decimals is refused rather than rounded."""
    number, unit = _split(value, what)
    if unit not in ("", "m"):
        raise ValueError(
            f"{what} has an unknown unit {unit!r} in {value!r}; use a number such as 0.5 or thousandths such as 500m"
        )
    milli = number if unit == "m" else number * MILLI
    if milli != milli.to_integral_value():
        raise ValueError(f"{what} is finer than one thousandth: {value!r}")
    if milli > 10**9:
        raise ValueError(f"{what} is more than a million: {value!r}")
    return int(milli)


def parse_duration_ms(value: int | float | str, what: str = "duration") -> int:
    """Milliseconds from 30 (seconds), "500ms", "30s", "2m", "1.5h" or "7d"."""
    number, unit = _split(value, what)
    if (unit or "s") not in _SECONDS:
        raise ValueError(f"{what} has an unknown unit {unit!r} in {value!r}; use ms, s, m, h or d")
    result = math.ceil(number * _SECONDS[unit or "s"] * 1000)
    if result > 10 * 366 * 86_400_000:
        raise ValueError(f"{what} is more than ten years: {value!r}")
    return result


def show_bytes(count: int) -> str:
    """`1536 MiB` as "1.5 GiB": the largest binary unit that keeps the number at or above one."""
    size, unit = Decimal(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB", "PiB"):
        if size < 1024 or unit == "PiB":
            break
        size /= 1024
    return f"{_short(size)} {unit}"


def show_mib(count: int) -> str:
    return show_bytes(count * MIB)


def show_milli(count: int) -> str:
    """`1500` as "1.5"."""
    return _short(Decimal(count) / MILLI, digits=3)


def show_duration(count_ms: int) -> str:
    """`90_000` as "1m 30s"; two units at most."""
    seconds = count_ms / 1000
    if seconds < 1:
        return f"{count_ms} ms"
    if seconds < 60:
        return f"{seconds:.1f} s".replace(".0 s", " s")
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    parts = [
        f"{days}d" if days else "",
        f"{hours}h" if hours else "",
        f"{minutes}m" if minutes else "",
        f"{rest}s" if rest else "",
    ]
    return " ".join([part for part in parts if part][:2])


def _short(number: Decimal, digits: int = 1) -> str:
    return f"{number:.{digits}f}".rstrip("0").rstrip(".") if digits else str(number)
