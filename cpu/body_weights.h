// How each weight type is read, and how rows are found. Part of every kernels_*.cpp, after its simd_*.h.

HEARTH_SIMD uint16_t read_u16(const uint8_t* p) {
  uint16_t x;
  __builtin_memcpy(&x, p, sizeof x);
  return x;
}

// One vector at a time, or one block of 32 at a time.
struct WeightF32 {
  using Element = float;
  HEARTH_SIMD F get(const Element* p) { return load(p); }
  HEARTH_SIMD F get_n(const Element* p, int n) { return load_n(p, n); }
};
struct WeightF16 {
  using Element = uint16_t;
  HEARTH_SIMD F get(const Element* p) { return load_f16(p); }
  HEARTH_SIMD F get_n(const Element* p, int n) { return load_f16_n(p, n); }
};
struct WeightBF16 {
  using Element = uint16_t;
  HEARTH_SIMD F get(const Element* p) { return load_bf16(p); }
  HEARTH_SIMD F get_n(const Element* p, int n) { return load_bf16_n(p, n); }
};
struct WeightQ8_0 {
  static constexpr int kBytes = 34;
  static constexpr uint8_t kPanelFlip = 0x80;  // what differs between a byte of quants in a file and in a panel
  HEARTH_SIMD float scale(const uint8_t* block) { return from_f16(read_u16(block)); }
  using Span = SpanQ8;
  HEARTH_SIMD Span get(const uint8_t* block, int span) { return load_q8_0(block + 2, block + 2 + (span - 1) * kBytes); }
  HEARTH_SIMD void widen(const uint8_t* block, F* out) { widen_q8_0(block + 2, out); }
};
struct WeightQ4_0 {
  static constexpr int kBytes = 18;
  static constexpr uint8_t kPanelFlip = 0;
  HEARTH_SIMD float scale(const uint8_t* block) { return from_f16(read_u16(block)); }
  using Span = SpanQ4;
  HEARTH_SIMD Span get(const uint8_t* block, int span) { return load_q4_0(block + 2, block + 2 + (span - 1) * kBytes); }
  HEARTH_SIMD void widen(const uint8_t* block, F* out) { widen_q4_0(block + 2, out); }
};
constexpr int kBlockVectors = kBlock / kW;

template <typename W>
concept Elements = requires {
  sizeof(typename W::Element);
};
template <typename W>
concept Blocks = requires {
  typename W::Span;
};

HEARTH_SIMD Q8Row q8_row(const void* row, int64_t n) {
  const int64_t blocks = n_blocks(n);
  auto* d = static_cast<float*>(const_cast<void*>(row));
  auto* total = reinterpret_cast<int32_t*>(d + blocks);
  return {d, total, total + blocks, total + 2 * blocks, reinterpret_cast<int8_t*>(total + 10 * blocks)};
}

HEARTH_SIMD const uint8_t* row_address(const RowsView& rows, int64_t r) {
  const auto index = static_cast<size_t>(rows.ids != nullptr ? rows.ids[r] : r);
  return static_cast<const uint8_t*>(rows.w) + index * rows.row_bytes;
}

// How far ahead of its reading a thread asks for weights, at least. The hardware's prefetching stops at page borders
// and is late where memory takes 170 ns: with it alone, 14 or 16 threads read consecutive rows of 8 KiB at 70 to 80 %
// of the speed that they reach with requests 4 or 8 KiB ahead (Sapphire Rapids, about 100 GB/s), and rows in random
// places at 45 to 70 %.
constexpr int64_t kAheadBytes = 8192;

// Rows that are read later: those of `rows` behind row r, then those of `then`.
struct Ahead {
  const RowsView& rows;
  const RowsView* then;
  HEARTH_SIMD_MEMBER const uint8_t* row(int64_t r) const {
    if (r < rows.n) return row_address(rows, r);
    return then != nullptr && r - rows.n < then->n ? row_address(*then, r - rows.n) : nullptr;
  }
  // Rows [r, r + n), and what is to be asked for while they are read: the rows `distance` further on, or the same where
  // none follow.
  HEARTH_SIMD_MEMBER void group(int64_t r, int n, int64_t distance, const uint8_t** w, const uint8_t** ahead) const {
    for (int i = 0; i < n; ++i) {
      w[i] = row_address(rows, r + i);
      ahead[i] = row(r + i + distance);
      if (ahead[i] == nullptr) ahead[i] = w[i];
    }
  }
};
// So many pieces of rows, of `bytes` each, are kAheadBytes or more.
HEARTH_SIMD int64_t pieces_ahead(int64_t bytes) {
  return 1 + (kAheadBytes - 1) / bytes;
}
// Bytes [at, at + bytes) of a row, into the second-level cache; with kNear, from there (mostly) into the first. One
// core reads rows that are near a sixth faster with the latter, 14 read rows in memory a tenth faster with the former
// (Sapphire Rapids).
template <bool kNear = false>
HEARTH_SIMD void prefetch(const uint8_t* row, int64_t at, int64_t bytes) {
#pragma GCC unroll 4
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(row + at + i, 0, kNear ? 3 : 2);
}
