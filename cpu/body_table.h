// The table itself. Part of every kernels_*.cpp, after the other bodies.

template <typename W>
constexpr auto pack_rows_of() {
  if constexpr (Elements<W>)
    return &pack_rows<W>;
  else
    return nullptr;
}

// W: what reads each WeightType, in order.
template <typename... W>
constexpr Kernels table_of(const char* name) {
  static_assert(sizeof...(W) == kWeightTypes);
  return {
      .name = name,
      .mr = kMr,
      .nr = kNr,
      .dot_tokens = kDotTokens,
      .dot_rows = {dot_rows<W>...},
      .axpy_rows = {axpy_rows<W>...},
      .axpy_tokens = {axpy_tokens<W>...},
      .to_float = {to_float<W>...},
      .pack_rows = {pack_rows_of<W>()...},
      .pack_cols = {pack_cols<W>...},
      .gemm_tile = gemm_tile,
#ifdef HEARTH_PANELS
      .panel_pack = {PanelKernels<W>::pack...},
      .panel_row = {PanelKernels<W>::row...},
      .panel_dot = {PanelKernels<W>::dot...},
#else
      .panel_pack = {},
      .panel_row = {},
      .panel_dot = {},
#endif
      .quantize = quantize,
      .rms_norm = rms_norm,
      .layer_norm = layer_norm,
      .to_f16 = to_f16,
      .add = add_row,
      .scale = scale_by,
      .axpy = axpy_row,
      .soft_cap = soft_cap,
      .max = max_row,
      .exp_sum = exp_sum,
      .activate = activate,
      .rotate = rotate,
      .weighted_sum = weighted_sum,
      .read = read_all,
  };
}

constexpr Kernels make_table(const char* name) {
  return table_of<WeightF32, WeightF16, WeightBF16, WeightQ8_0, WeightQ4_0, WeightQ4_1, WeightQ5_0, WeightQ5_1,
                  WeightQ2_K, WeightQ3_K, WeightQ4_K, WeightQ5_K, WeightQ6_K, WeightIQ4_NL, WeightIQ4_XS, WeightMXFP4>(
      name);
}
