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
      .to_float = {to_float<WeightF32>, to_float<WeightF16>, to_float<WeightBF16>, to_float<WeightQ8_0>,
                   to_float<WeightQ4_0>},
      .pack_rows = {pack_rows<WeightF32>, pack_rows<WeightF16>, pack_rows<WeightBF16>, nullptr, nullptr},
      .pack_cols = {pack_cols<WeightF32>, pack_cols<WeightF16>, pack_cols<WeightBF16>, pack_cols<WeightQ8_0>,
                    pack_cols<WeightQ4_0>},
      .gemm_tile = gemm_tile,
#ifdef HEARTH_INT8_GEMM
      .int8_panel_bytes = int8_panel_bytes,
      .int8_pack_rows = {nullptr, nullptr, nullptr, int8_pack_rows<WeightQ8_0>, int8_pack_rows<WeightQ4_0>},
      .int8_gemm = {nullptr, nullptr, nullptr, int8_gemm<16>, int8_gemm<1>},  // Q8Row::total is -8 sum x
#else
      .int8_panel_bytes = nullptr,
      .int8_pack_rows = {},
      .int8_gemm = {},
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
      .sign_bits = sign_bits,
      .sign_scores = sign_scores,
      .read = read_all,
  };
}
