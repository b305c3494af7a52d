"""Command line of the emulator, for a person who debugs: `python -m cake_shared.emulator run FILE.ptx|FILE.cu ...`."""

from __future__ import annotations

import argparse
import math
import re
import sys
from pathlib import Path

import numpy as np

from cake_shared.emulator import EmulatorError, Module, Options
from cake_shared.errors import BuildError, UnsupportedArchError

_DTYPES = {
    "f16": "float16", "f32": "float32", "f64": "float64", "i8": "int8", "i16": "int16", "i32": "int32", "i64": "int64",
    "u8": "uint8", "u16": "uint16", "u32": "uint32", "u64": "uint64", "bf16": "uint16",
}  # fmt: skip


# What --dump prints where it is not said: argument, first element, number of elements.
_DUMP = (0, 0, 64)


def _sizes(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"takes whole numbers with commas between, got {text!r}") from None


def _pair(text: str) -> tuple[int, int]:
    values = _sizes(text)
    if len(values) != 2:
        raise argparse.ArgumentTypeError(f"takes two whole numbers with a comma between, got {text!r}")
    return values[0], values[1]


def _array(name: str, spec: str, rng: np.random.Generator) -> np.ndarray:
    """Return the array of `dtype:count[:fill]`; fill is zeros, ones, arange, normal or a file of raw bytes or .npy."""
    parts = spec.split(":")
    if parts[0] not in _DTYPES or len(parts) not in (2, 3) or not parts[1].isdecimal():
        raise ValueError(
            f"{name}: takes DTYPE:COUNT[:zeros|ones|arange|normal|FILE], DTYPE of {', '.join(_DTYPES)}; got {spec!r}"
        )
    dtype, count, fill = np.dtype(_DTYPES[parts[0]]), int(parts[1]), parts[2] if len(parts) == 3 else "zeros"
    values = {
        "zeros": lambda: np.zeros(count),
        "ones": lambda: np.ones(count),
        "arange": lambda: np.arange(count),
        "normal": lambda: rng.standard_normal(count),
    }
    if fill not in values:
        loaded = np.load(fill).reshape(-1) if fill.endswith(".npy") else np.fromfile(fill, dtype)
        if loaded.size != count:
            raise ValueError(f"{name}: {fill} has {loaded.size} elements, {count} are asked for")
        return loaded.astype(dtype)
    if parts[0] == "bf16":
        return (values[fill]().astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return values[fill]().astype(dtype)


def _number(name: str, spec: str) -> int | float:
    whole = re.fullmatch(r"[+-]?(0x[0-9a-fA-F]+|\d+)", spec)
    try:
        return int(spec, 16 if "x" in spec else 10) if whole else float(spec)
    except ValueError:
        raise ValueError(f"{name}: takes a number or DTYPE:COUNT, got {spec!r}") from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m cake_shared.emulator", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="run one kernel and print its counters")
    run.add_argument("file", type=Path, help="FILE.ptx or FILE.cu")
    run.add_argument("--target", default="sm_90a", help="architecture, sm_90a by default")
    run.add_argument("--kernel", help="name, mangled or not; may be left out when there is only one")
    run.add_argument("--grid", type=_sizes, default=(1,), help="X[,Y[,Z]] CTAs")
    run.add_argument("--block", type=_sizes, default=(32,), help="X[,Y[,Z]] threads")
    run.add_argument("--cluster", type=_sizes, default=(0, 0, 0), help="X[,Y[,Z]] CTAs")
    run.add_argument("--smem", type=int, default=0, help="bytes of dynamic shared memory")
    run.add_argument(
        "--arg",
        action="append",
        default=[],
        metavar="SPEC",
        help="one a parameter, in order: a number, or DTYPE:COUNT[:zeros|ones|arange|normal|FILE] for a pointer",
    )
    run.add_argument("--flag", action="append", default=[], help="further flag for nvcc")
    run.add_argument(
        "--order",
        choices=("eager", "lazy", "random"),
        default="eager",
        help="when copies and the like complete (eager)",
    )
    run.add_argument("--seed", type=int, default=0, help="of `--order random` and of `normal` arrays (0)")
    run.add_argument("--detect", choices=("all", "cheap", "none"), default="all", help="which detectors watch (all)")
    run.add_argument("--threads", type=int, default=1, help="threads that the CTAs are spread over (1)")
    run.add_argument(
        "--trace",
        type=_sizes,
        metavar="CTA[,WARP]",
        help="print every instruction of one warp, or of all warps of a CTA, to stderr",
    )
    run.add_argument("--stop", type=int, metavar="LINE", help="stop when a PTX line is reached")
    run.add_argument(
        "--dump",
        type=_sizes,
        action="append",
        default=[],
        metavar="N[,FIRST[,COUNT]]",
        help="print array argument N afterwards, COUNT elements (64) from FIRST (0) on",
    )
    run.add_argument("--dump-shared", type=_pair, metavar="OFFSET,BYTES", help="with --stop: print shared memory there")
    run.add_argument("--dump-tensor", type=_pair, metavar="COLUMN,COUNT", help="with --stop: print tensor memory there")
    run.add_argument("--lines", type=int, default=0, metavar="N", help="print the N PTX lines executed most often")
    commands.add_parser("list", help="list the kernels of a file").add_argument("file", type=Path)
    return parser


def _load(path: Path, target: str, flags: tuple[str, ...]) -> tuple[Module, list[str]]:
    if path.suffix == ".cu":
        from cake_shared.emulator.compile import compile_to_ptx

        text, _ = compile_to_ptx(str(path), target, flags)
        return Module.from_ptx(text, target, path.with_suffix(".ptx").name), text.splitlines()
    text = path.read_text()
    return Module.from_ptx(text, target, path.name), text.splitlines()


def _check_wishes(arguments: argparse.Namespace, values: list) -> None:
    """Raise for what the command line asks to see and the launch does not have."""
    ctas, threads = math.prod(arguments.grid), math.prod(arguments.block)
    if arguments.trace is not None:
        for what, index, limit in zip(("CTA", "warp"), arguments.trace, (ctas, -(-threads // 32)), strict=False):
            if not 0 <= index < limit:
                raise ValueError(f"--trace: got {what} {index}, takes 0 to {limit - 1}")
    for name in ("dump_shared", "dump_tensor"):
        if getattr(arguments, name) is not None and arguments.stop is None:
            raise ValueError(f"--{name.replace('_', '-')}: takes effect at a stop, and --stop is not given")
    for position in (dump[0] for dump in arguments.dump):
        if position not in range(len(values)) or not isinstance(values[position], np.ndarray):
            raise ValueError(f"--dump: got {position}, takes the position, from 0, of an array among the --arg")


def _run(arguments: argparse.Namespace) -> int:
    module, lines = _load(arguments.file, arguments.target, tuple(arguments.flag))
    kernel = arguments.kernel
    if kernel is None:
        if len(module.kernels) != 1:
            raise ValueError(f"--kernel: one of {', '.join(module.kernels)}")
        kernel = next(iter(module.kernels))
    rng = np.random.default_rng(arguments.seed)
    values = []
    for position, spec in enumerate(arguments.arg):
        if ":" in spec:
            values.append(_array(f"--arg {position}", spec, rng))
        else:
            values.append(_number(f"--arg {position}", spec))
    _check_wishes(arguments, values)
    options = Options(
        order=arguments.order,
        seed=arguments.seed,
        detect=arguments.detect,
        threads=arguments.threads,
        guard_bytes=1 << 16,
        profile=True,
        trace=arguments.trace,
        stop_line=arguments.stop,
        dump_shared=arguments.dump_shared,
        dump_tensor=arguments.dump_tensor,
    )
    report = module.launch(
        kernel,
        arguments.grid,
        arguments.block,
        values,
        cluster=arguments.cluster,
        smem_bytes=arguments.smem,
        options=options,
    )
    if report.printf:
        print(report.printf, end="")
    if arguments.stop is not None:
        raise ValueError(f"--stop: no warp came to an instruction of PTX line {arguments.stop}")
    print(report.table())
    for line, count in sorted(report.by_line.items(), key=lambda item: -item[1])[: arguments.lines]:
        print(f"{count:>12}  {line:>6}  {lines[line - 1].strip()}")
    for position, first, count in ((*dump, *_DUMP[len(dump) :])[:3] for dump in arguments.dump):
        part = values[position][first : first + count]
        shown = np.array2string(part, threshold=max(part.size, 1))
        print(f"argument {position}, {part.size} of {values[position].size} elements from {first} on: {shown}")
    return 0


def main(argv: list[str] | None = None) -> int:
    """Run the command; 1 when a detector fires or the file cannot be compiled, 2 for arguments that do not fit."""
    arguments = _parser().parse_args(argv)
    try:
        if arguments.command == "run":
            return _run(arguments)
        module, _ = _load(arguments.file, "sm_90a", ())
        for kernel in module.kernels.values():
            params = ", ".join(f".{p.type}[{p.size}] {p.name}" for p in kernel.params)
            print(f"{kernel.name}({params}): {kernel.instructions} instructions, {kernel.shared_bytes} bytes shared")
        return 0
    except (EmulatorError, BuildError) as error:
        print(error, file=sys.stderr)
        return 1
    except (OSError, KeyError, TypeError, ValueError, UnsupportedArchError) as error:
        # str() of a KeyError would quote its sentence.
        print(f"error: {error.args[0] if isinstance(error, KeyError) else error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
