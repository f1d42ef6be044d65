"""The program that `titans bench peer` starts for each side of a case, with that side's Python.

    python peer_program.py titans_jax.bench.peer '{"kind": "memory", "time": 1024, ...}'

The module's `make` returns the number of parameters, which is printed once all is ready, and a call; for each line read
from standard input the call runs once, and its seconds are printed. Only the standard library is imported here, as
PyTorch and JAX are in separate environments.
"""

import importlib
import json
import sys
import time

if __name__ == "__main__":
    module, case = sys.argv[1:]
    parameters, call = importlib.import_module(module).make(json.loads(case))
    call()
    print(parameters, flush=True)
    for _ in sys.stdin:
        start = time.perf_counter()
        call()
        print(time.perf_counter() - start, flush=True)
