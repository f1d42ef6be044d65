"""TPUs without a TPU: which machines there are, and what the compiler says of a training step on one."""
