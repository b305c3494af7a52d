"""Command line of the emulator, for a person who debugs.

`run FILE.ptx|FILE.cu` runs a kernel, `list` shows the kernels of a file, `ptx FILE.cu` writes the PTX that `run` takes.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from pathlib import Path

import numpy as np

from cake_shared.emulator import EmulatorError, Module, Options
from cake_shared.emulator.arguments import SYNTAX, Array, parse
from cake_shared.emulator.compile import compile_to_ptx
from cake_shared.emulator.params import region_of, short_name
from cake_shared.errors import BuildError, UnsupportedArchError
from cake_shared.target import TARGETS

# What --dump prints where it is not said: first element, number of elements.
_DUMP = (0, 64)


def _sizes(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"takes whole numbers with commas between, got {text!r}") from None


def _dump(text: str) -> tuple[str, int, int]:
    array, *rest = text.split(",")
    sizes = _sizes(",".join(rest)) if rest else ()
    if len(sizes) > 2 or any(size < 0 for size in sizes):
        raise argparse.ArgumentTypeError(f"takes N[.MEMBER][,FIRST[,COUNT]], got {text!r}")
    return (array, *sizes, *_DUMP[len(sizes) :])


def _pair(text: str) -> tuple[int, int]:
    values = _sizes(text)
    if len(values) != 2:
        raise argparse.ArgumentTypeError(f"takes two whole numbers with a comma between, got {text!r}")
    return values[0], values[1]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m cake_shared.emulator", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="run one kernel and print its counters")
    _add_file(run, "FILE.ptx or FILE.cu")
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
        help=SYNTAX,
    )
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
    run.add_argument(
        "--stop", metavar="[FILE.cu:]LINE", help="stop when a line of the PTX or of a source file is reached"
    )
    run.add_argument(
        "--dump",
        type=_dump,
        action="append",
        default=[],
        metavar="N[.MEMBER][,FIRST[,COUNT]]",
        help="print the array of argument N afterwards, COUNT elements (64) from FIRST (0) on",
    )
    run.add_argument("--dump-shared", type=_pair, metavar="OFFSET,BYTES", help="with --stop: print shared memory there")
    run.add_argument("--dump-tensor", type=_pair, metavar="COLUMN,COUNT", help="with --stop: print tensor memory there")
    run.add_argument("--lines", type=int, default=0, metavar="N", help="print the N PTX lines executed most often")
    listing = commands.add_parser("list", help="list the kernels of a file, and what keeps one from being run")
    _add_file(listing, "FILE.ptx or FILE.cu")
    ptx = commands.add_parser("ptx", help="write the PTX of a .cu file, whose lines --stop and messages name")
    _add_file(ptx, "FILE.cu")
    ptx.add_argument("--out", type=Path, help="where to (standard output)")
    return parser


def _add_file(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument("file", type=Path, help=what)
    parser.add_argument("--target", help="architecture; by default a .ptx file's own, sm_90a for a .cu file")
    parser.add_argument("--flag", action="append", default=[], help="further flag for nvcc, as --flag=-DNAME")


def _text(arguments: argparse.Namespace) -> tuple[str, str, str]:
    """PTX, its name, and the target it runs on."""
    path = arguments.file
    if path.suffix == ".cu":
        target = arguments.target or "sm_90a"
        return compile_to_ptx(str(path), target, tuple(arguments.flag))[0], path.with_suffix(".ptx").name, target
    if arguments.flag:
        raise ValueError(f"--flag: goes to nvcc, which a {path.suffix} file does not meet")
    text = path.read_text()
    own = re.search(r"^\s*\.target\s+(\w+)", text, re.MULTILINE)
    named = own is not None and own[1] in TARGETS
    return text, path.name, arguments.target or (own[1] if named else "sm_90a")


def _stop_line(spec: str, text: str) -> int:
    """PTX line of `LINE`, or of the first instruction of `FILE:LINE` by the text's line information."""
    file, _, line = spec.rpartition(":")
    if not line.isdecimal() or int(line) == 0:
        raise ValueError(f"--stop: takes LINE or FILE:LINE, counted from 1, got {spec!r}")
    if not file:
        return int(line)
    names = dict(re.findall(r'^\s*\.file\s+(\d+)\s+"([^"]*)"', text, re.MULTILINE))
    wanted = {index for index, name in names.items() if name == file or name.endswith("/" + file)}
    if not wanted:
        raise ValueError(f"--stop: no source {file}; known are {', '.join(sorted(names.values())) or 'none'}")
    rows = text.splitlines()
    for at, row in enumerate(rows):
        loc = re.match(r"\s*\.loc\s+(\d+)\s+(\d+)\s", row)
        if loc and loc[1] in wanted and loc[2] == line:
            code = (k for k in range(at + 1, len(rows)) if re.match(r"\s*[@a-z]", rows[k]))
            return next(code) + 1
    raise ValueError(f"--stop: no instruction is of {spec}")


