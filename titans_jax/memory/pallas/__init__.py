"""The chunkwise forms in TPU kernels, forward and backward, fast weights in VMEM from chunk to chunk."""
