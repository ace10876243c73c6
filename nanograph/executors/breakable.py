"""Mode breakable: graph segments with eager operations between them, so that one of them may do what no graph can.

What this adds to full.py: the names of the operations at which the recorder breaks, a count of the breaks run, and a
warning where none was met. Read next: engine.py.
"""

import warnings

import torch
from tqdm import tqdm

from nanograph.capture import Recorder, no_garbage_collection
from nanograph.executors import count_operations, make_pool, smallest_bucket


class BreakableExecutor:
    """Replays segments and breaks; captures it where the bucket is new; runs eagerly what no bucket holds."""

    def __init__(self, model, batch, stats, buckets, breaks):
        self.model, self.batch, self.stats, self.buckets = model, batch, stats, buckets
        self.recorder = Recorder(make_pool(batch.device), breaks, max_rows=buckets[-1])
        self.graphs = {}  # bucket -> Graph; None where its capture has failed
        # Graphs share one pool, so replaying one overwrites what another returned: logits leave for a buffer outside
        # it.
        self.logits = torch.zeros(batch.max_requests, model.config.vocab_size, device=batch.device)

    def bucket_for(self, num_tokens):
        return smallest_bucket(self.buckets, num_tokens)

    def run(self):
        """Logits of the batch's step, float32 [num_requests, vocab]: a buffer that is valid until the next run."""
        bucket = self.batch.num_rows
        if bucket not in self.graphs and bucket in self.buckets:
            self.graphs[bucket] = self._capture(bucket)
        elif graph := self.graphs.get(bucket):
            graph.replay(self.batch.addresses())
            self.stats.replays += 1
            self.stats.breaks_run += len(graph.breaks)
        if self.graphs.get(bucket) is None:
            self.stats.eager_steps += 1
            self._forward()
        return self.logits[: self.batch.num_requests]

    def _forward(self):
        logits = self.model(self.batch)
        self.logits[: logits.shape[0]].copy_(logits)

    def _capture(self, bucket):
        """Capture the batch's bucket, which computes its step. A failure is reported once and leaves the bucket
        eager."""
        try:
            graph = self.recorder.capture(self._forward, self.batch.addresses())
        except Exception as error:
            warnings.warn(f"bucket {bucket} runs eagerly, its capture failed: {error}", stacklevel=2)
            return None
        if not graph.breaks:
            warnings.warn(
                f"bucket {bucket} has no break: nothing in the model is marked {sorted(self.recorder.breaks)}",
                stacklevel=2,
            )
        self.stats.captures += 1
        self.stats.breaks_run += len(graph.breaks)
        return graph

    def count_launches(self):
        """What the CPU launches to compute the batch's step once more: segments and the kernels of breaks, or every
        kernel."""
        if graph := self.graphs.get(self.batch.num_rows):
            return len(graph.segments) + sum(count_operations(step.replay) for step in graph.breaks)
        return count_operations(self._forward)

    def graph_bytes(self):
        return self.recorder.pool.held_bytes()

    def capture_ahead(self):
        """Capture all buckets, largest first: the smaller ones then fit into its memory."""
        with no_garbage_collection():
            for bucket in tqdm(reversed(self.buckets), "capturing", len(self.buckets), leave=False):
                self.batch.fill([], bucket)
                self.run()
