"""Mode eager: launch every kernel, every step. The baseline, and the meaning that the other two must reproduce bit for
bit.

Read next: full.py.
"""

from nanograph.executors import count_operations, smallest_bucket


class EagerExecutor:
    """Calls the model. buckets: pad the batch to these for comparisons at equal shapes; None leaves it as it is."""

    def __init__(self, model, batch, stats, buckets=None):
        self.model, self.batch, self.stats, self.buckets = model, batch, stats, buckets
        self.graphs = {}  # for good

    def bucket_for(self, num_tokens):
        return smallest_bucket(self.buckets, num_tokens) if self.buckets else None

    def run(self):
        """Logits of the batch's step, float32 [num_requests, vocab]."""
        self.stats.eager_steps += 1
        return self.model(self.batch).float()[: self.batch.num_requests]

    def count_launches(self):
        """What the CPU launches to compute the batch's step once more."""
        return count_operations(self.run)

    def graph_bytes(self):
        return 0

    def capture_ahead(self):
        """Nothing to capture."""
