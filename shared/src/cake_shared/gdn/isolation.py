"""Calls that do not see the caller's global settings."""

import functools
from collections.abc import Callable

import torch


def isolated(function: Callable) -> Callable:
    """Run `function` with autocast off and new tensors in host memory, whatever the caller has set.

    The rule takes what it is given: under autocast its products would silently run in another dtype, and under another
    default device its tables would land there.
    """

    @functools.wraps(function)
    def call(*arguments, **keywords):
        if not torch.is_autocast_enabled("cpu") and torch.get_default_device().type == "cpu":
            return function(*arguments, **keywords)
        with torch.autocast("cpu", enabled=False), torch.device("cpu"):
            return function(*arguments, **keywords)

    return call
