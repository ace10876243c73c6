"""Which requests take part in the next step, and with how many tokens: continuous batching with chunked prefill.

A step is bounded by `max_batch_tokens`. First every decoding request gets its one token (decode first: nobody's text
stalls because a long prompt arrived), then prompts take what is left of the budget, first come, first served; a prompt
that does not fit is cut and goes on in the next step. Where the KV cache is full, the youngest request is preempted:
its blocks are freed, and it computes its prompt *and the tokens it has generated* again later (vLLM's recompute).

Requests run in order of arrival: those running are always older than those waiting, and at most the youngest of those
running is still in its prompt. The rest of this file relies on it.

No torch here: scheduling is bookkeeping. Read first: options.py. Read next: kv_cache.py, batch.py.
"""

from collections import deque
from dataclasses import dataclass, field

from nanograph.options import SamplingParams


@dataclass(eq=False)
class Request:
    """One prompt on its way. token_ids is prompt and generated tokens together; the first num_computed are in the KV
    cache."""

    # Filled by whoever submits it.
    request_id: str
    token_ids: list[int]
    params: SamplingParams
    seed: int
    # Kept by the scheduler.
    num_prompt: int = field(init=False)
    num_computed: int = 0
    block_table: list[int] = field(default_factory=list)
    finish_reason: str | None = None  # "stop", "length", "cancelled"

    def __post_init__(self):
        self.num_prompt = len(self.token_ids)

    @property
    def output_ids(self):
        return self.token_ids[self.num_prompt :]

    @property
    def num_uncomputed(self):
        return len(self.token_ids) - self.num_computed


class Scheduler:
    """Owns all unfinished requests.

    allocator: the KV cache's blocks (kv_cache.BlockAllocator). eos_ids: tokens that end a request. max_batch_tokens,
    max_requests: the most tokens and requests of one step. max_context: the most tokens of one request.
    """

    def __init__(self, allocator, eos_ids, max_batch_tokens, max_requests, max_context):
        self.allocator, self.eos_ids = allocator, frozenset(eos_ids)
        self.max_batch_tokens, self.max_requests, self.max_context = max_batch_tokens, max_requests, max_context
        self.running: list[Request] = []
        self.waiting: deque[Request] = deque()
        self.num_preemptions = 0

    @property
    def requests(self):
        return [*self.running, *self.waiting]

    def add(self, request):
        """Queue a request. Raises ValueError for one that could never run; the others are not touched."""
        if any(other.request_id == request.request_id for other in self.requests):
            raise ValueError(
                f"request id {request.request_id!r} is in use: choose another, or wait until it has finished"
            )
        limit = self.max_context - 1
        if not request.token_ids:
            raise ValueError("prompt is empty: give at least one token")
        if request.num_prompt > limit:
            raise ValueError(
                f"prompt has {request.num_prompt} tokens, limit {limit}: "
                f"the context holds {self.max_context}, one of which is left for a new token"
            )
        # The last token is returned, never computed: it needs no slot.
        needed = self.allocator.blocks_for(self._max_length(request) - 1)
        if needed > self.allocator.num_blocks:
            raise ValueError(
                f"request needs {needed} KV blocks (prompt {request.num_prompt} + max_new_tokens "
                f"{request.params.max_new_tokens}), the cache has {self.allocator.num_blocks}: "
                "shorten it or raise kv_blocks"
            )
        self.waiting.append(request)

    def schedule(self):
        """Choose the next step: a list of (request, num_tokens), empty when there is nothing to do.

        Every request of the list has blocks for its tokens. Only the last one may stop short of its newest token, so
        the requests that get a token from this step are a prefix of the list.
        """
        scheduled = self._schedule_decodes()
        budget = self.max_batch_tokens - len(scheduled)
        cut = [request for request in self.running if request.num_uncomputed > 1]  # the youngest, or none
        request = cut[0] if cut else self._admit(budget)
        while request:
            num_tokens = min(request.num_uncomputed, budget, self._free_slots(request))
            if num_tokens == 0:
                break
            self.allocator.grow(request.block_table, request.num_computed + num_tokens)
            scheduled.append((request, num_tokens))
            budget -= num_tokens
            request = self._admit(budget)
        return scheduled

    def _schedule_decodes(self):
        """One token for each decoding request, oldest first; where blocks are short, the youngest request gives way."""
        scheduled, index = [], 0
        while index < len(self.running):
            request = self.running[index]
            if request.num_uncomputed == 1:
                while not self.allocator.grow(request.block_table, len(request.token_ids)):
                    if self._preempt_youngest() is request:
                        break
                else:
                    scheduled.append((request, 1))
            index += 1
        return scheduled

    def _preempt_youngest(self):
        request = self.running.pop()
        self.allocator.release(request.block_table)
        request.num_computed = 0
        self.waiting.appendleft(request)
        self.num_preemptions += 1
        return request

    def _admit(self, budget):
        """Start the oldest waiting request if the step, the slots and the cache have room for all it knows; else
        None."""
        if budget == 0 or not self.waiting or len(self.running) == self.max_requests:
            return None
        if self.allocator.blocks_for(len(self.waiting[0].token_ids)) > self.allocator.num_free:
            return None
        self.running.append(self.waiting.popleft())
        return self.running[-1]

    def _free_slots(self, request):
        """Tokens for which `request` has blocks, or could have them without taking another's."""
        blocks = len(request.block_table) + self.allocator.num_free
        return self.allocator.tokens_in(blocks) - request.num_computed

    def update(self, scheduled, tokens):
        """Advance the step's requests: `tokens` are the new tokens of the first len(tokens) of them, in order.

        The only place where a request's state moves forward: a step may be run again before it.
        """
        for request, num_tokens in scheduled:
            request.num_computed += num_tokens
        for (request, _), token in zip(scheduled, tokens):
            request.token_ids.append(token)
            if token in self.eos_ids and not request.params.ignore_eos:
                self.finish(request, "stop")
            elif len(request.token_ids) == self._max_length(request):
                self.finish(request, "length")

    def _max_length(self, request):
        return min(request.num_prompt + request.params.max_new_tokens, self.max_context)

    def finish(self, request, reason):
        """End a request and free its blocks. reason: "stop", "length" or "cancelled"."""
        (self.running if request in self.running else self.waiting).remove(request)
        self.allocator.release(request.block_table)
        request.finish_reason = reason

    def cancel(self, request_id):
        """End a request before its time. Raises ValueError for an id that no unfinished request has."""
        for request in self.requests:
            if request.request_id == request_id:
                return self.finish(request, "cancelled")
        raise ValueError(f"no unfinished request has the id {request_id!r}")

    def check(self):
        """Assert that no block is lost or has two owners, and that each table fits its tokens. Callable at any
        moment."""
        self.allocator.check([request.block_table for request in self.requests])
        for request in self.requests:
            held, computed = len(request.block_table), request.num_computed
            assert held >= self.allocator.blocks_for(computed), (
                f"{request.request_id}: {held} blocks for {computed} tokens"
            )
