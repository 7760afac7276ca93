"""The architecture: one idea per file, tensors named as in the checkpoint, arithmetic in `k3tool.kernels`."""
