"""LLM: the loop that ties scheduler, batch, executor and sampler together. One step, whatever the mode:

    Scheduler.schedule()   which requests, how many tokens of each
    Batch.fill()           their inputs in static buffers, padded to the bucket, in one copy
    executor.run()         logits [num_requests, vocab]
    sample()               tokens
    Scheduler.update()     the only place where a request moves forward

Read first: scheduler.py, batch.py, executors/. Read next: generate.py, a command line over this.
"""

import secrets
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from itertools import count
from time import perf_counter

import torch

from nanograph.batch import Batch
from nanograph.checkpoint import choose_dtype, find_folder, load_model, random_model, read_config, read_dtype
from nanograph.executors import Stats
from nanograph.executors.breakable import BreakableExecutor
from nanograph.executors.eager import EagerExecutor
from nanograph.executors.full import FullExecutor
from nanograph.kv_cache import BlockAllocator, KVCache
from nanograph.model import GPT
from nanograph.options import EngineOptions, SamplingParams, check_type
from nanograph.sampling import sample
from nanograph.scheduler import Request, Scheduler
from nanograph.tokenizer import Detokenizer, load_tokenizer

DEFAULT_MAX_CONTEXT = 8192
CPU_KV_BYTES = 2**30  # the KV cache's default limit on the CPU; pages are taken only when written


class RequestsRefused(ValueError):
    """Some prompts of a call were refused. The others have been completed: `results` holds them, None where refused."""

    def __init__(self, errors, results):
        super().__init__("; ".join(f"prompt {index + 1}: {error}" for index, error in errors.items()))
        self.results = results


class Result:
    """A request as its submitter sees it, live: it grows with each step until `finish_reason` is set.

    request_id; token_ids: the generated tokens, an end-of-text token included; finish_reason: None while running, then
    "stop" (an end-of-text token or stop string), "length" or "cancelled"; seed: the one given, or drawn at submission.
    """

    def __init__(self, request, llm):
        self._request, self._llm = request, llm
        self._num_taken = 0
        self._detokenizer = None

    request_id = property(lambda self: self._request.request_id)
    finish_reason = property(lambda self: self._request.finish_reason)
    seed = property(lambda self: self._request.seed)
    token_ids = property(lambda self: self._request.output_ids)

    def _new_detokenizer(self):
        return Detokenizer(self._llm.tokenizer, self._request.params.stop)

    @property
    def text(self):
        """The whole text so far, up to a stop string. Raises ValueError where the model has no known vocabulary."""
        detokenizer = self._new_detokenizer()
        return "".join(map(detokenizer.push, self.token_ids)) + detokenizer.finish()

    def new_text(self):
        """What has become certain since the last call: no half character, nothing that may begin a stop string.

        The pieces of a finished request, joined, are `text`. Raises ValueError as `text` does.
        """
        if self._detokenizer is None:
            self._detokenizer = self._new_detokenizer()
        new_ids = self.token_ids[self._num_taken :]
        self._num_taken += len(new_ids)
        piece = "".join(map(self._detokenizer.push, new_ids))
        return piece + self._detokenizer.finish() if self.finish_reason else piece


