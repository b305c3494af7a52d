"""Calls that do not see the caller's global settings."""

import contextlib
import functools
from collections.abc import Callable

import torch

from cake_shared.cpu_precision import ieee_products


def isolated(function: Callable) -> Callable:
    """Run `function` with autocast off, products as given and new tensors in host memory, whatever the caller has set.

    The rule takes what it is given: under autocast its products would silently run in another dtype, under a lower
    precision of FP32 products in another precision, and under another default device its tables would land there.
    """

    @functools.wraps(function)
    def call(*arguments, **keywords):
        with ieee_products():
            autocast = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
            if not autocast and torch.get_default_device().type == "cpu":
                return function(*arguments, **keywords)
            with contextlib.ExitStack() as settings:
                settings.enter_context(torch.device("cpu"))
                for kind in autocast:
                    settings.enter_context(torch.autocast(kind, enabled=False))
                return function(*arguments, **keywords)

    return call
