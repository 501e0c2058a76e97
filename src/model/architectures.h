#pragma once
// Architectures as descriptions: what a file's keys and tensors do not say, in llama.cpp's conventions. The forward pass
// knows none of their names; read_config() and Model::load() turn a description and a file into a Config and Weights.
#include <cstdint>
#include <span>
#include <string_view>

#include "core/ops.h"

namespace hearth::model {

struct Architecture {
  std::string_view name;  // general.architecture, and the prefix of its keys
  NormKind norm = NormKind::rms;
  RopeKind rope = RopeKind::neox;                   // none: learned positions
  std::string_view activation = "silu";             // of files written by llama.cpp
  std::string_view powerinfer_activation = "relu";  // of PowerInfer's files, which hold ReLU models only
  bool parallel_block = false;                      // x + attention(n_a(x)) + ffn(n_f(x))
  bool fused_gate_up = false;                       // ffn_up has the rows of the gate, then those of up
  int64_t position_offset = 0;                      // of learned positions
  bool latent_attention = false;                    // multi-head latent attention
  bool early_router = false;                        // routers read their layer's input, before its norm and attention

  // --- names of the norms before and after each half (blk.N.NAME.weight); empty: none ---
  std::string_view attn_norm = "attn_norm", attn_post_norm = {};
  std::string_view ffn_norm = "ffn_norm", ffn_post_norm = {};

  // --- what differs between layers, where no key says otherwise ---
  int64_t window = 0;           // attention.sliding_window
  int64_t window_period = 0;    // every so many-th layer sees everything; 0: a window is in all layers
  bool full_first = false;      // that layer is the first of its period, not the last
  bool full_unrotated = false;  // it is not rotated
  int64_t no_rope_period = 0;   // every so many-th layer is not rotated; 0: all are
  double window_rope_base =
      0;  // RoPE base of layers with a window, without the other layers' scaling; 0: no difference

  // --- scales and caps, where no key says otherwise ---
  bool embedding_by_width = false;  // embeddings are multiplied by sqrt(n_embd)
  int64_t wide_scale_layers = 0;    // the size of so many layers scales queries by n_embd / n_head, not head_dim
  double attn_soft_cap = 0, logit_soft_cap = 0;
  bool yarn_truncates = true;  // YaRN's ramp begins and ends at whole pairs
};

std::span<const Architecture> architectures();
// Null where there is none of this name.
const Architecture* find_architecture(std::string_view name);

}  // namespace hearth::model