def _check_wishes(arguments: argparse.Namespace, arrays: dict[str, Array]) -> None:
    """Raise for what the command line asks to see and the launch does not have."""
    ctas, threads = math.prod(arguments.grid), math.prod(arguments.block)
    if arguments.trace is not None:
        for what, index, limit in zip(("CTA", "warp"), arguments.trace, (ctas, -(-threads // 32)), strict=False):
            if not 0 <= index < limit:
                raise ValueError(f"--trace: got {what} {index}, takes 0 to {limit - 1}")
    for name in ("dump_shared", "dump_tensor"):
        if getattr(arguments, name) is not None and arguments.stop is None:
            raise ValueError(f"--{name.replace('_', '-')}: takes effect at a stop, and --stop is not given")
    for array, _, _ in arguments.dump:
        if array not in arrays:
            known = ", ".join(arrays) or "none"
            raise ValueError(f"--dump: got {array}, takes the position, from 0, of an array among the --arg ({known})")


def _run(arguments: argparse.Namespace) -> int:
    text, name, target = _text(arguments)
    module, lines = Module.from_ptx(text, target, name), text.splitlines()
    kernel = arguments.kernel
    if kernel is None:
        if len(module.kernels) != 1:
            known = ", ".join(kernel.title for kernel in module.kernels.values())
            raise ValueError(f"--kernel: the file has {len(module.kernels)} kernels, name one: {known}")
        kernel = next(iter(module.kernels))
    stop = None if arguments.stop is None else _stop_line(arguments.stop, text)
    options = Options(
        order=arguments.order,
        seed=arguments.seed,
        detect=arguments.detect,
        threads=arguments.threads,
        guard_bytes=1 << 16,
        profile=True,
        trace=arguments.trace,
        stop_line=stop,
        dump_shared=arguments.dump_shared,
        dump_tensor=arguments.dump_tensor,
    )
    rng = np.random.default_rng(arguments.seed)
    given = [parse(position, spec, rng) for position, spec in enumerate(arguments.arg)]
    arrays = {name: array for argument in given for name, array in argument.arrays.items()}
    _check_wishes(arguments, arrays)
    hidden = [region_of(array.data, f"--arg {name}") for name, array in arrays.items() if "." in name]
    report = module.launch(
        kernel,
        arguments.grid,
        arguments.block,
        [argument.value for argument in given],
        allocations=hidden,
        cluster=arguments.cluster,
        smem_bytes=arguments.smem,
        options=options,
    )
    if report.printf:
        print(report.printf, end="")
    if arguments.stop is not None:
        raise ValueError(f"--stop: no lane executed an instruction of PTX line {stop}")
    print(report.table())
    for line, count in sorted(report.by_line.items(), key=lambda item: -item[1])[: arguments.lines]:
        print(f"{count:>12}  {line:>6}  {lines[line - 1].strip()}")
    for name, first, count in arguments.dump:
        print(f"argument {name}, {arrays[name].shown(first, count)}")
    return 0


def _list(arguments: argparse.Namespace) -> int:
    text, name, target = _text(arguments)
    module = Module.from_ptx(text, target, name)
    for kernel in module.kernels.values():
        params = ", ".join(f".{p.type}[{p.size}] {short_name(p.name)}" for p in kernel.params)
        facts = f"{kernel.instructions} instructions, {kernel.shared_bytes} bytes shared"
        print(f"{kernel.name}({params}): {kernel.error or facts}")
        if kernel.demangled != kernel.name:
            print(f"    {kernel.demangled}")
    return int(any(kernel.error for kernel in module.kernels.values()))


def _ptx(arguments: argparse.Namespace) -> int:
    if arguments.file.suffix != ".cu":
        raise ValueError(f"file: takes a .cu file, got {arguments.file}")
    text = _text(arguments)[0]
    if arguments.out is None:
        print(text, end="")
    else:
        arguments.out.write_text(text)
    return 0


def main(argv: list[str] | None = None) -> int:
    """Run the command; 1 when a detector fires or the file cannot be compiled, 2 for arguments that do not fit."""
    arguments = _parser().parse_args(argv)
    try:
        return {"run": _run, "list": _list, "ptx": _ptx}[arguments.command](arguments)
    except (EmulatorError, BuildError) as error:
        print(error, file=sys.stderr)
        return 1
    except (OSError, KeyError, TypeError, ValueError, UnsupportedArchError) as error:
        # str() of a KeyError would quote its sentence.
        print(f"error: {error.args[0] if isinstance(error, KeyError) else error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