class LLM:
    """An inference engine over one model: LLM(model="nano", mode="breakable", device="auto", **options).

    The options are those of options.EngineOptions. Raises ValueError for an option or a checkpoint that it cannot use.

    stats: counts since the start (executors.Stats). scheduler, batch, executor: the parts, for those who want to look.
    """

    def __init__(self, model="nano", mode="breakable", device="auto", **options):
        self.options = options = EngineOptions(model, mode, device, **options)
        self.device = pick_device(options.device if not isinstance(model, GPT) else model.head.weight.device)
        self._folder = None if isinstance(model, GPT) else find_folder(model, options.random_weights)
        self.model = model if isinstance(model, GPT) else self._load()
        self.config = self.model.config
        self.max_context = self._max_context(self.model.max_context)
        self._stats = Stats()
        try:
            self._make_buffers()
        except RuntimeError as error:
            raise ValueError("no memory for the buffers: lower max_batch_tokens, max_requests or kv_blocks") from error
        self._make_executor()
        self._ids = count()
        self._results = {}  # request_id -> Result, while unfinished
        self._stop_watchers = {}  # request_id -> Detokenizer, of requests with stop strings

    def _load(self):
        options, config = self.options, read_config(self._folder)
        max_context = self._max_context(config.max_positions)
        dtype = choose_dtype(options.dtype, read_dtype(self._folder), config, self.device)
        ops = load_kernels(options.kernels, self.device)
        if options.random_weights:
            return random_model(config, ops, max_context, self.device, dtype)
        return load_model(self._folder, config, ops, max_context, self.device, dtype)

    def _max_context(self, most):
        asked = self.options.max_context
        if asked is not None and asked > most:
            raise ValueError(f"max_context {asked} exceeds the model's {most} positions")
        return asked or min(most, DEFAULT_MAX_CONTEXT)

    def _make_buffers(self):
        options, dtype = self.options, self.model.embedding.weight.dtype
        max_requests = min(options.max_requests, options.max_batch_tokens)
        kv_blocks = options.kv_blocks or self._default_kv_blocks(max_requests, dtype)
        self.kv_cache = KVCache(self.config, kv_blocks, dtype, self.device)
        limits = options.max_batch_tokens, max_requests, self.max_context
        self.batch = Batch(*limits, self.kv_cache, self.device)
        self.scheduler = Scheduler(BlockAllocator(kv_blocks), self.config.eos_ids, *limits)

    def _default_kv_blocks(self, max_requests, dtype):
        """Blocks for every slot at full context, if they fit: on CUDA in 80 % of what the weights left free."""
        wanted = max_requests * BlockAllocator.blocks_for(self.max_context)
        limit = CPU_KV_BYTES if self.device.type == "cpu" else int(0.8 * torch.cuda.mem_get_info(self.device)[0])
        return max(1, min(wanted, limit // KVCache.bytes_per_block(self.config, dtype)))

    @torch.no_grad()
    def _make_executor(self):
        options, parts = self.options, (self.model, self.batch, self._stats)
        if options.mode == "eager":
            self.executor = EagerExecutor(*parts, options.buckets if options.pad_to_bucket else None)
        elif options.mode == "full":
            self.executor = FullExecutor(*parts, options.buckets)
        else:
            self.executor = BreakableExecutor(*parts, options.buckets, options.breaks)
        if options.capture == "ahead":
            self.executor.capture_ahead()

    @cached_property
    def tokenizer(self):
        """Loaded when text has to be encoded or decoded. Raises ValueError where the vocabulary fits no known
        encoding."""
        if self._folder is None:
            raise ValueError("a model passed as an object has no vocabulary: use token ids")
        return load_tokenizer(self._folder, self.config.vocab_size)

    @property
    def stats(self):
        """Counts since the start: executors.Stats."""
        self._stats.graph_bytes = self.executor.graph_bytes()
        return self._stats

    @torch.no_grad()
    def count_launches(self):
        """What the CPU launches to compute the last step once more: segments of graphs, and operations outside of
        them."""
        return self.executor.count_launches()

    def add(self, prompt, params=None, request_id=None):
        """Submit a prompt, a text or a list of token ids, and return its Result, which grows as `step` is called.

        Raises ValueError for a prompt that is empty, too long, out of the vocabulary or too large for the KV cache, or
        for an id in use. Nothing else is affected.
        """
        params = SamplingParams() if params is None else params
        check_type("params", params, SamplingParams, "a SamplingParams")
        check_type("prompt", prompt, (str, list, tuple), "a text or a list of token ids")
        check_type("request_id", request_id, (str, type(None)), "a string")
        token_ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else self._check_ids(prompt)
        watcher = Detokenizer(self.tokenizer, params.stop) if params.stop else None
        if request_id is None:
            request_id = next(name for name in map(str, self._ids) if name not in self._results)
        request = Request(request_id, token_ids, params, secrets.randbits(63) if params.seed is None else params.seed)
        self.scheduler.add(request)
        if watcher:
            self._stop_watchers[request_id] = watcher
        self._results[request_id] = Result(request, self)
        return self._results[request_id]

    def _check_ids(self, prompt):
        last = self.config.vocab_size - 1
        for token in prompt:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token <= last:
                raise ValueError(f"token id {token!r} is outside the vocabulary: integers from 0 to {last}")
        return list(prompt)

    def cancel(self, request_id):
        """End an unfinished request: its result keeps what it has. Raises ValueError for an unknown id."""
        self.scheduler.cancel(request_id)
        self._forget(request_id)

    def _forget(self, request_id):
        del self._results[request_id]
        self._stop_watchers.pop(request_id, None)

    @torch.no_grad()
    def step(self):
        """Compute one step. Returns the Results that got a token in it; an empty list also when there is nothing to
        do."""
        started = perf_counter()
        scheduled = self.scheduler.schedule()
        if not scheduled:
            return []
        num_tokens = sum(count for _, count in scheduled)
        kind = step_kind(scheduled)
        self.batch.fill(scheduled, self.executor.bucket_for(num_tokens))
        logits = self.executor.run()
        advanced = [request for request, count in scheduled if count == request.num_uncomputed]
        tokens = self._sample(logits, advanced)
        self.scheduler.update(scheduled, tokens)
        self._stats.count_step(kind, num_tokens, self.batch.num_rows, perf_counter() - started)
        return [self._settle(request) for request in advanced]

    def _sample(self, logits, requests):
        """New tokens of the first len(requests) rows. Reading them is the step's one wait for the device."""
        rows, batch = len(requests), self.batch
        if all(request.params.temperature == 0 for request in requests):
            return logits[:rows].argmax(-1).tolist() if rows else []
        fields = (batch.temperature, batch.top_k, batch.top_p, batch.uniform)
        return sample(logits[:rows], *(field[:rows] for field in fields)).tolist()

    def _settle(self, request):
        """After a request's new token: end it at a stop string, and forget it once it has ended."""
        result, watcher = self._results[request.request_id], self._stop_watchers.get(request.request_id)
        if watcher and request.finish_reason != "stop":
            watcher.push(request.token_ids[-1])
            if watcher.stopped and request.finish_reason:
                request.finish_reason = "stop"  # in the last token that it was allowed
            elif watcher.stopped:
                self.scheduler.finish(request, "stop")
        if request.finish_reason:
            self._forget(request.request_id)
        return result

    def generate(self, prompts, params=None):
        """Complete prompts: a list of texts or of lists of token ids; params: one SamplingParams for all, or one each.

        Returns their Results in order. Some refused: raises RequestsRefused, a ValueError, after completing the others.
        """
        results, errors = self._submit(prompts, params)
        for _ in self._advance(results):
            pass
        if errors:
            raise RequestsRefused(errors, results)
        return results

    def stream(self, prompts, params=None):
        """As `generate`, but yields a Result each time it has a new token. Leaving the loop early cancels what is
        unfinished."""
        results, errors = self._submit(prompts, params)
        yield from self._advance(results)
        if errors:
            raise RequestsRefused(errors, results)

    def _submit(self, prompts, params):
        """Add all prompts. Returns their Results (None where refused) and {index: error}."""
        prompts = [prompts] if isinstance(prompts, str) else list(prompts)
        params = [params] * len(prompts) if params is None or isinstance(params, SamplingParams) else list(params)
        if len(params) != len(prompts):
            raise ValueError(f"{len(params)} params for {len(prompts)} prompts: give one for all, or one each")
        results, errors = [None] * len(prompts), {}
        for index, (prompt, one) in enumerate(zip(prompts, params)):
            try:
                results[index] = self.add(prompt, one)
            except ValueError as error:
                errors[index] = error
        return results, errors

    def _advance(self, results):
        """Step until `results` have ended, yielding each that has a new token; cancel them if the caller goes away.

        Tokens also count where another loop over this engine took the step.
        """
        seen = {result: 0 for result in results if result}  # how many tokens the caller knows; until it knows all
        try:
            while seen:
                self.step()
                for result in list(seen):
                    if len(result.token_ids) > seen[result]:
                        seen[result] = len(result.token_ids)
                        yield result
                    if result.finish_reason and len(result.token_ids) == seen[result]:
                        del seen[result]
        finally:
            for result in seen:
                if result.finish_reason is None:
                    self.cancel(result.request_id)


def pick_device(name):
    """The torch.device for "auto", "cpu", "cuda" … Raises ValueError for an unknown one, or CUDA where there is
    none."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ValueError(f"unknown device {name!r}: choose from auto, cpu, cuda")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"device {name} asked for, but torch sees {torch.cuda.device_count()} CUDA GPUs: use device cpu"
        )
    if device.type == "cuda":  # with its number, also where none was given
        device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
    return device


def load_kernels(name, device):
    """A set of kernels, by default the fastest that the device can run. Raises ValueError for Triton without CUDA."""
    if name == "triton" and device.type != "cuda":
        raise ValueError("kernels triton need a CUDA GPU: use kernels reference")
    fastest = "triton" if device.type == "cuda" and find_spec("triton") else "reference"
    return import_module(f"nanograph.kernels.{name or fastest}")


def step_kind(scheduled):
    """ "prefill", "decode" or "mixed": requests computing their prompt, generating, or both."""
    decoding = {request.num_computed >= request.num_prompt for request, _ in scheduled}
    return "mixed" if len(decoding) == 2 else "decode" if True in decoding else "prefill"
