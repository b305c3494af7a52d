"""What one run is: every number that its weights depend on, checked before anything is made."""

from dataclasses import asdict, dataclass

# torch's own operations give bits that belong to a number of threads, so it is fixed: then the hashes do not depend on
# how many cores there are. The cores are used by the runs of the proofs, side by side.
THREADS = 1


@dataclass(frozen=True)
class Config:
    """Settings of a run. Two runs with equal settings, data, versions and kind of device end with equal weights."""

    steps: int = 110
    width: int = 128
    layers: int = 2
    head_dim: int = 128
    tokens: int = 2048
    max_document: int = 1024
    learning_rate: float = 6e-3
    seed: int = 0

    def __post_init__(self):
        for name, least in (("steps", 2), ("layers", 1), ("tokens", 64), ("max_document", 16)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}: got {getattr(self, name)}, takes {least} or more")
        if self.head_dim < 16 or self.head_dim % 16:
            raise ValueError(f"head_dim: got {self.head_dim}, takes a positive multiple of 16")
        if self.width < self.head_dim or self.width % self.head_dim:
            raise ValueError(f"width: got {self.width}, takes a positive multiple of head_dim, {self.head_dim}")
        if self.width % 32:
            raise ValueError(f"width: got {self.width}, takes a multiple of 32")
        if self.max_document > self.tokens:
            raise ValueError(f"max_document: got {self.max_document}, takes at most tokens, {self.tokens}")
        if not 0.0 < self.learning_rate < 1.0:
            raise ValueError(f"learning_rate: got {self.learning_rate}, takes a value between 0 and 1")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed: got {self.seed}, takes 0 to 2**63 - 1")

    @property
    def key_heads(self) -> int:
        """Number of key heads; every one of them serves two value heads."""
        return self.width // self.head_dim

    @property
    def value_heads(self) -> int:
        """Number of value heads."""
        return 2 * self.key_heads

    def as_dict(self) -> dict:
        """The settings as plain values."""
        return asdict(self)
