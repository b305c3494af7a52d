"""The architectures as data, occupancy arithmetic, and devices that are none of them."""

import subprocess
import sys

import pytest
import torch

from cake_shared.errors import UnsupportedArchError
from cake_shared.target import TARGETS, target_named, target_of


def test_the_four_architectures():
    assert list(TARGETS) == ["sm_90a", "sm_100a", "sm_103a", "sm_107a"]
    for name, target in TARGETS.items():
        assert target.name == name
        major, minor = target.compute_capability
        assert name == f"sm_{major}{minor}a"
        assert target.gencode_flags == ("-gencode", f"arch=compute_{major}{minor}a,code=sm_{major}{minor}a")
        assert target.ptx_flags == ("-gencode", f"arch=compute_{major}{minor}a,code=compute_{major}{minor}a")
        assert ("wgmma" in target.features) == (major == 9)
        assert ("tcgen05" in target.features) == (major == 10) == (target.tmem_columns == 512)


def test_a_target_is_a_value():
    target = target_named("sm_90a")
    assert target == TARGETS["sm_90a"]
    with pytest.raises(AttributeError):
        target.tmem_columns = 1


def test_unknown_names_list_the_known():
    with pytest.raises(UnsupportedArchError, match="'sm_90' is not known; known are sm_90a, sm_100a, sm_103a, sm_107a"):
        target_named("sm_90")


@pytest.mark.parametrize(
    ("registers", "shared_bytes", "threads", "ctas"),
    [
        (32, 0, 1024, 2),  # threads: 2048 / 1024
        (64, 0, 1024, 1),  # registers: 65536 / (64 * 1024)
        (65, 0, 128, 7),  # 65 rounds to 72 a thread: 65536 / (72 * 128) = 7.1
        (16, 0, 32, 32),  # CTAs
        (16, 43_648, 128, 5),  # shared: 233472 / (43648 + 1024) = 5.2
        (16, 227 * 1024, 128, 1),
        (168, 0, 384, 1),
        (0, 0, 33, 32),  # 33 threads are two warps: 2048 / 64
    ],
)
def test_resident_ctas(registers, shared_bytes, threads, ctas):
    target = TARGETS["sm_100a"]
    assert target.resident_ctas(registers=registers, shared_bytes=shared_bytes, threads=threads) == ctas


@pytest.mark.parametrize("name", TARGETS)
def test_target_of_a_device(monkeypatch, name):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: TARGETS[name].compute_capability)
    assert target_of(torch.device("cuda", 0)) is TARGETS[name]
    assert target_of() is TARGETS[name]
    assert target_of(0) is TARGETS[name]


def test_a_device_of_another_architecture_is_named_with_the_way_out(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA A100")
    with pytest.raises(UnsupportedArchError) as caught:
        target_of("cuda:0")
    for part in ("NVIDIA A100", "8.0", "sm_90a (9.0)", "sm_107a (10.7)", "Run on the CPU"):
        assert part in str(caught.value)


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu"), "meta"])
def test_a_device_that_is_not_cuda_is_a_value_error(device):
    with pytest.raises(ValueError, match="device: expected a CUDA device, got"):
        target_of(device)


def test_importing_touches_neither_torch_nor_a_device():
    code = "import sys, cake_shared.target, cake_shared.program, cake_shared.jit; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
