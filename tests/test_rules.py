"""The fifteen rules that keep captured graphs right, each as a test that fails when the rule is broken.

A course in itself: each rule has bitten a production engine. Where a test takes `device`, it runs on the CPU tape and,
with a GPU, on CUDA graphs; a rule about CUDA's memory and streams is tested there alone.
"""

import dataclasses
import gc
import warnings

import pytest
import torch
from conftest import GPT2, NANO, make_model

from nanograph import LLM, SamplingParams
from nanograph.batch import Batch
from nanograph.capture import CaptureError, Recorder, graph_break
from nanograph.executors import make_pool
from nanograph.kernels import reference
from nanograph.kv_cache import KVCache
from nanograph.scheduler import Request

MODES = ("eager", "breakable", "full")
GREEDY = SamplingParams(temperature=0, max_new_tokens=8)
PROMPTS = [[1, 2, 3, 4, 5], [6, 7], list(range(30))]
on_both = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def engine(mode, device="cpu", config=NANO, **options):
    options = {"max_batch_tokens": 64, "pad_to_bucket": True, **options}
    return LLM(make_model(config, device), mode=mode, **options)


def record(llm):
    """Make `llm` keep a copy of every step's logits; returns the list."""
    run, logits = llm.executor.run, []

    def keep():
        result = run()
        logits.append(result.clone())
        return result

    llm.executor.run = keep
    return logits


def recorder(device, breaks=frozenset(), max_rows=8):
    return Recorder(make_pool(torch.device(device, 0) if device == "cuda" else torch.device(device)), breaks, max_rows)


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


# 1. Static addresses: a graph reads and writes the addresses of its capture.


@on_both
def test_rule_1_inputs_never_move_and_a_moved_input_is_refused(device):
    llm = engine("full", device)
    llm.generate(PROMPTS, GREEDY)
    before = llm.batch.addresses()
    llm.generate([[9] * 40], GREEDY)
    assert llm.batch.addresses() == before
    llm.batch.input_ids = llm.batch.input_ids.clone()  # the classical mistake: a new tensor in place of the buffer
    llm.executor.graphs[llm.batch.num_rows].replay(before)
    with pytest.raises(CaptureError, match="input_ids captured at"):
        llm.executor.run()


# 2. Outputs live outside the pool: a graph's own result is overwritten by the next graph that shares its memory.


@on_both
def test_rule_2_logits_outlive_the_pool(device):
    llm = engine("full", device)
    first = llm.add(list(range(20)), GREEDY)
    llm.step()  # bucket 20
    kept = llm.executor.run()
    expected = kept.clone()
    overwrite_pool(llm)
    assert torch.equal(kept, expected)
    assert first.finish_reason is None


def overwrite_pool(llm):
    """What another bucket's replay may do: write to all memory that graphs own."""
    if llm.device.type == "cpu":
        for graph in llm.executor.graphs.values():
            for *_, results in (operation for segment in graph.segments for operation in segment.operations):
                for tensor in results:
                    tensor.fill_(77)
    else:
        other = llm.executor.recorder.capture(lambda: [torch.full((2**k,), 77.0, device="cuda") for k in range(18)])
        other.replay({})


# 3. One pool and one stream for all buckets: memory is that of the largest, not the sum.


@on_both
def test_rule_3_memory_is_that_of_the_largest_bucket(device):
    ladder = engine("full", device, buckets=[8, 16, 32, 48, 64], capture="ahead").stats
    largest = engine("full", device, buckets=[64], capture="ahead").stats
    assert (ladder.captures, largest.captures) == (5, 1)
    assert largest.graph_bytes <= ladder.graph_bytes <= 1.25 * largest.graph_bytes


# 4. Breaks must not pin the pool: what crosses a break lies in mailboxes, one set for all layers and buckets.


@on_both
def test_rule_4_one_set_of_mailboxes_outside_the_pool(device):
    llm = engine("breakable", device, buckets=[8, 64])
    llm.generate(PROMPTS, GREEDY)
    assert llm.stats.captures == 2
    boxes = [box for boxes in llm.executor.recorder.mailboxes.values() for box in boxes]
    assert len(boxes) == 2  # queries and attention output, whatever the number of layers and buckets
    addresses = {box.buffer.untyped_storage().data_ptr() for box in boxes}
    for graph in llm.executor.graphs.values():
        for step in graph.breaks:
            tensors = [value for value in (*step.args, *step.results) if isinstance(value, torch.Tensor)]
            assert {tensor.untyped_storage().data_ptr() for tensor in tensors} == addresses


