"""llama.cpp in a process of the engines' environment: ``python llama_cpp.py serve|quantise ...``.

``serve MODEL [--lora FILE]`` prints the server's address and serves until its standard input ends. ``quantise FILE
TYPE`` prints the digest of each matrix of a GGUF file in F32 as llama.cpp itself quantises it.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import sys
from pathlib import Path


def serve(model: str, *options: str) -> None:
    """Serve a model with one thread, all in fp32, as transformers computes."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = model
    params.n_ctx, params.n_parallel, params.warmup = 256, 1, False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    if options:
        _, path = options
        params.lora_adapters = [xllamacpp.CommonAdapterLoraInfo(path, 1.0)]
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    sys.stdin.read()


def quantise(path: str, kind: str) -> None:
    """Print a JSON object: the digest of each matrix in a type, by name."""
    import gguf
    import numpy as np
    import xllamacpp

    library = ctypes.CDLL(str(next(Path(xllamacpp.__file__).parent.glob("*.so"))))
    chunk = library.ggml_quantize_chunk
    chunk.restype = ctypes.c_size_t
    chunk.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int64] * 3, ctypes.c_void_p]
    wanted, digests = gguf.GGMLQuantizationType[kind], {}
    block, size = gguf.GGML_QUANT_SIZES[wanted]
    for tensor in gguf.GGUFReader(path).tensors:
        if len(tensor.shape) == 2:
            values = np.ascontiguousarray(tensor.data, dtype=np.float32)
            rows, width = values.shape
            out = np.zeros(values.size // block * size, dtype=np.uint8)
            assert chunk(int(wanted), values.ctypes.data, out.ctypes.data, 0, rows, width, None) == out.size
            digests[tensor.name] = hashlib.sha256(out.tobytes()).hexdigest()
    print(json.dumps(digests))


if __name__ == "__main__":
    {"serve": serve, "quantise": quantise}[sys.argv[1]](*sys.argv[2:])
