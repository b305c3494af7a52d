"""What a person or CI can ask of this repository: `nox -l` explains every session.

All sessions share one virtual environment, `.nox/shared`, which they make and fill on first use, so that torch is
installed once. `nox --no-venv` takes the interpreter that runs nox as it is and installs nothing: the packages are then
found in their source folders.
"""

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import nox

nox.needs_version = ">=2024.4.15"
nox.options.sessions = ["lint", "tests"]
nox.options.error_on_external_run = False

ROOT = Path(__file__).resolve().parent
SHARED_VENV = ROOT / ".nox" / "shared"
BENCH_VENV = ROOT / ".nox" / "bench"
COMPILER = ROOT / ".nox" / "compiler"
ARCHITECTURES = ("sm_90a", "sm_100a", "sm_103a", "sm_107a")
# In the order of their dependencies, so that each finds what it builds on.
PACKAGES = (
    "cake_gdn_det_train",
    "cake_gdn_train",
    "cake_gdn_train_kcp",
    "dense_projection_det_gemm",
    "dense_projection_gemm",
)
PROJECTS = (ROOT / "shared", *(ROOT / "packages" / name for name in PACKAGES))

# Not in constraints.txt: a CUDA build of torch asks for a version of its own.
TRITON = "triton==3.9.0"
REQUIREMENTS = {
    "run": ["torch", "numpy", "ninja", "apache-tvm-ffi", "matplotlib"],
    "tests": ["pytest", "pytest-xdist", "pytest-timeout", "hypothesis"],
    "lint": ["ruff"],
    "build": ["build"],
}


def without_venv() -> bool:
    """Whether the person asked for the interpreter as it is (`--no-venv` or its long form)."""
    arguments = sys.argv[1 : sys.argv.index("--")] if "--" in sys.argv else sys.argv[1:]
    joined = " ".join(arguments).replace("=", " ")
    return (
        "--no-venv" in arguments
        or "--force-venv-backend none" in joined
        or os.environ.get("NOX_FORCE_VENV_BACKEND") == "none"
    )


def cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def source_path() -> str:
    """The PYTHONPATH that finds every package in its source folder, and the examples."""
    folders = [str(project / "src") for project in PROJECTS] + [str(ROOT / "examples")]
    return os.pathsep.join(folders + [entry for entry in [os.environ.get("PYTHONPATH")] if entry])


