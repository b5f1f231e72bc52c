"""Checks of single values that users give; called by the frozen dataclasses that hold them."""

import math


def is_number(value: object) -> bool:
    """A number that a float can hold: no bool, no NaN, nothing beyond a float's range."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return not math.isnan(value)
    except OverflowError:
        return False


def check_whole(name: str, value: object, low: int) -> None:
    """ValueError unless `value` is a whole number of at least `low`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise ValueError(f"{name} is {value!r}; allowed: a whole number >= {low}")
