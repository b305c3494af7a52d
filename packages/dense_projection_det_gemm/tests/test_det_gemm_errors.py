"""Every bad argument of every public function raises the promised error, naming argument, what it got and takes."""

import pytest
import torch

import dense_projection_det_gemm as det
from cake_shared.errors import UnsupportedArchError

BF16, FP32 = torch.bfloat16, torch.float32


def bf16(*shape):
    return torch.zeros(*shape, dtype=BF16)


def fp32(*shape):
    return torch.zeros(*shape)


def strided(rows, cols, pitch, dtype=BF16):
    return torch.zeros(rows, pitch, dtype=dtype)[:, :cols]


GEMM = {"a": bf16(4, 16), "b": bf16(16, 8), "out": bf16(4, 8)}
FORWARD = {"x": bf16(4, 16), "w": bf16(8, 16)}
DGRAD = {"g": bf16(4, 8), "w": bf16(8, 16)}
WGRAD = {"g": bf16(4, 8), "x": bf16(4, 16)}
BACKWARD = {"g": bf16(4, 8), "x": bf16(4, 16), "w": bf16(8, 16)}
ROUTER_FORWARD = {k: v.float() for k, v in FORWARD.items()}
ROUTER_DGRAD = {k: v.float() for k, v in DGRAD.items()}
ROUTER_WGRAD = {k: v.float() for k, v in WGRAD.items()}

SHARED = torch.zeros(64, 64, dtype=BF16)

BAD_GEMM = [
    ({"a": [[1.0]]}, TypeError, r"a: got list, takes a torch.Tensor"),
    ({"a": fp32(4, 16)}, TypeError, r"a: got dtype float32, takes bfloat16"),
    ({"a": torch.zeros(4, 16, dtype=torch.float16)}, TypeError, r"a: got dtype float16"),
    ({"a": bf16(4, 16).to_sparse()}, TypeError, r"a: got layout torch.sparse_coo"),
    ({"b": fp32(16, 8)}, TypeError, r"b: got dtype float32, takes bfloat16"),
    ({"b": None}, TypeError, r"b: got NoneType"),
    ({"out": torch.zeros(4, 8, dtype=torch.float64)}, TypeError, r"out: got dtype float64, takes bfloat16 or float32"),
    ({"a": bf16(16)}, ValueError, r"a: got shape \[16\], takes \[M, K\] or \[L, M, K\]"),
    ({"b": bf16(1, 16, 8)}, ValueError, r"b: got shape \[1, 16, 8\], takes as many dimensions as a"),
    ({"out": bf16(1, 4, 8)}, ValueError, r"out: got shape \[1, 4, 8\]"),
    ({"b": bf16(24, 8)}, ValueError, r"b: got shape \[24, 8\], takes 16 in dimension -2"),
    ({"out": bf16(5, 8)}, ValueError, r"out: got shape \[5, 8\], takes \[4, 8\]"),
    ({"out": bf16(8, 4)}, ValueError, r"out: got shape \[8, 4\], takes \[4, 8\]"),
    ({"b": bf16(16, 12), "out": bf16(4, 12)}, ValueError, r"b: got 12 columns \(N\), takes a multiple of 8"),
    ({"a": bf16(2, 4, 16), "b": bf16(3, 16, 8), "out": bf16(2, 4, 8)}, ValueError, r"b: .*takes 2 in dimension 0"),
    ({"a": bf16(2, 4, 16), "b": bf16(2, 16, 8), "out": bf16(3, 4, 8)}, ValueError, r"out: .*takes 2 in dimension 0"),
    ({"a": strided(4, 16, 17)}, ValueError, r"a: got strides \[17, 1\].*multiples of 8 elements"),
    ({"a": bf16(4, 32)[:, ::2]}, ValueError, r"a: got strides \[32, 2\].*unit stride"),
    ({"a": bf16(1, 16).expand(4, 16)}, ValueError, r"a: got strides \[0, 1\]"),
    (
        {"a": bf16(65)[1:].view(4, 16)},
        ValueError,
        r"a: got a start at address 0x[0-9a-f]+, takes a start aligned to 16",
    ),
    ({"b": strided(16, 8, 9)}, ValueError, r"b: got strides \[9, 1\]"),
    ({"out": strided(4, 8, 12)}, ValueError, r"out: got strides \[12, 1\]"),
    ({"out": bf16(8, 8)[:, :4].t()}, ValueError, r"out: .*needs transposed_out=True"),
    ({"transposed_out": True}, ValueError, r"out: got strides \[8, 1\].*unit stride on m"),
    ({"out": bf16(4, 9), "transposed_out": True}, ValueError, r"out: got shape \[4, 9\], takes \[4, 8\]"),
    ({"out": bf16(1, 8).expand(4, 8)}, ValueError, r"out: "),
    ({"transposed_out": 1}, TypeError, r"transposed_out: got 1, takes True or False"),
    ({"accumulate": "yes"}, TypeError, r"accumulate: got 'yes', takes True or False"),
    ({"accumulate": True}, TypeError, r"out: got dtype bfloat16, takes float32 under accumulate=True"),
    ({"backend": "tpu"}, ValueError, r"backend: got 'tpu', takes None, 'cpu' or 'cuda'"),
    ({"backend": "cuda"}, ValueError, r"backend: got 'cuda' with tensors on cpu"),
    ({"a": torch.zeros(4, 16, dtype=BF16, device="meta")}, ValueError, r"b: got device cpu, takes the device of a"),
    ({"a": SHARED[:4, :16], "out": SHARED[:4, 8:16]}, ValueError, r"out: shares memory with a"),
    ({"b": SHARED[:16, :8], "out": SHARED[2:6, :8]}, ValueError, r"out: shares memory with b"),
]