@on_both
def test_rule_4_a_result_in_use_keeps_its_mailbox(device):
    @graph_break
    def double(x):
        return 2 * x

    x, out = torch.zeros(4, device=device), torch.zeros(4, device=device)

    def forward():
        first = double(x)[:2]  # only a view of the first result is left when the second arrives
        second = double(x + 1)
        out[:2].copy_(first + second[:2])

    graph = recorder(device, {"some"}).capture(forward)
    x.fill_(5)
    graph.replay({})
    assert out.tolist() == [22, 22, 0, 0]  # 2 * 5 + 2 * 6


# 5. No garbage collection while capturing: it might free another graph, which CUDA forbids inside a capture.


@on_both
def test_rule_5_garbage_waits(device):
    seen = []
    recorder(device).capture(lambda: seen.append(gc.isenabled()))
    assert seen == [False, False]
    assert gc.isenabled()

    def broken():
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        recorder(device).capture(broken)
    assert gc.isenabled()


# 6. Warm up the same shape first, on the capture stream: what a first call sets up may not be set up in a capture.


@on_both
def test_rule_6_the_captured_function_has_run_before(device):
    x, out, scales = torch.full((3,), 4.0, device=device), torch.zeros(3, device=device), {}

    def forward():
        if x.shape not in scales:
            scales[x.shape] = x[0].item()  # lazy initialisation: asks the CPU, once
        out.copy_(x * scales[x.shape])

    recorder(device).capture(forward)
    assert out.tolist() == [16.0] * 3


@pytest.mark.gpu
def test_rule_6_warm_up_uses_the_capture_stream():
    streams = []
    one = recorder("cuda")
    one.capture(lambda: streams.append(torch.cuda.current_stream()))
    assert streams == [one.pool.stream] * 2
    assert torch.cuda.current_stream() != one.pool.stream


# 7. Nothing asks the CPU. The error names the operation, the line and the way out.

HOST_READS = {
    "item": lambda x: x[0].item(),
    "float": lambda x: float(x[0]),
    "bool": lambda x: 1 if x[0] > 0 else 2,
    "tolist": lambda x: x.tolist(),
    "repr": lambda x: repr(x),
    "format": lambda x: f"{x}",
    "cpu": lambda x: x.cpu(),
    "to": lambda x: x.to("cpu"),
    "numpy": lambda x: x.numpy(),
    "nonzero": lambda x: x.nonzero(),
    "unique": lambda x: x.unique(),
    "boolean index": lambda x: x[x > 0],
    "boolean write": lambda x: x.__setitem__(x > 0, 1.0),
    "masked_select": lambda x: x.masked_select(x > 0),
    "equal": lambda x: torch.equal(x, x),
    "data from Python": lambda x: x + torch.tensor([1.0, 2.0, 3.0], device=x.device),
    "random": lambda x: x + torch.rand(3, device=x.device),
    "dropout": lambda x: torch.nn.functional.dropout(x),
    "multinomial": lambda x: torch.multinomial(x, 1),
}


@on_both
@pytest.mark.parametrize("what", HOST_READS)
def test_rule_7_host_reads_are_refused_by_name_and_line(what, device):
    x, calls = torch.ones(3, device=device), []

    def forward():
        calls.append(1)
        if len(calls) == 2:  # in the capture, after the warm-up
            HOST_READS[what](x)

    with pytest.raises(
        CaptureError, match=r"cannot be captured \(test_rules.py:\d+ in .*mark the function @graph_break"
    ):
        recorder(device).capture(forward)
    assert len(calls) == 2
    recorder(device).capture(lambda: x.add_(1))  # and everything has been put back


# 8. Arguments are frozen: what varies is read from the batch, in a break from the live one, in a graph on the device.


@on_both
def test_rule_8_a_break_reads_the_live_batch_and_its_numbers_are_frozen(device):
    llm, seen = engine("breakable", device, buckets=[64]), []

    @graph_break
    def look(x, batch, number):
        seen.append((number, batch.num_tokens))
        return x

    forward, count = llm.model.blocks[0].forward, iter(range(100))
    llm.model.blocks[0].forward = lambda x, batch: forward(look(x, batch, next(count)), batch)
    for length in (61, 33, 64, 50):
        llm.generate([[1] * length], SamplingParams(temperature=0, max_new_tokens=1))
    assert seen == [(0, 61), (1, 61), (1, 33), (1, 64), (1, 50)]  # warm-up, capture, three replays


