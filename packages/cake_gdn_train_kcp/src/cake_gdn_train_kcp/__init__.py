"""Context-parallel Gated DeltaNet training kernels: ranks pass chunk states."""

from cake_gdn_train_kcp._version import __version__
from cake_gdn_train_kcp.api import chunk_gated_delta_rule
from cake_gdn_train_kcp.plan import Shard, plan_shards

__all__ = ["Shard", "__version__", "chunk_gated_delta_rule", "plan_shards"]
