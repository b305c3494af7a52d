"""Arguments of launches from Python: what does not fit is refused, and the message names it."""

import numpy as np
import pytest
import torch

from cake_shared.emulator import ConstWrite, LaunchError, Module, Options

TEXT = """.version 8.7
.target sm_90a
.address_size 64
.visible .entry copy(.param .u64 from, .param .u64 to)
{
    .reg .b64 %rd<3>; .reg .b32 %r;
    ld.param.u64 %rd1, [from];
    ld.param.u64 %rd2, [to];
    ld.global.u32 %r, [%rd1];
    st.global.u32 [%rd2], %r;
    ret;
}
"""


@pytest.fixture(scope="module")
def module():
    return Module.from_ptx(TEXT)


def test_memory_that_is_const_and_not_const_is_refused_by_name(module):
    x = np.zeros(8, np.uint32)
    message = r"parameter 0 \(from\) is const, and parameter 1 \(to\) in the same memory is not"
    for other in (x, x[4:], torch.from_numpy(x.view(np.int32))):
        with pytest.raises(ValueError, match=message):
            module.launch("copy", 1, 1, [module.const(x), other])
    with pytest.raises(ValueError, match=r"parameter 1 \(to\) is const, and parameter 0 \(from\)"):
        module.launch("copy", 1, 1, [x, module.const(x)])
    read_only = x.view()
    read_only.flags.writeable = False
    with pytest.raises(ValueError, match=message):
        module.launch("copy", 1, 1, [read_only, x])
    with pytest.raises(ValueError, match=r"parameter 0 \(from\) is const, and allocation 0"):
        module.launch("copy", 1, 1, [module.const(x), np.zeros(1, np.uint32)], allocations=[x])
    with pytest.raises(ConstWrite):
        module.launch("copy", 1, 1, [module.const(x), module.const(x)])


def test_columns_of_one_matrix_may_be_const_and_not(module):
    x = np.arange(32, dtype=np.uint32).reshape(4, 8)
    t = torch.arange(32, dtype=torch.int32).reshape(4, 8)
    module.launch("copy", 1, 1, [x[:, :4], x[:, 4:]])
    assert x[0, 4] == 0
    with pytest.raises(ValueError, match="in the same memory"):
        module.launch("copy", 1, 1, [module.const(t[:, :5]), t[:, 4:]])


def test_zeros_alone_leave_the_cluster_to_the_kernel(module):
    x, y = np.ones(1, np.uint32), np.zeros(1, np.uint32)
    for cluster in (0, (0,), (0, 0), (0, 0, 0), 1, (1, 1)):
        module.launch("copy", 1, 1, [x, y], cluster=cluster)
    for cluster in ((0, 2), (2, 0), (1, 1, 0)):
        with pytest.raises(ValueError, match="cluster takes positive sizes, or zeros alone"):
            module.launch("copy", 2, 1, [x, y], cluster=cluster)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"params": [[1, 2], None]},
            TypeError,
            r"parameter 0 \(from, .u64, 8 bytes\) takes an array, a number or bytes",
        ),
        ({"params": [Module.const([1, 2]), None]}, TypeError, r"parameter 0 \(from\): a NumPy array or a torch tensor"),
        ({"params": [np.array(["x"], object), None]}, TypeError, r"parameter 0 \(from\): an array of numbers"),
        ({"params": [None, 1 << 64]}, TypeError, r"parameter 1 \(to, .u64, 8 bytes\) cannot hold 18446744073709551616"),
        ({"params": [None, float("inf")]}, TypeError, r"parameter 1 \(to, .u64, 8 bytes\) takes an integer, got inf"),
        ({"allocations": [3]}, TypeError, "allocation 0: a NumPy array or a torch tensor"),
        ({"smem_bytes": -1}, LaunchError, "smem_bytes: takes a whole number of bytes below 2.32, got -1"),
        ({"smem_bytes": 1.5}, LaunchError, "smem_bytes: takes a whole number of bytes below 2.32, got 1.5"),
        ({"grid": "4"}, ValueError, "grid takes one to three sizes"),
        ({"block": (1, 2, 3, 4)}, ValueError, "block takes one to three sizes"),
    ],
)
def test_an_argument_that_does_not_fit_is_named(module, arguments, error, message):
    whole = {"grid": 1, "block": 1, "params": [None, None], **arguments}
    with pytest.raises(error, match=message):
        module.launch("copy", **whole)


@pytest.mark.parametrize(
    ("option", "value", "takes"),
    [
        ("threads", 1.5, "a whole number from 1"),
        ("threads", 0, "a whole number from 1"),
        ("seed", -1, "a whole number from 0"),
        ("seed", 1 << 64, "a whole number from 0"),
        ("guard_bytes", -1, "a whole number from 0"),
        ("max_instructions", 0, "a whole number from 1"),
        ("stop_line", 0, "a whole number from 1"),
        ("trace", (0, 1, 2), r"\(CTA, warp\) or \(CTA,\)"),
        ("trace", (-1,), r"\(CTA, warp\) or \(CTA,\)"),
        ("dump_shared", (0, -4), "two numbers"),
        ("dump_tensor", 3, "two numbers"),
        ("order", "late", "one of eager, lazy, random"),
        ("detect", "some", "one of none, cheap, all"),
    ],
)
def test_an_option_out_of_range_is_named(option, value, takes):
    with pytest.raises(ValueError, match=f"{option} takes {takes}"):
        Options(**{option: value})