@on_both
@pytest.mark.parametrize("mode", ["breakable", "full"])
def test_rule_8_a_short_capture_serves_long_contexts(mode, device):
    """The bound on lengths is a number: in a graph it must be the worst case, not what it was at capture."""
    model, options = make_model(dataclasses.replace(NANO, max_positions=512), device), {"buckets": [1, 64]}
    llm = LLM(model, mode, max_batch_tokens=64, breaks="moe", **options)
    llm.generate([[1, 2]], GREEDY)  # captures both buckets with a few keys; attention takes 256 at a time
    eager = LLM(model, "eager", max_batch_tokens=64, pad_to_bucket=True, **options)
    logits, expected = record(llm), record(eager)
    for one in (llm, eager):
        one.generate([[token % 60 for token in range(300)]], GREEDY)
    assert all(torch.equal(one, other) for one, other in zip(logits, expected))


# 9. Padding is inert, whatever it holds: 0 x NaN is NaN, so it is selected away, never multiplied away.


def poison(llm):
    """NaN in all that no live row owns: the trash block, unowned blocks, slots past each sequence, mailboxes."""
    for _, cache in enumerate(llm.kv_cache.data.flatten(0, 1)):
        owned = torch.zeros(cache.shape[:2], dtype=torch.bool, device=cache.device)
        for request in llm.scheduler.requests:
            for position in range(request.num_computed):
                owned[request.block_table[position // 16], position % 16] = True
        cache[~owned] = torch.nan
    for boxes in getattr(llm.executor, "recorder", Recorder(None)).mailboxes.values():
        for box in boxes:
            box.buffer.fill_(torch.nan)


@on_both
@pytest.mark.parametrize("config", [NANO, GPT2])
@pytest.mark.parametrize("mode", MODES)
def test_rule_9_poisoned_padding_changes_no_bit(mode, config, device):
    def run(before_step):
        llm = engine(mode, device, config, buckets=[9, 61, 64], breaks="attention,moe", max_requests=8, kv_blocks=24)
        logits = record(llm)
        results = [llm.add(prompt, GREEDY) for prompt in [*PROMPTS, [8] * 50]]
        while any(result.finish_reason is None for result in results):
            before_step(llm)
            llm.step()
        return logits

    for clean, dirty in zip(run(lambda llm: None), run(poison)):
        assert torch.equal(clean, dirty)


@on_both
@pytest.mark.parametrize("config", [NANO, GPT2])
def test_rule_9_padded_rows_of_the_residual_stream_reach_nobody(config, device):
    """Embeddings of the padded rows become NaN: every operation after that sees NaN there."""

    def run(value):
        llm = engine("eager", device, config, buckets=[64])
        embed = llm.model.embedding.forward

        def poisoned(ids):
            x = embed(ids)
            live = torch.arange(x.shape[0], device=x.device) < llm.batch.cu_seqlens_q[-1]
            return torch.where(live[:, None], x, value)

        llm.model.embedding.forward = poisoned
        logits = record(llm)
        llm.generate([[8] * 50, [3] * 11], SamplingParams(temperature=0, max_new_tokens=3))
        return logits

    for zeros, nans in zip(run(0.0), run(torch.nan)):
        assert torch.equal(zeros, nans)
        assert not nans.isnan().any()


@on_both
def test_rule_9_padded_rows_go_to_no_expert_and_come_out_zero(device):
    logits = torch.randn(8, 4, device=device)
    logits[5:] = torch.nan
    routing = reference.route(logits, 2, torch.tensor([5], device=device))
    assert routing.offsets[-1] == 10  # 5 live rows of 2 slots
    assert (routing.expert_of_row[10:] == 4).all()
    weight, bias = torch.randn(4, 6, 3, device=device), torch.full((4, 6), 9.0, device=device)
    out = reference.expert_down(torch.randn(16, 3, device=device), weight, bias, routing)
    assert (out[5:] == 0).all()
    assert (out[:5] != 0).all()


# 10. A failed capture leaves no ruin: the step runs eagerly, the reason is said once, everything else goes on.


@on_both
@pytest.mark.parametrize("mode", ["breakable", "full"])
def test_rule_10_a_bucket_that_cannot_be_captured_runs_eagerly(mode, device):
    llm, calls = engine(mode, device, buckets=[1, 8, 64]), []
    expected = engine("eager", device, buckets=[1, 8, 64])
    moe = llm.model.blocks[1].mlp.forward

    def fail_in_capture(x, batch):
        if len(x) == 8:
            calls.append(1)
            if len(calls) == 2:
                raise RuntimeError("injected")
        return moe(x, batch)

    llm.model.blocks[1].mlp.forward = fail_in_capture
    logits, eager_logits = record(llm), record(expected)
    prompts = [[1] * 6, [2] * 7, [3] * 40, [4] * 5]
    with pytest.warns(UserWarning, match="bucket 8 runs eagerly, its capture failed: injected") as caught:
        tokens = [llm.generate([prompt], GREEDY)[0].token_ids for prompt in prompts]
    assert len(caught) == 1
    assert tokens == [expected.generate([prompt], GREEDY)[0].token_ids for prompt in prompts]
    assert all(torch.equal(one, other) for one, other in zip(logits, eager_logits))
    assert gc.isenabled()
    assert (llm.stats.captures, llm.stats.eager_steps) == (2, 3)


@on_both
def test_rule_10_ctrl_c_in_a_capture(device):
    llm = engine("full", device)
    moe, calls = llm.model.blocks[1].mlp.forward, []

    def interrupt(x, batch):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return moe(x, batch)

    llm.model.blocks[1].mlp.forward = interrupt
    result = llm.add([1, 2, 3], GREEDY)
    with pytest.raises(KeyboardInterrupt):
        llm.step()
    while result.finish_reason is None:
        llm.step()
    assert result.token_ids == engine("eager", device).generate([[1, 2, 3]], GREEDY)[0].token_ids


@pytest.mark.gpu
def test_rule_10_an_invalidated_capture():
    """A synchronization is seen by no dispatcher: CUDA itself invalidates the capture, and torch gives up its pool."""
    one, x = recorder("cuda"), torch.zeros(3, device="cuda")

    def synchronize_in_capture():
        x.add_(1)
        if torch.cuda.is_current_stream_capturing():
            torch.cuda.synchronize()

    with pytest.raises(RuntimeError):
        one.capture(synchronize_in_capture)
    graph = one.capture(lambda: x.add_(1))
    x.zero_()
    graph.replay({})
    assert x.tolist() == [1, 1, 1]


# 11. Random numbers are drawn outside graphs: a hash of the request's seed and step, whatever runs beside it.


@on_both
@pytest.mark.parametrize("mode", MODES)
def test_rule_11_seeds_decide_and_replays_do_not_repeat(mode, device):
    llm = engine(mode, device)
    torch.manual_seed(0)
    state = torch.get_rng_state()
    llm.model.head.weight.zero_()  # all tokens equally likely: the drawn number alone decides
    one, two, again = (
        llm.generate([[1, 2, 3]], SamplingParams(seed=seed, temperature=2.0, max_new_tokens=20))[0].token_ids
        for seed in (1, 2, 1)
    )
    assert one == again != two
    assert len(set(one)) > 10  # a frozen number would draw the same token in every step
    beside = llm.generate(
        [[5], [1, 2, 3]], [SamplingParams(), SamplingParams(seed=1, temperature=2.0, max_new_tokens=20)]
    )
    assert beside[1].token_ids == one
    assert torch.equal(torch.get_rng_state(), state)


# 12. Nested breaks run inside the outer one; a break outside a capture is a plain call.


@on_both
def test_rule_12_nested_and_plain_breaks(device):
    @graph_break
    def inner(x):
        return x + 1

    @graph_break
    def outer(x):
        return inner(x) * 2

    x, out = torch.zeros(3, device=device), torch.zeros(3, device=device)
    assert outer(x).tolist() == [2, 2, 2]
    graph = recorder(device, {"some"}).capture(lambda: out.copy_(outer(x)))
    assert (len(graph.segments), len(graph.breaks)) == (2, 1)
    x.fill_(4)
    graph.replay({})
    assert out.tolist() == [10, 10, 10]
    full = recorder(device).capture(lambda: out.copy_(outer(x)))
    assert (len(full.segments), len(full.breaks)) == (1, 0)


# 13. The pinned staging buffer is not refilled while its copy may still be in flight.


@pytest.mark.gpu
def test_rule_13_the_staging_buffer_waits_for_its_copy():
    device = torch.device("cuda", 0)
    batch = Batch(64, 4, 256, KVCache(NANO, 8, torch.float32, device), device)

    def fill(token):
        request = Request("a", [token] * 20, GREEDY, 0)
        request.block_table = [1, 2]
        batch.fill([(request, 20)], 64)

    fill(1)
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)  # the GPU is busy: what is queued now waits for about 0.1 s
    fill(2)
    copy = batch.input_ids.clone()
    fill(3)
    torch.cuda.synchronize()
    assert copy[:20].tolist() == [2] * 20


# 14. A capture computes its step, breaks see real values in it, and a step may be run again: only `update` moves on.


@on_both
@pytest.mark.parametrize("mode", MODES)
def test_rule_14_a_step_is_idempotent(mode, device):
    llm = engine(mode, device)
    results = [llm.add(prompt, GREEDY) for prompt in PROMPTS]
    for _ in range(3):
        scheduled = llm.scheduler.schedule()
        state = [(request.num_computed, list(request.token_ids)) for request, _ in scheduled]
        llm.batch.fill(scheduled, llm.executor.bucket_for(sum(count for _, count in scheduled)))
        runs = [llm.executor.run().clone() for _ in range(4)]  # capture (with its warm-up), then replays
        assert all(torch.equal(runs[0], run) for run in runs)
        assert [(request.num_computed, list(request.token_ids)) for request, _ in scheduled] == state
        tokens = runs[0].argmax(-1).tolist()
        llm.scheduler.update(scheduled, tokens)
    expected = engine("eager", device).generate(PROMPTS, GREEDY)
    assert [result.token_ids for result in results] == [result.token_ids[:3] for result in expected]


@on_both
def test_rule_14_a_break_sees_real_values_while_capturing(device):
    x, out, seen = torch.full((2,), 3.0, device=device), torch.zeros(2, device=device), []

    @graph_break
    def look(y):
        seen.append(y.tolist())
        return y

    recorder(device, {"some"}).capture(lambda: out.copy_(look(x * x)))
    assert seen == [[9, 9], [9, 9]]
    assert out.tolist() == [9, 9]


# 15. No floating-point atomics: sums run in a fixed order, and runs repeat bit for bit.


def test_rule_15_no_operation_adds_in_whatever_order():
    llm = engine("full", buckets=[8, 64])
    llm.generate(PROMPTS, GREEDY)
    segments = [segment for graph in llm.executor.graphs.values() for segment in graph.segments]
    names = {str(func) for segment in segments for func, *_ in segment.operations}
    unordered = ("scatter_add", "scatter_reduce", "index_add", "index_reduce", "bincount", "histc", "accumulate")
    assert not [name for name in names if any(word in name for word in unordered)]
    for func, args, kwargs, _ in (operation for segment in segments for operation in segment.operations):
        assert not ("index_put" in str(func) and (kwargs.get("accumulate") or (len(args) > 3 and args[3])))


@on_both
def test_rule_15_a_hundred_runs_are_equal(device):
    llm = engine("full", device)
    llm.add(list(range(61)), GREEDY)
    llm.step()
    first = llm.executor.run().clone()
    assert all(torch.equal(llm.executor.run(), first) for _ in range(100))


# And the contract that they serve: at the same padded shape, modes agree bit for bit.


def check_modes_agree(model, num_steps, **options):
    generator = torch.Generator().manual_seed(0)

    def number(low, high):
        return torch.randint(low, high + 1, (), generator=generator).item()

    llms = [LLM(model, mode=mode, pad_to_bucket=True, **options) for mode in MODES]
    logits = [record(llm) for llm in llms]
    while len(logits[0]) < num_steps:
        if number(0, 3) == 0:
            prompt = [number(0, model.config.vocab_size - 1) for _ in range(number(1, 60))]
            params = SamplingParams(temperature=number(0, 1), seed=number(0, 9), max_new_tokens=number(1, 20))
            for llm in llms:
                llm.add(prompt, params)
        for llm in llms:
            llm.step()
    for eager, breakable, full in zip(*logits):
        assert torch.equal(eager, breakable)
        assert torch.equal(eager, full)


@pytest.mark.parametrize("breaks", ["attention", "moe", "attention,moe", "all"])
@pytest.mark.parametrize("config", [NANO, GPT2])
def test_modes_agree(config, breaks):
    check_modes_agree(make_model(config), 40, max_batch_tokens=32, buckets=[4, 8, 32], breaks=breaks)


@pytest.mark.gpu
@pytest.mark.parametrize("breaks", ["attention", "all"])
def test_modes_agree_on_the_gpu(breaks):
    from nanograph.checkpoint import ASSETS, load_model, read_config

    device = torch.device("cuda", 0)
    nano = load_model(ASSETS, read_config(ASSETS), reference, 1024, device, torch.bfloat16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_modes_agree(nano, 200, max_batch_tokens=64, breaks=breaks)
