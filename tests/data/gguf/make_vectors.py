#!/usr/bin/env python3
"""Writes the GGUF files beside it with gguf-py, the reference implementation of the format and of the quantisers.

  pip install gguf numpy && python3 make_vectors.py

reference.gguf              every metadata type, tensors of several types and ranks, alignment 64
split-0000i-of-00003.gguf   the same kind of content in three parts
quants.gguf                 f32 values `x.N` with gguf-py's Q8_0 and Q4_0 of them, equal bit for bit to ggml's reference in C
"""
from pathlib import Path

import gguf
import numpy as np

HERE = Path(__file__).parent


def reference():
    w = gguf.GGUFWriter(HERE / "reference.gguf", "llama")
    w.add_custom_alignment(64)
    w.add_uint8("t.u8", 200)
    w.add_int8("t.i8", -100)
    w.add_uint16("t.u16", 60000)
    w.add_int16("t.i16", -30000)
    w.add_uint32("t.u32", 4000000000)
    w.add_int32("t.i32", -2000000000)
    w.add_float32("t.f32", 0.1)
    w.add_bool("t.true", True)
    w.add_bool("t.false", False)
    w.add_string("t.string", "grüße, 世界 🌍\n")
    w.add_uint64("t.u64", 2**63 + 1)
    w.add_int64("t.i64", -(2**62))
    w.add_float64("t.f64", 1e300)
    w.add_array("a.strings", ["", "a", "längere Zeichenkette"])
    w.add_array("a.ints", [1, -2, 3])
    w.add_array("a.floats", [0.5, -1.5])
    w.add_array("a.bools", [True, False, True])
    rng = np.random.default_rng(1)
    w.add_tensor("vector", np.arange(5, dtype=np.float32))
    w.add_tensor("matrix", rng.standard_normal((3, 4)).astype(np.float32))
    w.add_tensor("half", rng.standard_normal((2, 3, 4)).astype(np.float16))
    w.add_tensor("cube", np.arange(2 * 3 * 4 * 5, dtype=np.int32).reshape(2, 3, 4, 5))
    for kind in (gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.BF16):
        data = gguf.quants.quantize(rng.standard_normal((3, 64)).astype(np.float32), kind)
        w.add_tensor(kind.name.lower(), data, raw_dtype=kind)
    finish(w)


def split():
    w = gguf.GGUFWriter(HERE / "split.gguf", "llama", split_max_tensors=2)
    w.add_string("general.name", "split")
    for i in range(5):
        w.add_tensor(f"t.{i}", np.full((i + 1, 8), i, dtype=np.float32))
    finish(w)


def quants():
    w = gguf.GGUFWriter(HERE / "quants.gguf", "test")
    rng = np.random.default_rng(2)
    ties = (np.arange(-64, 64, dtype=np.float32) / 2).reshape(4, 32)  # halves: rounding away from zero
    ties[:, 0] = 127  # scale 1 exactly
    ramps = np.stack([np.linspace(-s, s, 32, dtype=np.float32) for s in (1e-6, 1e-3, 1, 100, 6e4)])
    # (A block of -0.0 is left out: gguf-py's Q4_0 scale is then +0, that of the C reference -0, as for a block of +0.)
    zeros = np.zeros((1, 32), dtype=np.float32)
    one = np.zeros((2, 32), dtype=np.float32)
    one[0, 5], one[1, 31] = 3.0, -3.0
    plus_minus = np.tile(np.array([1.0, -1.0], dtype=np.float32), (2, 16))  # equal magnitudes: the first decides the sign
    plus_minus[1] *= -1
    normal = rng.standard_normal((24, 32)).astype(np.float32)
    wide = (rng.standard_normal((16, 32)) * 10.0 ** rng.uniform(-4, 4, (16, 32))).astype(np.float32)
    x = np.concatenate([ties, ramps, zeros, one, plus_minus, normal, wide])
    w.add_tensor("x", x)
    for kind in (gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q4_0):
        w.add_tensor("x." + kind.name.lower(), gguf.quants.quantize(x, kind), raw_dtype=kind)
    finish(w)


def finish(w):
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


reference()
split()
quants()
