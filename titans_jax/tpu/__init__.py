"""TPUs without having one: the machines by name, and the compiler's report of a training step on one."""