BAD_FORWARD = [
    ({"x": 3}, TypeError, r"x: got int, takes a torch.Tensor"),
    ({"x": bf16(4, 24)}, ValueError, r"x: got shape \[4, 24\], takes 16 in dimension -1"),
    ({"x": torch.zeros((), dtype=BF16)}, ValueError, r"x: got a scalar"),
    ({"w": bf16(8, 16, 1)}, ValueError, r"w: got shape \[8, 16, 1\], takes \[N, K\]"),
    ({"backend": "cuda"}, ValueError, r"backend: got 'cuda' with tensors on cpu"),
    ({"backend": 0}, ValueError, r"backend: got 0"),
]
BAD_DGRAD = [
    ({"g": None}, TypeError, r"g: got NoneType"),
    ({"g": bf16(4, 16)}, ValueError, r"g: got shape \[4, 16\], takes 8 in dimension -1"),
    ({"w": bf16(8)}, ValueError, r"w: got shape \[8\], takes \[N, K\]"),
    ({"backend": "cuda"}, ValueError, r"backend: got 'cuda'"),
]
BAD_WGRAD = [
    ({"g": "g"}, TypeError, r"g: got str"),
    ({"x": bf16(5, 16)}, ValueError, r"x: got shape \[5, 16\], takes \[4, 16\]"),
    ({"x": torch.zeros((), dtype=BF16)}, ValueError, r"x: got a scalar"),
    ({"x": bf16(4, 12)}, ValueError, r"x: got 12 columns \(K\), takes a multiple of 8"),
    ({"backend": "cuda"}, ValueError, r"backend: got 'cuda'"),
]
BF16_ONLY = {
    "forward": [
        ({"x": fp32(4, 16)}, TypeError, r"x: got dtype float32, takes bfloat16"),
        ({"w": fp32(8, 16)}, TypeError, r"w: got dtype float32, takes bfloat16"),
        ({"w": bf16(12, 16)}, ValueError, r"w: got 12 rows \(N\), takes a multiple of 8"),
    ],
    "dgrad": [
        ({"g": fp32(4, 8)}, TypeError, r"g: got dtype float32"),
        ({"w": fp32(8, 16)}, TypeError, r"w: got dtype float32"),
        ({"w": bf16(8, 12)}, ValueError, r"w: got 12 columns \(K\)"),
    ],
    "wgrad": [
        ({"g": fp32(4, 8)}, TypeError, r"g: got dtype float32"),
        ({"x": fp32(4, 16)}, TypeError, r"x: got dtype float32"),
        ({"out_dtype": torch.float16}, TypeError, r"out_dtype: got float16, takes None, torch.bfloat16"),
        ({"out_dtype": "float32"}, TypeError, r"out_dtype: got 'float32'"),
        (
            {"out": fp32(8, 16), "out_dtype": BF16},
            TypeError,
            r"out_dtype: got bfloat16, takes None or the dtype of out",
        ),
        ({"out": fp32(8, 8)}, ValueError, r"out: got shape \[8, 8\], takes \[8, 16\]"),
        ({"out": torch.zeros(8, 16, dtype=torch.float64)}, TypeError, r"out: got dtype float64"),
        ({"out": torch.zeros(8, 16, device="meta")}, ValueError, r"out: got device meta"),
        ({"out": strided(8, 16, 17, FP32)}, ValueError, r"out: got strides \[17, 1\]"),
        ({"accumulate": True}, ValueError, r"accumulate: got True without out"),
        ({"accumulate": 1}, TypeError, r"accumulate: got 1"),
        ({"out": bf16(8, 16), "accumulate": True}, TypeError, r"out: got dtype bfloat16, takes float32"),
        ({"x": SHARED[:4, :16], "out": SHARED[:8, :16]}, ValueError, r"out: shares memory with x"),
    ],
}
BAD_BACKWARD = [
    *BAD_DGRAD[:3],
    *BAD_WGRAD[1:3],
    ({"g": fp32(4, 8)}, TypeError, r"g: got dtype float32"),
    ({"x": fp32(4, 16)}, TypeError, r"x: got dtype float32"),
    ({"w": fp32(8, 16)}, TypeError, r"w: got dtype float32"),
    ({"x": bf16(4, 24)}, ValueError, r"x: got shape \[4, 24\], takes 16 in dimension -1 \(K of w\)"),
    ({"x": bf16(4, 12), "w": bf16(8, 12)}, ValueError, r"w: got 12 columns \(K\)"),
    ({"backend": "cuda"}, ValueError, r"backend: got 'cuda'"),
    ({"out_dtype": torch.float16}, TypeError, r"out_dtype: got float16"),
    ({"dw": fp32(8, 16), "out_dtype": BF16}, TypeError, r"out_dtype: got bfloat16, takes None or the dtype of dw"),
    ({"dw": fp32(8, 8)}, ValueError, r"dw: got shape \[8, 8\], takes \[8, 16\]"),
    ({"dw": torch.zeros(8, 16, device="meta")}, ValueError, r"dw: got device meta"),
    ({"dw": strided(8, 16, 17, FP32)}, ValueError, r"dw: got strides \[17, 1\]"),
    ({"accumulate": True}, ValueError, r"accumulate: got True without dw, takes a float32 dw"),
    ({"accumulate": 1}, TypeError, r"accumulate: got 1"),
    ({"dw": bf16(8, 16), "accumulate": True}, TypeError, r"dw: got dtype bfloat16, takes float32"),
    ({"g": SHARED[:4, :8], "dw": SHARED[:8, :16]}, ValueError, r"dw: shares memory with g"),
    ({"x": SHARED[:4, :16], "dw": SHARED[:8, :16]}, ValueError, r"dw: shares memory with x"),
    ({"w": SHARED[:8, :16], "dw": SHARED[4:12, :16]}, ValueError, r"dw: shares memory with w"),
]
BAD_DX = [
    ({"dx": 1.0}, TypeError, r"dx: got float, takes a torch.Tensor"),
    ({"dx": bf16(4, 8)}, ValueError, r"dx: got shape \[4, 8\], takes \[4, 16\]"),
    ({"dx": strided(4, 16, 17)}, ValueError, r"dx: got strides \[17, 1\]"),
    ({"dx": torch.zeros(4, 16, device="meta")}, ValueError, r"dx: got device meta"),
    ({"g": SHARED[:4, :8], "dx": SHARED[:4, :16]}, ValueError, r"dx: shares memory with g"),
    ({"x": SHARED[:4, :16], "dx": SHARED[:4, 8:24]}, ValueError, r"dx: shares memory with x"),
    ({"w": SHARED[:8, :16], "dx": SHARED[:4, :16]}, ValueError, r"dx: shares memory with w"),
    ({"dx": SHARED[:4, :16], "dw": SHARED[:8, :16]}, ValueError, r"dw: shares memory with dx"),
    ({"x": bf16(4, 32)[:, ::2]}, ValueError, r"x: got strides \[32, 2\]"),
]
FP32_ONLY = {
    "forward": [
        ({"x": torch.zeros(4, 16, dtype=torch.float64)}, TypeError, r"x: got dtype float64, takes float32 or bfloat16"),
        ({"w": bf16(8, 16)}, TypeError, r"w: got dtype bfloat16, takes float32"),
        ({"w": fp32(12, 16)}, ValueError, r"w: got 12 rows \(N\)"),
    ],
    "dgrad": [
        ({"g": bf16(4, 8)}, TypeError, r"g: got dtype bfloat16, takes float32"),
        ({"w": bf16(8, 16)}, TypeError, r"w: got dtype bfloat16, takes float32"),
        ({"w": fp32(8, 12)}, ValueError, r"w: got 12 columns \(K\)"),
    ],
    "wgrad": [
        ({"g": bf16(4, 8)}, TypeError, r"g: got dtype bfloat16, takes float32"),
        ({"x": torch.zeros(4, 16, dtype=torch.float16)}, TypeError, r"x: got dtype float16, takes float32 or bfloat16"),
        ({"x": fp32(4, 12)}, ValueError, r"x: got 12 columns \(K\)"),
    ],
}
BAD_OUT = [
    ({"out": 1.0}, TypeError, r"out: got float, takes a torch.Tensor"),
    ({"out": torch.zeros(4, 8, dtype=torch.float64)}, TypeError, r"out: got dtype float64"),
    ({"out": fp32(3, 8)}, ValueError, r"out: got shape \[3, 8\]"),
    ({"out": torch.zeros(4, 8, device="meta")}, ValueError, r"out: got device meta, takes the device of the operands"),
]


