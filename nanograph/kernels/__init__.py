"""Two sets of the operations below the model: `reference` (plain torch, any device) and `triton` (CUDA).

Both are modules with the same function names and signatures, so that the model can be built over either.
"""
