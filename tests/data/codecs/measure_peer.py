#!/usr/bin/env python3
"""Prints the errors of llama.cpp's quantisers on samples.bin, as the table in tests/core/test_codec_error.cpp has them.

  cmake -S llama.cpp -B build -DBUILD_SHARED_LIBS=ON && cmake --build build --target ggml-base
  pip install gguf numpy && python3 measure_peer.py build/bin/libggml-base.so

An error is the root of sum(w (x - y)^2) / sum(w x^2), of normal and of model rows: w = 1; then with the importance
w[i] = 1/4, 1, 4, 16 for i % 4 = 0..3, given to the quantiser.
"""
import ctypes
import sys
from pathlib import Path

import gguf
import numpy as np

Q = gguf.GGMLQuantizationType
NAMES = {
    Q.Q4_0: "q4_0", Q.Q4_1: "q4_1", Q.Q5_0: "q5_0", Q.Q5_1: "q5_1", Q.Q2_K: "q2_K", Q.Q3_K: "q3_K", Q.Q4_K: "q4_K",
    Q.Q5_K: "q5_K", Q.Q6_K: "q6_K", Q.IQ4_NL: "iq4_nl", Q.IQ4_XS: "iq4_xs", Q.MXFP4: "mxfp4",
}


def quantize(library, kind, x, importance):
    size, n_bytes = gguf.GGML_QUANT_SIZES[kind]
    out = np.zeros(x.size // size * n_bytes, dtype=np.uint8)
    pointer = lambda a: None if a is None else a.ctypes.data_as(ctypes.c_void_p)
    f = getattr(library, "quantize_" + NAMES[kind])
    f.restype = ctypes.c_size_t
    f(pointer(x), pointer(out), ctypes.c_int64(1), ctypes.c_int64(x.size), pointer(importance))
    return gguf.quants.dequantize(out, kind)


def main():
    library = ctypes.CDLL(sys.argv[1])
    rows = np.frombuffer((Path(__file__).parent / "samples.bin").read_bytes(), dtype="<f2").astype(np.float32)
    halves = [np.ascontiguousarray(h) for h in rows.reshape(2, -1)]
    importance = np.tile(np.array([0.25, 1, 4, 16], dtype=np.float32), halves[0].size // 4)
    for kind, name in NAMES.items():
        errors = []
        for given in (None, importance):
            for x in halves:
                y = quantize(library, kind, x, given).astype(np.float64)
                w = np.float64(1) if given is None else given.astype(np.float64)
                errors.append(np.sqrt((w * (x - y) ** 2).sum() / (w * x.astype(np.float64) ** 2).sum()))
        print("    {DType::" + name.lower() + ", " + ", ".join(f"{e:.5f}" for e in errors) + "},")


main()
