"""A small byte-level language model of Gated DeltaNet layers, made of what the packages offer.

A layer is Gated DeltaNet's own block (Yang et al., arXiv 2412.06464): one fused projection for queries, keys, values,
output gate, decay and write strength; a short causal convolution; the recurrence; a gated norm; and an MLP. Projections
and recurrence work in BF16, as they do on a GPU; norms and the sum of the layers' outputs are kept in FP32, and the
projections add their weights' gradients into FP32 buffers.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from cake_gdn_det_train import chunk_gated_delta_rule
from dense_projection_det_gemm import DenseProjection
from quickstart.config import Config
from quickstart.data import Pack

VOCABULARY = 256
CONVOLUTION = 4


class GatedDeltaNet(nn.Module):
    """The mixing half of a layer, `[1, T, width]` to `[1, T, width]`, with two value heads to every key head."""

    def __init__(self, config: Config, backend: str):
        super().__init__()
        self.config, self.backend = config, backend
        heads, value_heads, dim = config.key_heads, config.value_heads, config.head_dim
        self.mixed = 2 * heads * dim + value_heads * dim
        self.sizes = [self.mixed, value_heads * dim, value_heads, value_heads]
        # Projections take widths that are multiples of 8; what that adds goes unused.
        self.sizes.append(-sum(self.sizes) % 8)
        self.project_in = projection(config.width, sum(self.sizes))
        self.convolution = nn.Parameter(torch.zeros(CONVOLUTION, self.mixed))
        self.A_log = nn.Parameter(torch.zeros(value_heads))
        self.dt_bias = nn.Parameter(torch.zeros(value_heads))
        self.norm = nn.Parameter(torch.ones(dim))
        self.project_out = projection(value_heads * dim, config.width)
        # A list here collects what enters and leaves the recurrence, for the proof of the packs.
        self.watched: list[dict[str, torch.Tensor]] | None = None

    def forward(self, x: torch.Tensor, pack: Pack) -> torch.Tensor:
        """Mixes tokens inside each document of the pack; x is BF16, so is what comes out."""
        config = self.config
        heads, value_heads, dim = config.key_heads, config.value_heads, config.head_dim
        mixed, gate, decay, strength, _ = self.project_in(x).split(self.sizes, dim=-1)
        mixed = F.silu(convolve(mixed, self.convolution, pack.position))
        q, k, v = mixed.split([heads * dim, heads * dim, value_heads * dim], dim=-1)
        arguments = {
            "q": q.unflatten(-1, (heads, dim)),
            "k": k.unflatten(-1, (heads, dim)),
            "v": v.unflatten(-1, (value_heads, dim)),
            "g": decay,
            "beta": strength,
        }
        o, _ = chunk_gated_delta_rule(
            **arguments,
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            A_log=self.A_log,
            dt_bias=self.dt_bias,
            use_beta_sigmoid_in_kernel=True,
            cu_seqlens=pack.cu_seqlens,
            backend=self.backend,
        )
        if self.watched is not None:
            self.watched.append({**arguments, "o": o})
        o = rms_norm(o, self.norm) * F.silu(gate.unflatten(-1, (value_heads, dim)))
        return self.project_out(o.flatten(-2))


class Layer(nn.Module):
    """One residual layer: mixing between tokens, then an MLP for each of them."""

    def __init__(self, config: Config, backend: str):
        super().__init__()
        self.mix_norm = nn.Parameter(torch.ones(config.width))
        self.mix = GatedDeltaNet(config, backend)
        self.mlp_norm = nn.Parameter(torch.ones(config.width))
        self.mlp_in = projection(config.width, 4 * config.width)
        self.mlp_out = projection(2 * config.width, config.width)

    def forward(self, x: torch.Tensor, pack: Pack) -> torch.Tensor:
        """`[1, T, width]` to `[1, T, width]`, FP32."""
        x = x + self.mix(rms_norm(x, self.mix_norm).bfloat16(), pack)
        gate, up = self.mlp_in(rms_norm(x, self.mlp_norm).bfloat16()).chunk(2, dim=-1)
        return x + self.mlp_out(F.silu(gate) * up)


class ByteModel(nn.Module):
    """Predicts the next byte of every document of a pack."""

    def __init__(self, config: Config, backend: str):
        super().__init__()
        self.embedding = nn.Parameter(torch.zeros(VOCABULARY, config.width))
        self.layers = nn.ModuleList(Layer(config, backend) for _ in range(config.layers))
        self.norm = nn.Parameter(torch.ones(config.width))
        self.head = projection(config.width, VOCABULARY)
        self.reset(config)

    @torch.no_grad()
    def reset(self, config: Config):
        """Draws every weight from the seed, in the order of the parameters' names, on the CPU."""
        generator = torch.Generator().manual_seed(config.seed)
        for name, parameter in sorted(self.named_parameters()):
            if name.endswith("norm"):
                parameter.fill_(1.0)
            elif name.endswith("A_log"):
                # Decays of many lengths: Gated DeltaNet's own initialisation draws A from (0, 16].
                parameter.copy_(torch.log(torch.rand(parameter.shape, generator=generator) * 15.0 + 1.0))
            elif name.endswith("dt_bias"):
                step = torch.exp(torch.rand(parameter.shape, generator=generator) * math.log(100.0) + math.log(1e-3))
                parameter.copy_(step + torch.log(-torch.expm1(-step)))
            elif name.endswith("convolution"):
                # Near the identity: a token sees itself first, its neighbours a little.
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
                parameter[0] += 1.0
            elif name.endswith("embedding"):
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
            else:
                spread = parameter.shape[1] ** -0.5
                if name.endswith(("project_out.weight", "mlp_out.weight")):
                    spread /= math.sqrt(2 * config.layers)
                if name == "head.weight":
                    spread *= 0.1
                parameter.copy_(spread * torch.randn(parameter.shape, generator=generator))

    def forward(self, pack: Pack, *, recompute: bool = True) -> torch.Tensor:
        """Logits `[1, T, 256]` BF16 of every token; layers are recomputed in the backward unless told otherwise."""
        x = self.embedding[pack.inputs]
        for layer in self.layers:
            if recompute:
                x = checkpoint(layer, x, pack, use_reentrant=False, preserve_rng_state=False)
            else:
                x = layer(x, pack)
        return self.head(rms_norm(x, self.norm).bfloat16())

    def loss(self, pack: Pack) -> torch.Tensor:
        """Mean loss in nats over the bytes of the documents; padding has no part in it."""
        used = pack.used
        logits = self(pack)[0, :used].float()
        return F.cross_entropy(logits, pack.targets[0, :used])


def projection(inputs: int, outputs: int) -> DenseProjection:
    """A projection without bias whose weight gradient goes straight into its FP32 `main_grad`."""
    return DenseProjection(inputs, outputs, bias=False, accumulate_main_grad=True)


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`x / sqrt(mean(x^2) + 1e-6) * weight` along the last dimension, in the dtype of x."""
    return F.rms_norm(x, (x.shape[-1],), weight.to(x.dtype), eps=1e-6)


def convolve(x: torch.Tensor, weight: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """Causal depthwise convolution `[1, T, C]` that stops at the start of each document.

    weight `[taps, C]`; tap j looks j tokens back. The taps are added in order, so a token's bits depend on its own
    document alone.
    """
    weight = weight.to(x.dtype)
    out = x * weight[0]
    for back in range(1, weight.shape[0]):
        earlier = F.pad(x, (0, 0, back, 0))[:, : x.shape[1]]
        inside = (position >= back)[None, :, None]
        out = out + torch.where(inside, earlier, 0.0) * weight[back]
    return out
