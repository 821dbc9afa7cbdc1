"""The GPU runner: device tables, our kernels, CUDA graphs, one step ahead of the host."""