def shapes_only(rows):
    """The rows whose fault is not one of layout, which a shape of another width would hide."""
    return [row for row in rows if "out" not in row[0] or "strides" not in row[2]]


FUNCTIONS = {
    "dense_projection_det_gemm": (GEMM, BAD_GEMM),
    "prepare_gemm": (GEMM, BAD_GEMM),
    "projection_forward": (FORWARD, BAD_FORWARD + BF16_ONLY["forward"]),
    "projection_dgrad": (DGRAD, BAD_DGRAD + BF16_ONLY["dgrad"]),
    "projection_wgrad": (WGRAD, BAD_WGRAD + BF16_ONLY["wgrad"]),
    "projection_backward": (BACKWARD, BAD_BACKWARD),
    "router_forward": (ROUTER_FORWARD, FP32_ONLY["forward"]),
    "router_dgrad": (ROUTER_DGRAD, FP32_ONLY["dgrad"]),
    "router_wgrad": (ROUTER_WGRAD, FP32_ONLY["wgrad"]),
    "prepare_forward": (FORWARD, BAD_FORWARD + BF16_ONLY["forward"] + BAD_OUT),
    "prepare_dgrad": (DGRAD, BAD_DGRAD + BF16_ONLY["dgrad"] + BAD_OUT[:3]),
    "prepare_wgrad": (WGRAD, BAD_WGRAD + BF16_ONLY["wgrad"]),
    "prepare_backward": (BACKWARD, BAD_BACKWARD + BAD_DX),
    "prepare_router_forward": (ROUTER_FORWARD, FP32_ONLY["forward"] + BAD_OUT),
    "prepare_router_dgrad": (ROUTER_DGRAD, FP32_ONLY["dgrad"] + BAD_OUT[:3]),
    "prepare_router_wgrad": (ROUTER_WGRAD, FP32_ONLY["wgrad"] + BAD_OUT[:3]),
}
ROUTER_ALSO = {
    "router_forward": [({"x": fp32(4, 24)}, ValueError, r"x: got shape \[4, 24\]")],
    "router_dgrad": [({"g": fp32(4, 16)}, ValueError, r"g: got shape \[4, 16\]")],
    "router_wgrad": [({"x": fp32(5, 16)}, ValueError, r"x: got shape \[5, 16\]")],
    "prepare_router_forward": [({"backend": "cuda"}, ValueError, r"backend: got 'cuda'")],
}
ROWS = [
    (name, change, error, message)
    for table in (FUNCTIONS, {k: (FUNCTIONS[k][0], rows) for k, rows in ROUTER_ALSO.items()})
    for name, (_, rows) in table.items()
    for change, error, message in rows
]


