"""The kernels of reference.py again, in Triton: fused, and fast on CUDA. The same names, signatures and meanings.

What is not worth a kernel of its own is taken from there. Read first: kernels/reference.py. Read next: attention.py,
moe.py, fused.py.
"""

from nanograph.kernels.reference import Mxfp4, Routing, decode_mxfp4, route
from nanograph.kernels.triton.attention import paged_attention
from nanograph.kernels.triton.fused import rms_norm, rotate_and_cache, swiglu
from nanograph.kernels.triton.moe import expert_down, expert_gate_up, grouped_linear

__all__ = [
    "Mxfp4",
    "Routing",
    "decode_mxfp4",
    "expert_down",
    "expert_gate_up",
    "grouped_linear",
    "paged_attention",
    "rms_norm",
    "rotate_and_cache",
    "route",
    "swiglu",
]
