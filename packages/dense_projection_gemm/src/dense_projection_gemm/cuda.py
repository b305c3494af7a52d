"""The CUDA backend: which program serves a stage on the tensors' device. No architecture is served yet."""

from cake_shared.errors import BuildError

PACKAGE = "dense_projection_gemm"


def prepare(stage, problem, a, b, out):
    """The plan of a problem on CUDA tensors, and a callable that runs it.

    Raises
    ------
    UnsupportedArchError
        No program serves `stage` on the device's architecture.
    BuildError
        One is recorded that this version cannot launch.
    """
    # Here, so that importing the package does not parse what only a GPU needs.
    from cake_shared.program import program_for
    from cake_shared.target import target_of

    record = program_for(PACKAGE, stage, target_of(out.device).name)
    raise BuildError(
        f"{PACKAGE}: {record.program} is recorded for {record.architecture}, but this version has no launcher"
    )