@pytest.mark.parametrize(("name", "change", "error", "message"), ROWS)
def test_bad_argument(name, change, error, message):
    arguments = FUNCTIONS[name][0] | change
    with pytest.raises(error, match=message):
        getattr(det, name)(**arguments)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_good_arguments_are_good(name):
    getattr(det, name)(**FUNCTIONS[name][0])
    getattr(det, name)(**FUNCTIONS[name][0], backend="cpu")


def test_the_table_covers_every_public_function():
    functions = {n for n in det.__all__ if callable(getattr(det, n)) and not isinstance(getattr(det, n), type)}
    assert functions == set(FUNCTIONS)


@pytest.mark.parametrize(
    ("main_grad", "error", "message"),
    [
        (bf16(8, 16), TypeError, r"main_grad: got dtype bfloat16, takes float32"),
        (fp32(16, 8), ValueError, r"main_grad: got shape \[16, 8\], takes \[8, 16\]"),
        (torch.zeros(8, 16, device="meta"), ValueError, r"main_grad: got device meta"),
        (fp32(8, 16).requires_grad_(), ValueError, r"main_grad: got a tensor that requires grad"),
        (strided(8, 16, 17, FP32), ValueError, r"main_grad: got strides \[17, 1\]"),
        (
            fp32(129)[1:].view(8, 16),
            ValueError,
            r"main_grad: got a start at address 0x[0-9a-f]+, takes a start aligned",
        ),
        ("no", TypeError, r"main_grad: got str"),
    ],
)
def test_bad_main_grad(main_grad, error, message):
    with pytest.raises(error, match=message):
        det.projection_forward(bf16(4, 16), bf16(8, 16).requires_grad_(), main_grad=main_grad)


