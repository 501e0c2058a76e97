// The table itself. Part of every kernels_*.cpp, after the other bodies.

constexpr Kernels make_table(const char* name) {
  return {
      .name = name,
      .mr = kMr,
      .nr = kNr,
      .dot_tokens = kDotTokens,
      .dot_rows = {dot_rows<WeightF32>, dot_rows<WeightF16>, dot_rows<WeightBF16>, dot_rows<WeightQ8_0>,
                   dot_rows<WeightQ4_0>},
      .axpy_rows = {axpy_rows<WeightF32>, axpy_rows<WeightF16>, axpy_rows<WeightBF16>, axpy_rows<WeightQ8_0>,
                    axpy_rows<WeightQ4_0>},
      .axpy_tokens = {axpy_tokens<WeightF32>, axpy_tokens<WeightF16>, axpy_tokens<WeightBF16>, axpy_tokens<WeightQ8_0>,
                      axpy_tokens<WeightQ4_0>},
      .to_float = {to_float<WeightF32>, to_float<WeightF16>, to_float<WeightBF16>, to_float<WeightQ8_0>,
                   to_float<WeightQ4_0>},
      .pack_rows = {pack_rows<WeightF32>, pack_rows<WeightF16>, pack_rows<WeightBF16>, nullptr, nullptr},
      .pack_cols = {pack_cols<WeightF32>, pack_cols<WeightF16>, pack_cols<WeightBF16>, pack_cols<WeightQ8_0>,
                    pack_cols<WeightQ4_0>},
      .gemm_tile = gemm_tile,
#ifdef HEARTH_PANELS
      .panel_pack = {nullptr, nullptr, nullptr, panel_pack<WeightQ8_0>, panel_pack<WeightQ4_0>},
      .panel_row = {nullptr, nullptr, nullptr, panel_row<WeightQ8_0>, panel_row<WeightQ4_0>},
      .panel_dot = {nullptr, nullptr, nullptr, panel_dot<WeightQ8_0>, panel_dot<WeightQ4_0>},
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
      .max = max_row,
      .exp_sum = exp_sum,
      .activate = activate,
      .rotate = rotate,
      .weighted_sum = weighted_sum,
      .read = read_all,
  };
}
