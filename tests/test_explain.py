"""explain says what is in a graph: on the tape exactly, on CUDA as far as the driver tells."""

import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import GPU, NANO, make_model

from nanograph import LLM, SamplingParams, generate
from nanograph.explain import describe_nodes, explain, node_names
from nanograph.model import Config


def run(mode, config=NANO, device="cpu", **options):
    """An LLM that has captured bucket 3, and 1 where it generates more than a token."""
    llm = LLM(make_model(config, device), mode, max_batch_tokens=64, max_requests=4, **options)
    llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_new_tokens=1))
    return llm


def lines_of(text):
    """{title: text} of an explanation of one bucket."""
    unwrapped = text.replace("\n      ", " ")
    return dict(line.strip().split(": ", 1) for line in unwrapped.splitlines()[2:])


def test_segments_name_what_they_read_and_write():
    text = explain(run("breakable"))
    assert text.startswith("captured graphs: 1, in ")
    assert "bucket 3: segments 3, breaks 2, run in turn" in text
    assert max(map(len, text.splitlines())) <= 120
    lines = lines_of(text)
    assert list(lines) == ["segment 0", "breaks 0-1", "segment 1", "segment 2"]
    assert "; reads input_ids, positions, slot_mapping; writes KV cache, Attention's q; " in lines["segment 0"]
    assert lines["breaks 0-1"] == "Attention.forward, eagerly; reads Attention's q; writes Attention's result"
    reads = "reads Attention's result, cu_seqlens_q, positions, slot_mapping; writes KV cache, Attention's q"
    assert reads in lines["segment 1"]
    assert "; reads Attention's result, cu_seqlens_q, logits_indices; writes logits; " in lines["segment 2"]
    assert all("bytes of the pool" in line for title, line in lines.items() if title.startswith("segment"))


def test_layers_that_are_alike_are_one_line():
    config = Config(**{**vars(NANO), "num_layers": 5, "windows": (16, 0) * 2 + (16,)})
    assert list(lines_of(explain(run("breakable", config)))) == ["segment 0", "breaks 0-4", "segments 1-4", "segment 5"]
    both = lines_of(explain(run("breakable", config, breaks="attention,moe")))
    assert [title for title in both if title.startswith("break")] == ["breaks 0, 2, 4, 6, 8", "breaks 1, 3, 5, 7, 9"]
    assert "MoE's x" in both["breaks 1, 3, 5, 7, 9"]


def test_a_full_graph_is_one_segment_and_eager_has_none():
    llm = run("full")
    [(title, line)] = lines_of(explain(llm)).items()
    [segment] = llm.executor.graphs[3].segments
    assert title == "segment 0"
    assert line.startswith(f"{len(segment.operations)} nodes (")
    assert "seq_lens, block_tables, KV cache" in line
    assert "writes KV cache, logits; " in line
    assert explain(run("eager")) == "captured graphs: 0, in 0 bytes that they share"


def test_a_failed_capture_is_left_out(recwarn):
    model = make_model()
    model.blocks[0].mlp.forward = lambda x, batch: x * x.max().item()
    llm = LLM(model, "full", max_batch_tokens=64, max_requests=4)
    llm.generate([[1, 2, 3]], SamplingParams(max_new_tokens=1))
    assert "its capture failed: " in str(recwarn.list[0].message)
    assert explain(llm).startswith("captured graphs: 0, in ")
    assert "bucket" not in explain(llm)


def test_kinds_are_counted_and_the_rare_ones_left_out():
    assert describe_nodes(["mul", "add", "mul"]) == "3 nodes (2 mul, 1 add)"
    assert describe_nodes([]) == "0 nodes ()"
    assert describe_nodes("abcdefghij") == "10 nodes (1 a, 1 b, 1 c, 1 d, 1 e, 1 f, 1 g, 1 h, …)"
    assert describe_nodes(None) == "unknown nodes (pip install cuda-bindings)"


def test_generate_explains_on_standard_error(capsys):
    assert generate.main(["--explain", "--mode", "full", "--max-new-tokens", "1", "--max-batch-tokens", "8"]) == 0
    said = capsys.readouterr()
    assert "captured graphs: 1, in " in said.err
    assert "segment 0: " in said.err
    assert "segment" not in said.out


ELEMENTWISE = b"_ZN2at6native29vectorized_elementwise_kernelILi4ENS0_15CUDAFunctor_addIfEESt5arrayIPcLm3EEEEviT0_T1_"


def make_driver():
    """As cuda.bindings.driver, whose calls return (status, results …), over a graph of four kinds of node."""
    kinds = SimpleNamespace(
        CU_GRAPH_NODE_TYPE_KERNEL=SimpleNamespace(name="CU_GRAPH_NODE_TYPE_KERNEL"),
        CU_GRAPH_NODE_TYPE_MEMCPY=SimpleNamespace(name="CU_GRAPH_NODE_TYPE_MEMCPY"),
    )
    kernel, copy = vars(kinds).values()
    nodes = [(kernel, (5, 0)), (kernel, (0, 6)), (copy, None), (kernel, None)]
    return SimpleNamespace(
        CUgraph=lambda handle: handle,
        CUgraphNodeType=kinds,
        cuGraphGetNodes=lambda graph, count=0: (0, nodes[:count], len(nodes)) if graph == 1234 else (1, None, None),
        cuGraphNodeGetType=lambda node: (0, node[0]),
        cuGraphKernelNodeGetParams=lambda node: (
            (0, SimpleNamespace(func=node[1][0], kern=node[1][1])) if node[1] else (400, None)
        ),
        cuFuncGetName=lambda function: (0, {5: ELEMENTWISE}[function]),
        cuKernelGetName=lambda kernel: (0, {6: b"paged_attention"}[kernel]),
    )


def test_on_cuda_names_come_from_the_driver(monkeypatch):
    segment = SimpleNamespace(graph=SimpleNamespace(raw_cuda_graph=lambda: 1234))
    monkeypatch.setitem(sys.modules, "cuda.bindings", SimpleNamespace(driver=make_driver()))
    assert node_names(segment) == ["vectorized_elementwise_kernel", "paged_attention", "memcpy", "kernel"]
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    assert node_names(segment) is None


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["breakable", "full"])
def test_on_a_gpu(mode):
    llm = run(mode, device=GPU)
    lines = lines_of(explain(llm))
    assert "reads the static inputs" in lines["segment 0"]
    assert "writes logits" in list(lines.values())[-1]
    pytest.importorskip("cuda.bindings")
    for segment in llm.executor.graphs[3].segments:
        names = node_names(segment)
        assert len(names) > 10
        assert not [name for name in names if name.startswith("_Z")]
    with torch.no_grad():
        assert sum(map(len, map(node_names, llm.executor.graphs[3].segments))) > 100
