#pragma once
#include <cstddef>

namespace hearth::cuda {

// Throws Error, in one line, when there is no such GPU.
void require_gpu(int gpu);

// Makes the GPU current on this thread and creates its context if there is none. Returns the bytes of GPU memory that
// the context took, measured when this process first made it (cuBLAS and the kernels included).
size_t activate(int gpu);

// Whether launches on this GPU may overlap (programmatic dependent launch): both the GPU and this build's code must
// have it.
bool supports_overlap(int gpu);

}  // namespace hearth::cuda