class Environment:
    """The interpreter that a session runs on, with the requirements of its groups in place."""

    def __init__(self, session: nox.Session, *groups: str, compiler: bool = False):
        self.session = session
        self.variables = {"PYTHONPATH": source_path()}
        if without_venv():
            self.python = sys.executable
            return
        self.python = str(venv_python(SHARED_VENV))
        self.variables["PATH"] = os.pathsep.join([str(Path(self.python).parent), os.environ.get("PATH", "")])
        self._prepare(("run", *groups))
        if compiler and sys.platform == "linux":
            self._add_compiler()

    def _prepare(self, groups: tuple[str, ...]):
        marks = {group: self._mark(group) for group in groups}
        missing = [group for group in groups if _read(SHARED_VENV / f"{group}.installed") != marks[group]]
        if not missing:
            return
        base = SHARED_VENV / "base.installed"
        if _read(base) != self._mark("base"):
            shutil.rmtree(SHARED_VENV, ignore_errors=True)
            self.session.log(f"making the shared environment {SHARED_VENV.relative_to(ROOT)}")
            self.session.run(sys.executable, "-m", "venv", str(SHARED_VENV), external=True)
            base.write_text(self._mark("base"))
            missing = list(groups)
        self.session.log(f"installing what these groups need: {', '.join(missing)}")
        wanted = [line for group in missing for line in REQUIREMENTS[group]]
        # hatchling and editables first, and no isolated build after: one download instead of one per package.
        self.pip(*(["hatchling", "editables"] if "run" in missing else []), *wanted)
        if "run" in missing:
            self.pip("--no-build-isolation", *(part for project in PROJECTS for part in ("-e", str(project))))
        for group in missing:
            (SHARED_VENV / f"{group}.installed").write_text(marks[group])

    def _add_compiler(self):
        """Puts the package registry's CUDA compiler last on PATH, for architectures that the machine's own lacks."""
        needs = ROOT / "tools" / "compiler_requirements.txt"
        mark = hashlib.sha256(needs.read_bytes()).hexdigest()
        if _read(COMPILER / "compiler.installed") != mark:
            shutil.rmtree(COMPILER, ignore_errors=True)
            self.session.log("fetching the CUDA compiler")
            # In a folder of its own: torch's CUDA builds pin other versions of packages with the same names.
            pip = [self.python, "-m", "pip", "install", "-q", "--no-deps", "--target", str(COMPILER), "-r", str(needs)]
            self.session.run(*pip, external=True)
            (COMPILER / "compiler.installed").write_text(mark)
        folders = sorted(str(path) for path in COMPILER.glob("nvidia/cu*/bin"))
        self.variables["PATH"] = os.pathsep.join([self.variables["PATH"], *folders])

    def _mark(self, group: str) -> str:
        """What an installed group depends on: a group whose mark is on disk needs no second installation."""
        parts = [str(ROOT), sys.version, sys.executable]
        if group != "base":
            parts += [*REQUIREMENTS[group], (ROOT / "constraints.txt").read_text()]
        if group == "run":
            parts += [(project / "pyproject.toml").read_text() for project in PROJECTS]
            parts += [(project / "src" / project_module(project) / "_version.py").read_text() for project in PROJECTS]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def pip(self, *arguments: str):
        """Installs into the shared environment under the pins of constraints.txt."""
        constraints = str(ROOT / "constraints.txt")
        self.session.run(self.python, "-m", "pip", "install", "-q", "-c", constraints, *arguments, external=True)

    def add_triton(self):
        """Installs Triton, whose code judges the emulator, unless torch has brought the one that it needs."""
        mark = SHARED_VENV / "triton.installed"
        if without_venv() or sys.platform != "linux" or _read(mark) == TRITON:
            return
        ask = "import importlib.util, sys; sys.exit(importlib.util.find_spec('triton') is None)"
        if subprocess.run([self.python, "-c", ask], check=False).returncode:
            self.pip("--no-deps", TRITON)
        mark.write_text(TRITON)

    def run(self, *arguments: str, python: str | None = None, **variables: str):
        """Runs the interpreter with these arguments, and fails the session if it fails."""
        environment = {**self.variables, **variables}
        # Time enough on Ctrl-C for a program to write its checkpoint.
        self.session.run(
            python or self.python, *arguments, env=environment, external=True, interrupt_timeout=30, terminate_timeout=5
        )


def _read(path: Path) -> str | None:
    return path.read_text() if path.is_file() else None


def venv_python(folder: Path) -> Path:
    """The interpreter inside a virtual environment."""
    return folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def project_module(project: Path) -> str:
    """The import name of the project in this folder."""
    return "cake_shared" if project.name == "shared" else project.name


def named_packages(session: nox.Session) -> list[str]:
    """The packages named after `--`, all of them when none is; dashes are taken as underscores."""
    names = [argument.replace("-", "_") for argument in session.posargs]
    for name in names:
        if name not in PACKAGES:
            session.error(f"no package is called {name!r}; the packages are {', '.join(PACKAGES)}")
    return names or list(PACKAGES)


@nox.session(venv_backend="none")
def quickstart(session: nox.Session):
    """Train a small Gated DeltaNet on real text, then prove that the bits repeat; `-- --help` shows the options."""
    Environment(session).run("-m", "quickstart", *session.posargs)


