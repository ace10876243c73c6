"""The kernels of reference.py again, in Triton: fused, and fast on CUDA."""
