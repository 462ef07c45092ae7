"""Memory of paged key-value caches: which block belongs to whom, and the blocks themselves.

`BlockAllocator` is the policy alone (no device); `PagedKVCache` puts it on a device's memory.
"""

from __future__ import annotations

from cki.memory.blocks import BlockAllocator as BlockAllocator
from cki.memory.kv_cache import PagedKVCache as PagedKVCache

__all__ = ["BlockAllocator", "PagedKVCache"]
