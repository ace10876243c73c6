"""The input buffers of a step, allocated once: what a captured graph reads must always lie at the same address.

All inputs are int32 (float32 ones keep their bits) and lie packed, one after the other, in one pinned host buffer with
a device buffer of the same layout, so that a step needs ONE copy from host to device. `fill` writes a step into them,
padded to a bucket of rows; the attributes are views of the device buffer, cut to that bucket.

Read first: scheduler.py, whose choice is written here. Read next: model.py, which reads it.
"""

import ctypes
from array import array
from itertools import accumulate

import torch

from nanograph import capture
from nanograph.kv_cache import BLOCK_SIZE, TRASH_BLOCK
from nanograph.sampling import uniform

FLOATS = ("temperature", "top_p", "uniform")


class Batch:
    """One step: T tokens of R requests, laid end to end. Static: the same object and buffers serve every step.

    Device tensors, cut to the bucket's rows and to its request slots (the fewest of rows and max_requests):

    - per row, int32: input_ids, positions, slot_mapping (flat slot of the KV cache that the row's key and value go to);
    - per slot: cu_seqlens_q int32 [slots + 1], seq_lens int32 (0 for an unused slot), block_tables int32
      [slots, blocks per request], logits_indices int32 (the request's last row);
    - per slot, for sampling: temperature, top_p, uniform float32; top_k int32.

    On the host, of the live step: num_tokens, num_requests, num_rows (the bucket), query_lens.
    """

    def __init__(self, max_tokens, max_requests, max_context, kv_cache, device):
        self.max_requests, self.max_context, self.kv_cache, self.device = max_requests, max_context, kv_cache, device
        self.blocks_per_request = -(-max_context // BLOCK_SIZE)
        rows = dict.fromkeys(("input_ids", "positions", "slot_mapping"), max_tokens)
        slots = dict.fromkeys(("seq_lens", "logits_indices", "temperature", "top_k", "top_p", "uniform"), max_requests)
        # Tables come last, so that a copy can stop after their used part.
        tables = {"block_tables": max_requests * self.blocks_per_request}
        lengths = {**rows, "cu_seqlens_q": max_requests + 1, **slots, **tables}
        self.offsets = dict(zip(lengths, accumulate(lengths.values(), initial=0)))
        size = sum(lengths.values())
        self.staging = torch.zeros(size, dtype=torch.int32, pin_memory=device.type == "cuda")
        self.device_buffer = torch.zeros(size, dtype=torch.int32, device=device)
        self.copied = torch.cuda.Event() if device.type == "cuda" else None
        self._host = memoryview((ctypes.c_int32 * size).from_address(self.staging.data_ptr())).cast("B").cast("i")
        self._host_floats = self._host.cast("B").cast("f")
        self._buffers = {
            name: self.device_buffer[start : start + lengths[name]] for name, start in self.offsets.items()
        }
        self._buffers["block_tables"] = self._buffers["block_tables"].view(max_requests, -1)
        self._buffers |= {name: self._buffers[name].view(torch.float32) for name in FLOATS}
        self.num_tokens = self.num_requests = self._longest = 0
        self._cut(max_tokens, max_requests)

    def fill(self, scheduled, bucket=None):
        """Write a step, [(request, num_tokens)], padded to `bucket` rows (None: not padded), and copy it to the device.

        Padded rows are token 0 at position 0 and write their key and value to the trash block. Unused slots have length
        0.
        """
        if self.copied is not None:
            self.copied.synchronize()  # the last step's copy may still be reading the staging buffer
        self.query_lens = [num_tokens for _, num_tokens in scheduled]
        self.num_tokens, self.num_requests = sum(self.query_lens), len(scheduled)
        num_rows = bucket or self.num_tokens
        self._cut(num_rows, min(bucket, self.max_requests) if bucket else self.num_requests)
        input_ids, positions, slot_mapping = [], [], []
        for request, num_tokens in scheduled:
            start, end, table = request.num_computed, request.num_computed + num_tokens, request.block_table
            input_ids += request.token_ids[start:end]
            positions += range(start, end)
            slot_mapping += [table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(start, end)]
        padding = num_rows - self.num_tokens
        self._put("input_ids", input_ids + [0] * padding)
        self._put("positions", positions + [0] * padding)
        self._put("slot_mapping", slot_mapping + [TRASH_BLOCK * BLOCK_SIZE] * padding)
        self._fill_slots([request for request, _ in scheduled])
        used = self.offsets["block_tables"] + self.block_tables.numel()
        self.device_buffer[:used].copy_(self.staging[:used], non_blocking=True)
        if self.copied is not None:
            self.copied.record()

    def _fill_slots(self, requests):
        unused = self.seq_lens.shape[0] - len(requests)
        ends = list(accumulate(self.query_lens, initial=0))
        seq_lens = [request.num_computed + count for request, count in zip(requests, self.query_lens)]
        self._longest = max(seq_lens, default=0)
        self._put("cu_seqlens_q", ends + [self.num_tokens] * unused)
        self._put("seq_lens", seq_lens + [0] * unused)
        self._put("logits_indices", [end - 1 for end in ends[1:]] + [0] * unused)
        self._put("temperature", [request.params.temperature for request in requests])
        self._put("top_k", [min(request.params.top_k or 0, 2**31 - 1) for request in requests])
        self._put("top_p", [request.params.top_p for request in requests])
        steps = [len(request.token_ids) - request.num_prompt for request in requests]
        self._put("uniform", [uniform(request.seed, step) for request, step in zip(requests, steps)])
        for slot, request in enumerate(requests):
            self._put("block_tables", request.block_table, slot * self.blocks_per_request)

    def _put(self, name, values, at=0):
        start = self.offsets[name] + at
        host, code = (self._host_floats, "f") if name in FLOATS else (self._host, "i")
        host[start : start + len(values)] = array(code, values)

    def _cut(self, num_rows, num_slots):
        """Point the attributes at the first rows and slots of their buffers. The addresses stay."""
        self.num_rows = num_rows
        for name in ("input_ids", "positions", "slot_mapping"):
            setattr(self, name, self._buffers[name][:num_rows])
        for name in ("seq_lens", "logits_indices", "block_tables", "temperature", "top_k", "top_p", "uniform"):
            setattr(self, name, self._buffers[name][:num_slots])
        self.cu_seqlens_q = self._buffers["cu_seqlens_q"][: num_slots + 1]

    @property
    def max_seq_len(self):
        """A host bound on seq_lens. Inside a graph a number is frozen, so there it is the worst case, not the live
        one."""
        return self.max_context if capture.is_recording() else self._longest

    def addresses(self):
        """Name and address of each static buffer, for the check that they have not moved since a capture."""
        names = ("input_ids", "positions", "slot_mapping", "cu_seqlens_q", "seq_lens", "block_tables", "logits_indices")
        return {name: getattr(self, name).data_ptr() for name in names} | {"kv_cache": self.kv_cache.data.data_ptr()}