@pytest.mark.parametrize(
    ("module", "arguments", "error", "message"),
    [
        (det.DenseProjection, {"in_features": 12, "out_features": 8}, ValueError, r"in_features: got 12, takes a mult"),
        (det.DenseProjection, {"in_features": 16, "out_features": 9}, ValueError, r"out_features: got 9"),
        (det.DenseProjection, {"in_features": 16, "out_features": -8}, ValueError, r"out_features: got -8"),
        (
            det.DenseProjection,
            {"in_features": 16.0, "out_features": 8},
            TypeError,
            r"in_features: got 16.0, takes an int",
        ),
        (det.DenseProjection, {"in_features": 16, "out_features": 8, "dtype": FP32}, TypeError, r"dtype: got float32"),
        (det.DenseProjection, {"in_features": 16, "out_features": 8, "dtype": 1}, TypeError, r"dtype: got 1"),
        (
            det.DenseProjection,
            {"in_features": 16, "out_features": 8, "accumulate_main_grad": 1},
            TypeError,
            r"accumulate_main_grad: got 1",
        ),
        (det.RouterGate, {"in_features": 16, "num_experts": 7}, ValueError, r"num_experts: got 7"),
        (det.RouterGate, {"in_features": 17, "num_experts": 8}, ValueError, r"in_features: got 17"),
        (det.RouterGate, {"in_features": True, "num_experts": 8}, TypeError, r"in_features: got True"),
        (det.RouterGate, {"in_features": 16, "num_experts": 8, "dtype": BF16}, TypeError, r"dtype: got bfloat16"),
    ],
)
def test_bad_module_argument(module, arguments, error, message):
    with pytest.raises(error, match=message):
        module(**arguments)


def test_modules_refuse_bad_input():
    with pytest.raises(TypeError, match=r"x: got dtype float32, takes bfloat16"):
        det.DenseProjection(16, 8)(fp32(4, 16))
    with pytest.raises(ValueError, match=r"x: got shape \[4, 8\], takes 16"):
        det.DenseProjection(16, 8)(bf16(4, 8))
    with pytest.raises(TypeError, match=r"x: got dtype float64"):
        det.RouterGate(16, 8)(torch.zeros(4, 16, dtype=torch.float64))
    with pytest.raises(TypeError, match=r"w: got dtype bfloat16"):
        det.RouterGate(16, 8).bfloat16()(bf16(4, 16))


