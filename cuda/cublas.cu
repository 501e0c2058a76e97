#include "cuda/cublas.cuh"

#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <string>

#include "core/error.h"
#include "cuda/cuda.h"

namespace hearth::cuda {
namespace {

#define HEARTH_TEXT_OF(x) #x
#define HEARTH_TEXT(x) HEARTH_TEXT_OF(x)
// Functions and enumerators are those of the headers, so the library has to be of their generation.
constexpr const char* kLibrary = "libcublas.so." HEARTH_TEXT(CUBLAS_VER_MAJOR);

// Where the loader looks, then where NVIDIA's installers put it without always telling the loader.
void* open_library(std::string* why) {
  for (const std::string& folder : {std::string(), std::string("/usr/local/cuda/lib64/"),
                                    fmt::format("/usr/local/cuda-{}/lib64/", CUBLAS_VER_MAJOR)}) {
    if (void* library = dlopen((folder + kLibrary).c_str(), RTLD_NOW | RTLD_LOCAL)) return library;
    if (why->empty()) *why = dlerror();
  }
  return nullptr;
}

template <typename F>
void find(void* library, const char* name, F* function) {
  *function = reinterpret_cast<F>(dlsym(library, name));
  if (*function == nullptr) fail("{} has no function {}; install NVIDIA's own", kLibrary, name);
}

CublasFunctions load() {
  std::string why;
  void* library = open_library(&why);  // stays loaded: its threads and contexts outlive handles
  if (library == nullptr) {
    fail(
        "a GPU needs NVIDIA's {}, which cannot be loaded ({}); install its package libcublas-{}-{} or another CUDA {} "
        "toolkit, or use --device cpu",
        kLibrary, why, CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10, CUBLAS_VER_MAJOR);
  }
  CublasFunctions f{};
  // As cublas_v2.h's macros translate names.
  find(library, HEARTH_TEXT(cublasCreate), &f.create);
  find(library, HEARTH_TEXT(cublasDestroy), &f.destroy);
  find(library, HEARTH_TEXT(cublasSetStream), &f.set_stream);
  find(library, HEARTH_TEXT(cublasSetWorkspace), &f.set_workspace);
  find(library, HEARTH_TEXT(cublasSgemm), &f.sgemm);
  find(library, HEARTH_TEXT(cublasGemmEx), &f.gemm_ex);
  find(library, HEARTH_TEXT(cublasGetStatusString), &f.status_string);
  return f;
}

}  // namespace

const CublasFunctions& cublas() {
  static const CublasFunctions functions = load();  // a failure is tried again the next time
  return functions;
}

void require_libraries() {
  cublas();
}

}  // namespace hearth::cuda
