"""The GPU architectures that programs are written for, as data. Importing this module never touches a device.

Numbers are those of the CUDA C++ programming guide's table of compute capabilities and of the PTX ISA's chapter on
tensor memory. The guide has no row for sm_107a yet: its shared memory of a CTA is the limit that ptxas 13.5 states, the
rest is taken to be as in sm_100a.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cake_shared.errors import UnsupportedArchError

if TYPE_CHECKING:
    import torch

_PORTABLE = frozenset({"ldmatrix", "mma.sync", "cp.async", "cluster", "tma", "setmaxnreg"})


@dataclass(frozen=True)
class Target:
    """One architecture: what a program may use and what it must fit in.

    Attributes
    ----------
    name
        As nvcc spells it, `sm_90a`.
    compute_capability
        (major, minor) as the driver reports it.
    features
        Instruction families beyond the base ISA.
    min_nvcc
        (major, minor) of the first compiler that knows the architecture.
    tmem_columns
        Columns of tensor memory of an SM, 0 without tensor memory.
    portable_cluster_ctas, cluster_ctas
        CTAs that a cluster may have on every architecture; on this one, where the launch asks for more than portable.
    """

    name: str
    compute_capability: tuple[int, int]
    features: frozenset[str]
    min_nvcc: tuple[int, int]
    tmem_columns: int
    shared_bytes_per_cta: int = 227 * 1024
    shared_bytes_per_sm: int = 228 * 1024
    shared_bytes_reserved_per_cta: int = 1024
    registers_per_sm: int = 64 * 1024
    registers_per_thread: int = 255
    threads_per_cta: int = 1024
    threads_per_sm: int = 2048
    ctas_per_sm: int = 32
    portable_cluster_ctas: int = 8
    cluster_ctas: int = 16

    @property
    def gencode_flags(self) -> tuple[str, ...]:
        """Flags that make nvcc emit machine code for this architecture and nothing else."""
        number = self.name.removeprefix("sm_")
        return ("-gencode", f"arch=compute_{number},code=sm_{number}")

    @property
    def ptx_flags(self) -> tuple[str, ...]:
        """Flags that make `nvcc -ptx` emit this architecture's PTX."""
        number = self.name.removeprefix("sm_")
        return ("-gencode", f"arch=compute_{number},code=compute_{number}")

    def resident_ctas(self, *, registers: int, shared_bytes: int, threads: int) -> int:
        """CTAs of a kernel that fit on one SM at a time.

        Parameters
        ----------
        registers
            Per thread; the hardware hands them out to whole warps in units of 256.
        shared_bytes
            Per CTA, static and dynamic.
        threads
            Per CTA.
        """
        warps = -(-threads // 32)
        registers_per_warp = -(-registers * 32 // 256) * 256
        limits = [self.ctas_per_sm, self.threads_per_sm // (warps * 32)]
        limits.append(self.registers_per_sm // (registers_per_warp * warps) if registers else self.ctas_per_sm)
        shared_per_cta = -(-shared_bytes // 128) * 128 + self.shared_bytes_reserved_per_cta
        limits.append(self.shared_bytes_per_sm // shared_per_cta)
        return min(limits)


TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        Target("sm_90a", (9, 0), _PORTABLE | {"wgmma"}, (12, 0), tmem_columns=0),
        Target("sm_100a", (10, 0), _PORTABLE | {"tcgen05"}, (12, 8), tmem_columns=512),
        Target("sm_103a", (10, 3), _PORTABLE | {"tcgen05"}, (12, 9), tmem_columns=512),
        Target("sm_107a", (10, 7), _PORTABLE | {"tcgen05"}, (13, 4), tmem_columns=512),
    )
}


def target_named(name: str) -> Target:
    """Return the target of that name.

    Raises
    ------
    UnsupportedArchError
        The name is not one of `TARGETS`; the message lists them.
    """
    try:
        return TARGETS[name]
    except KeyError:
        raise UnsupportedArchError(f"architecture {name!r} is not known; known are {', '.join(TARGETS)}") from None


def target_of(device: torch.device | int | str | None = None) -> Target:
    """Return the target of a CUDA device (default: the current one).

    Raises
    ------
    UnsupportedArchError
        The device's compute capability is not that of any target; the message lists them.
    ValueError
        The device is not a CUDA device.
    """
    import torch

    if device is not None and not isinstance(device, int) and torch.device(device).type != "cuda":
        raise ValueError(f"device: expected a CUDA device, got {device}")
    capability = torch.cuda.get_device_capability(device)
    for target in TARGETS.values():
        if target.compute_capability == capability:
            return target
    known = ", ".join(f"{t.name} ({t.compute_capability[0]}.{t.compute_capability[1]})" for t in TARGETS.values())
    raise UnsupportedArchError(
        f"{torch.cuda.get_device_name(device)} has compute capability {capability[0]}.{capability[1]}; "
        f"known are {known}. Run on the CPU: move the tensors there"
    )
