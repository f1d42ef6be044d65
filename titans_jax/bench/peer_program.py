"""What `titans bench peer` starts for each side of a case, in the Python of either: one call for each line it is sent.

    python peer_program.py titans_jax.bench.peer '{"kind": "memory", "time": 1024, ...}'

The module's `make` gives the number of parameters, which is printed once all is ready, and the call; for each line read
it runs once, and the seconds it took are printed. Needs nothing by itself: PyTorch and JAX are in environments of
their own.
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
