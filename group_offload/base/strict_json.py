"""JSON that another program may have written: objects, lists, strings, whole numbers, true, false and null, no more."""

from __future__ import annotations

import json
import re

from ..errors import GroupFileError

_MAX_SIZE = 1 << 63
_HALF = re.compile(rb"\\u[dD][89a-fA-F]")


def parse(text: bytes, *, may_have_halves: bool = False) -> object:
    """Parse UTF-8 text. The memory that this takes is in proportion to the text's length.

    Args:
        may_have_halves: whether strings may have halves of characters (`\\ud800` alone), which no text has.

    Raises:
        GroupFileError: the text is no JSON, names a key twice, nests too deeply, or has fractions, NaN or Infinity.
    """
    try:
        found = json.loads(
            text.decode("utf-8"), object_pairs_hook=_without_repeats, parse_float=_refuse, parse_constant=_refuse
        )
        if not may_have_halves and _HALF.search(text):
            json.dumps(found, ensure_ascii=False).encode()  # raises ValueError if one is left
        return found
    except RecursionError:
        raise GroupFileError("its JSON nests too deeply") from None
    except ValueError as error:
        raise GroupFileError(f"its JSON cannot be read: {error}") from error


def as_text(value: object) -> str:
    """
    Raises:
        GroupFileError: `value` is not a string.
    """
    if not isinstance(value, str):
        raise GroupFileError(f"it has a {type(value).__name__} where a text belongs")
    return value


def as_size(value: object) -> int:
    """
    Raises:
        GroupFileError: `value` is not a whole number of 64 bits that can count bytes.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _MAX_SIZE:
        raise GroupFileError("it has something else where a size belongs")
    return value


def as_sizes(value: object) -> tuple[int, ...]:
    """
    Raises:
        GroupFileError: `value` is not a list of sizes.
    """
    if not isinstance(value, list):
        raise GroupFileError("it has something else where a list of sizes belongs")
    return tuple(as_size(item) for item in value)


def _without_repeats(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key is there twice")
    return found


def _refuse(text: str) -> object:
    raise ValueError(f"{text[:20]} is no whole number")
