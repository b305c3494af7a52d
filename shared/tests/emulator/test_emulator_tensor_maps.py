"""What a tensor map refuses, by the name of the argument, as cuTensorMapEncodeTiled does."""

import numpy as np
import pytest
import torch

from cake_shared.emulator import tensor_map


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"box": (0, 8)}, "box"),
        ({"box": (257, 8)}, "box"),
        ({"box": (4, 8)}, "box"),  # 8 bytes along the innermost dimension
        ({"box": (64, 8), "swizzle": "64B"}, "swizzle"),
        ({"box": (16,)}, "box"),
        ({"swizzle": "48B"}, "swizzle"),
        ({"interleave": "16B"}, "interleave"),
        ({"fill": "one"}, "fill"),
        ({"dtype": "u16", "fill": "nan"}, "fill"),
        ({"dtype": "u4"}, "dtype"),
        ({"element_strides": (1, 9)}, "element_strides"),
        ({"strides_bytes": (72,)}, "strides_bytes"),
        ({"dims": (0, 8)}, "dims"),
        ({"dims": (1,) * 6, "box": (16,) * 6, "strides_bytes": (16,) * 5}, "rank"),
    ],
)
def test_a_bad_argument_is_named(arguments, name):
    array = np.zeros((32, 64), np.uint16)
    with pytest.raises(ValueError, match=name):
        tensor_map(array, **({"box": (16, 8), "dtype": "bf16"} | arguments))


def test_a_misaligned_tensor_is_refused():
    raw = np.zeros(4096 + 16, np.uint8)
    start = -raw.ctypes.data % 16 + 8
    with pytest.raises(ValueError, match="address"):
        tensor_map(raw[start : start + 4096].view(np.uint16).reshape(32, 64), (16, 8))


def test_a_torch_tensor_and_its_numpy_view_give_one_map():
    tensor = torch.zeros(32, 64, dtype=torch.float32)
    assert tensor_map(tensor, (16, 8)) == tensor_map(tensor.numpy(), (16, 8))


def test_a_strided_innermost_dimension_is_refused():
    with pytest.raises(ValueError, match="innermost"):
        tensor_map(np.zeros((32, 64), np.float32)[:, ::2], (16, 8))
