"""The errors that every package raises when the hardware, the build or a packed batch cannot be served."""


class UnsupportedArchError(RuntimeError):
    """No program serves the requested stage on this architecture; the message names the package and the way out."""


class BuildError(RuntimeError):
    """A module could not be compiled or loaded; the message names the reason and the remedy."""


class MalformedPackError(ValueError):
    """`cu_seqlens` held on a device turned out to be malformed; raised at the first call after the device noticed."""