def test_nothing_is_written_before_an_error():
    out = torch.full((4, 8), 3.0)
    with pytest.raises(ValueError):
        det.dense_projection_det_gemm(strided(4, 16, 17), bf16(16, 8), out)
    assert bool((out == 3.0).all())


@pytest.mark.parametrize("which", ["a", "b", "out"])
def test_out_is_not_recorded_by_autograd(which):
    arguments = {"a": bf16(4, 16), "b": bf16(16, 8), "out": fp32(4, 8)}
    arguments[which].requires_grad_()
    with pytest.raises(RuntimeError, match="not recorded by autograd"):
        det.dense_projection_det_gemm(**arguments)
    with torch.no_grad():
        det.dense_projection_det_gemm(**arguments)
    with pytest.raises(RuntimeError, match="not recorded by autograd"):
        det.projection_wgrad(bf16(4, 8), bf16(4, 16).requires_grad_(), out=fp32(8, 16))


def test_neighbouring_columns_of_one_buffer_are_no_overlap():
    """Input and output may be different columns of one wide buffer."""
    buffer = torch.ones(4, 64, dtype=BF16)
    det.dense_projection_det_gemm(buffer[:, :16], torch.ones(16, 8, dtype=BF16), buffer[:, 16:24])
    assert bool((buffer[:, 16:24] == 16).all())
    assert bool((buffer[:, :16] == 1).all())
    assert bool((buffer[:, 24:] == 1).all())
    heads = torch.ones(6, 2, 32, dtype=BF16).transpose(0, 1)
    det.dense_projection_det_gemm(heads[:, :, :8], torch.ones(2, 8, 8, dtype=BF16), heads[:, :, 16:24])
    assert bool((heads[:, :, 16:24] == 8).all())


def test_overlap_is_seen_across_storages():
    """Two tensors on one NumPy buffer have storages of their own and yet share memory."""
    numbers = torch.zeros(64, 16, dtype=torch.int16).numpy()
    a, out = (torch.from_numpy(numbers[start : start + 16]).view(BF16) for start in (0, 8))
    apart = torch.from_numpy(numbers[16:32]).view(BF16)
    with pytest.raises(ValueError, match="out: shares memory with a, takes a tensor of its own"):
        det.dense_projection_det_gemm(a, bf16(16, 16), out)
    assert det.dense_projection_det_gemm(a, bf16(16, 16), apart) is apart


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name.startswith("prepare_")])
def test_plans_are_made_for_plain_tensors_in_memory(name):
    """A plan launches on memory: tensors without any are refused by name."""
    first = next(iter(FUNCTIONS[name][0]))
    meta = {n: x.to("meta") if isinstance(x, torch.Tensor) else x for n, x in FUNCTIONS[name][0].items()}
    with pytest.raises(ValueError, match=rf"{first}: got a Tensor on meta, takes a plain tensor in memory"):
        getattr(det, name)(**meta)


class OnCuda:
    device = torch.device("cuda", 0)


@pytest.mark.parametrize("stage", ["gemm_out", "router_out"])
def test_cuda_names_an_architecture_that_it_does_not_know(monkeypatch, stage):
    from dense_projection_det_gemm import cuda

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "an older device")
    with pytest.raises(UnsupportedArchError, match=r"an older device has compute capability 8\.0.*sm_90a"):
        cuda.prepare(stage, None, None, None, OnCuda())


def test_cuda_names_the_stage_without_a_program(monkeypatch):
    from cake_shared.program import Programs
    from dense_projection_det_gemm import cuda

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (10, 3))
    monkeypatch.setattr("cake_shared.program.programs_of", lambda package: Programs(package, {"wide_out": "x"}, ()))
    with pytest.raises(UnsupportedArchError, match=r"wide_out.*sm_103a"):
        cuda.prepare("gemm_out", None, None, None, OnCuda())


@pytest.mark.gpu
def test_cuda_tensors_are_not_for_the_cpu_backend():
    x, w = (torch.zeros(8, 16, dtype=BF16, device="cuda") for _ in range(2))
    with pytest.raises(ValueError, match="backend: got 'cpu' with tensors on cuda"):
        det.projection_forward(x, w, backend="cpu")
