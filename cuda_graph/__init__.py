"""Graph tiers for ragged windows. Imports torch only."""

from cuda_graph.packing import PackedRows, pack_windows
from cuda_graph.pool import Buffer, GraphPool
from cuda_graph.tiers import Tier, TierGrid

__all__ = ["Buffer", "GraphPool", "PackedRows", "Tier", "TierGrid", "pack_windows"]
