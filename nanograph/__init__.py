"""nanograph: a small LLM inference engine in which CUDA graphs can be read, switched and compared.

    from nanograph import LLM, SamplingParams
    [result] = LLM("nano", mode="breakable").generate(["ROMEO:"])
    print(result.text)

One step, end to end, is also the order in which to read the source: options.py (what may be asked for) -> scheduler.py
(who runs) -> kv_cache.py (where keys and values lie) -> batch.py (a step's inputs) -> model.py and kernels/reference.py
(the forward) -> capture.py, tape.py (graphs) -> executors/ (the three modes) -> sampling.py -> tokenizer.py ->
engine.py (the loop).
"""

from nanograph.options import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name):
    """Load LLM, and torch with it, only when somebody asks: command lines check their arguments first."""
    if name == "LLM":
        from nanograph.engine import LLM

        return LLM
    raise AttributeError(f"module 'nanograph' has no attribute {name!r}")
