"""Keeps torch's FP32 products on the CPU in FP32, whatever the process-wide precision settings say."""

import threading
from contextlib import contextmanager

import torch

_lock = threading.Lock()
_inside = 0
_was_enabled = True


@contextmanager
def ieee_products():
    """Inside, `torch.mm` and its kin on FP32 CPU tensors multiply in FP32.

    `torch.set_float32_matmul_precision("medium")` lets oneDNN round FP32 operands to BF16 first. Under such a setting
    oneDNN is switched off for the duration (for the whole process: other threads' products are then at least as
    accurate as they asked for); under any other nothing is touched.
    """
    if torch.backends.mkldnn.matmul.fp32_precision in ("none", "ieee"):
        yield
        return
    global _inside, _was_enabled
    with _lock:
        if _inside == 0:
            _was_enabled = torch.backends.mkldnn.enabled
            torch.backends.mkldnn.enabled = False
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if _inside == 0:
                torch.backends.mkldnn.enabled = _was_enabled
