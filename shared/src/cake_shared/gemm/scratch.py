"""Working memory of CUDA launches."""

import torch


def scratch(size_bytes, device):
    """Allocate bytes that kernels write before they read them.

    Under `torch.use_deterministic_algorithms(True)` torch fills every new tensor; these bytes need no filling.
    """
    if torch.are_deterministic_algorithms_enabled():
        storage = torch.UntypedStorage(size_bytes, device=device)
        return torch.tensor([], dtype=torch.uint8, device=device).set_(storage, 0, (size_bytes,), (1,))
    return torch.empty(size_bytes, dtype=torch.uint8, device=device)