@nox.session(venv_backend="none")
def tests(session: nox.Session):
    """Run the tests of every package on all cores; pytest's own arguments go after `--`.

    What an architecture's programs do in the emulator is tested by `test-<architecture>` and left out here.
    """
    environment = Environment(session, "tests", compiler=True)
    environment.add_triton()
    spread = ["-n", str(cores()), "--dist", "worksteal"]
    if without_venv() and importlib.util.find_spec("xdist") is None:
        session.warn("pytest-xdist is not installed here: the tests run on one core")
        spread = []
    elsewhere = ["-k", f"not (emulated and ({' or '.join(ARCHITECTURES)}))"]
    environment.run("-m", "pytest", *spread, *elsewhere, *session.posargs, OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")


def _add_architecture(arch: str):
    def architecture_test(session: nox.Session):
        environment = Environment(session, "tests", compiler=True)
        environment.run("-m", "cake_shared.testing.arch", arch, *named_packages(session), OMP_NUM_THREADS="1")

    architecture_test.__doc__ = (
        f"Compile every program for {arch}, check its budget, emulate it, and run it where such a GPU is present; "
        "packages may be named after `--`."
    )
    nox.session(architecture_test, name=f"test-{arch}", venv_backend="none")


for _arch in ARCHITECTURES:
    _add_architecture(_arch)


@nox.session(venv_backend="none")
def parity(session: nox.Session):
    """Compare each package with its deterministic twin and both with the float64 oracle."""
    Environment(session).run("-m", "cake_shared.testing.parity", *session.posargs)


@nox.session(venv_backend="none")
def lint(session: nox.Session):
    """Check style, formatting, public docstrings, the tables in the READMEs and the project's own text."""
    environment = Environment(session, "lint")
    environment.run("-m", "ruff", "check", ".")
    environment.run("-m", "ruff", "format", "--check", ".")
    environment.run("-m", "cake_shared.program", "status", "--check")
    environment.run("-m", "cake_shared.bench", "readme", "--check")
    environment.run("tools/readme.py", "--check")
    environment.run("tools/check_text.py")


@nox.session(venv_backend="none")
def build(session: nox.Session):
    """Build the wheels of all packages into dist/; `-- --arch sm_90a` also builds their CUDA modules in."""
    ahead_of_time = any(argument.startswith("--arch") for argument in session.posargs)
    environment = Environment(session, "build", compiler=ahead_of_time)
    environment.run("tools/build_wheels.py", *session.posargs)


@nox.session(venv_backend="none")
def bench(session: nox.Session):
    """Measure every package beside its peers and print the tables; results and READMEs change with `-- --write`."""
    environment = Environment(session)
    python = environment.python
    if not without_venv():
        python = peers_python(environment)
    environment.run("-m", "cake_shared.bench", "run", *session.posargs, python=python)


def peers_python(environment: Environment) -> str:
    """The interpreter of the bench environment: the peers, on top of all that the shared one has."""
    session, python = environment.session, venv_python(BENCH_VENV)
    requirements = (ROOT / "tools" / "bench_requirements.txt").read_text()
    mark = hashlib.sha256("\n".join([requirements, sys.version, str(ROOT)]).encode()).hexdigest()
    if _read(BENCH_VENV / "peers.installed") == mark:
        return str(python)
    shutil.rmtree(BENCH_VENV, ignore_errors=True)
    session.run(sys.executable, "-m", "venv", str(BENCH_VENV), external=True)
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    shared_site, bench_site = (
        subprocess.run([interpreter, "-c", ask], check=True, capture_output=True, text=True).stdout.strip()
        for interpreter in (environment.python, str(python))
    )
    (Path(bench_site) / "shared_environment.pth").write_text(f"import site; site.addsitedir({shared_site!r})\n")
    constraints = str(ROOT / "constraints.txt")
    needs = str(ROOT / "tools" / "bench_requirements.txt")
    session.run(str(python), "-m", "pip", "install", "-q", "-c", constraints, "-r", needs, external=True)
    (BENCH_VENV / "peers.installed").write_text(mark)
    return str(python)
