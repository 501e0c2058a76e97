#!/usr/bin/env python3
"""Writes the decode vectors beside it with gguf-py's reference dequantisation.

  pip install gguf numpy && python3 make_vectors.py [--samples MODEL.gguf]

decode.bin   for each type: u32 type number, u32 count of blocks, u32 values in a block, u32 bytes of a block; then the
             blocks, then their values as f32 bits, little endian. Half of the blocks are random bytes with sane scales;
             the others have extreme ones: zeros of both signs, subnormals, the largest finite, infinities, NaNs.
simple.bin   u32 count of blocks, their 32 f32 values each; then gguf-py's Q4_1, Q5_0, Q5_1 and MXFP4 blocks of them, which
             are ggml's reference in C bit for bit.
samples.bin  with --samples only: 96 rows of 256 f16 values that are standard normal, then 96 rows of the model's
             matrices. What test_codec_error.cpp quantises; measure_peer.py measures llama.cpp's quantisers on them.
"""
import sys
from pathlib import Path

import gguf
import numpy as np

HERE = Path(__file__).parent
Q = gguf.GGMLQuantizationType
# Offsets of the binary16 scales in a block.
SCALES = {
    Q.Q4_1: (0, 2), Q.Q5_0: (0,), Q.Q5_1: (0, 2), Q.Q2_K: (80, 82), Q.Q3_K: (108,), Q.Q4_K: (0, 2), Q.Q5_K: (0, 2),
    Q.Q6_K: (208,), Q.IQ4_NL: (0,), Q.IQ4_XS: (0,), Q.MXFP4: (),
}
EXTREME = np.array([0x0000, 0x8000, 0x0001, 0x83FF, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7E00], dtype=np.uint16)


def decode_vectors():
    rng = np.random.default_rng(3)
    with open(HERE / "decode.bin", "wb") as f:
        for kind, offsets in SCALES.items():
            size, n_bytes = gguf.GGML_QUANT_SIZES[kind]
            count = 18 if size == 256 else 64
            blocks = rng.integers(0, 256, (count, n_bytes), dtype=np.uint8)
            for k, offset in enumerate(offsets):
                scales = rng.standard_normal(count).astype(np.float16).view(np.uint16)
                for i in range(count // 2, count):  # each extreme scale, with each shift of itself as the second one
                    j = i - count // 2
                    scales[i] = EXTREME[(j + k * (1 + j // len(EXTREME))) % len(EXTREME)]
                blocks[:, offset : offset + 2] = scales.astype("<u2").view(np.uint8).reshape(count, 2)
            if kind == Q.MXFP4:  # all exponents at the ends, and some between
                blocks[:, 0] = np.concatenate([np.arange(16), np.arange(240, 256), rng.integers(0, 256, count - 32)])
            with np.errstate(all="ignore"):
                values = gguf.quants.dequantize(blocks.ravel(), kind).astype("<f4")
            f.write(np.array([kind.value, count, size, n_bytes], dtype="<u4").tobytes())
            f.write(blocks.tobytes())
            f.write(values.tobytes())


def simple_vectors():
    rng = np.random.default_rng(4)
    ramps = np.stack([np.linspace(-s, s, 32, dtype=np.float32) for s in (1e-6, 1e-3, 1, 100, 6e4)])
    plus_minus = np.tile(np.array([1.0, -1.0], dtype=np.float32), (2, 16))
    plus_minus[1] *= -1
    normal = rng.standard_normal((24, 32)).astype(np.float32)
    wide = (rng.standard_normal((32, 32)) * 10.0 ** rng.uniform(-4, 4, (32, 32))).astype(np.float32)
    x = np.concatenate([ramps, np.zeros((1, 32), np.float32), plus_minus, normal, wide]).astype("<f4")
    with open(HERE / "simple.bin", "wb") as f:
        f.write(np.array([len(x)], dtype="<u4").tobytes())
        f.write(x.tobytes())
        for kind in (Q.Q4_1, Q.Q5_0, Q.Q5_1, Q.MXFP4):
            f.write(gguf.quants.quantize(x, kind).tobytes())


def samples(model):
    rng = np.random.default_rng(5)
    rows = []
    for t in gguf.GGUFReader(model).tensors:
        if len(t.shape) == 2 and t.shape[0] % 256 == 0:
            rows.append(gguf.quants.dequantize(t.data, t.tensor_type).reshape(-1, 256))
    rows = np.concatenate(rows)
    chosen = rows[rng.choice(len(rows), 96, replace=False)]
    both = np.concatenate([rng.standard_normal((96, 256)), chosen]).astype("<f2")
    (HERE / "samples.bin").write_bytes(both.tobytes())


decode_vectors()
simple_vectors()
if len(sys.argv) == 3 and sys.argv[1] == "--samples":
    samples(sys.argv[2])
