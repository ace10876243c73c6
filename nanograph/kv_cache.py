"""The paged KV cache: one tensor of fixed-size blocks, and the allocator that says who owns which.

A sequence's keys and values lie in blocks of BLOCK_SIZE tokens that need not be neighbours; its block table lists them
in order (vLLM's PagedAttention, Kwon et al. 2023). Block 0 belongs to nobody, ever: padded rows write there (the trash
block).

Read first: scheduler.py, which asks for blocks. Read next: batch.py.
"""

import torch

BLOCK_SIZE = 16
TRASH_BLOCK = 0


class KVCache:
    """Keys and values of all layers, allocated once: every captured graph has its address.

    data: [num_layers, 2, 1 + num_blocks, BLOCK_SIZE, num_kv_heads, head_dim], zeros, in the model's dtype.
    """

    def __init__(self, config, num_blocks, dtype, device):
        shape = (config.num_layers, 2, 1 + num_blocks, BLOCK_SIZE, config.num_kv_heads, config.head_dim)
        self.data = torch.zeros(shape, dtype=dtype, device=device)
        self._layers = [tuple(layer) for layer in self.data]

    def layer(self, index):
        """(k_cache, v_cache) of one layer, each [1 + num_blocks, BLOCK_SIZE, num_kv_heads, head_dim]."""
        return self._layers[index]

    @staticmethod
    def bytes_per_block(config, dtype):
        """Bytes that one block takes over all layers."""
        return 2 * config.num_layers * BLOCK_SIZE * config.num_kv_heads * config.head_dim * dtype.itemsize


class BlockAllocator:
    """Hands out block numbers 1 to num_blocks. Blocks freed last are handed out first: they may still be in the GPU's
    cache."""

    def __init__(self, num_blocks):
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks, 0, -1))

    @property
    def num_free(self):
        return len(self._free)

    @staticmethod
    def blocks_for(num_tokens):
        """Blocks that `num_tokens` tokens fill.

        >>> [BlockAllocator.blocks_for(n) for n in (0, 1, 16, 17)]
        [0, 1, 1, 2]
        """
        return -(-num_tokens // BLOCK_SIZE)

    @staticmethod
    def tokens_in(num_blocks):
        """Tokens that `num_blocks` blocks hold."""
        return num_blocks * BLOCK_SIZE

    def grow(self, block_table, num_tokens):
        """Lengthen `block_table` until it holds `num_tokens` tokens. False, and nothing taken, where blocks are
        short."""
        missing = self.blocks_for(num_tokens) - len(block_table)
        if missing > len(self._free):
            return False
        block_table.extend(self._free.pop() for _ in range(missing))
        return True

    def release(self, block_table):
        """Take all blocks of `block_table` back and empty it."""
        self._free.extend(reversed(block_table))
        block_table.clear()

    def check(self, block_tables):
        """Assert that free and owned blocks are all blocks, each once. Callable at any moment."""
        owned = [block for table in block_tables for block in table]
        everything = sorted(self._free + owned)
        assert everything == list(range(1, self.num_blocks + 1)), (
            f"free {self._free} + owned {owned} are not all blocks"
        )
