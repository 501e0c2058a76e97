#pragma once
// cuBLAS, loaded when a GPU is first used: a program that is built with CUDA starts where there is neither GPU nor
// library.
#include <cublas_v2.h>

namespace hearth::cuda {

// The functions of cuBLAS that are called, under their names there.
struct CublasFunctions {
  decltype(&cublasCreate) create;
  decltype(&cublasDestroy) destroy;
  decltype(&cublasSetStream) set_stream;
  decltype(&cublasSetWorkspace) set_workspace;
  decltype(&cublasSgemm) sgemm;
  // Written out: the header has two functions of this name.
  cublasStatus_t (*gemm_ex)(cublasHandle_t, cublasOperation_t, cublasOperation_t, int m, int n, int k,
                            const void* alpha, const void* a, cudaDataType, int lda, const void* b, cudaDataType,
                            int ldb, const void* beta, void* c, cudaDataType, int ldc, cublasComputeType_t,
                            cublasGemmAlgo_t);
  decltype(&cublasGetStatusString) status_string;
};

// Throws Error, which says what to install, where the library of the CUDA generation that this was built with is
// absent.
const CublasFunctions& cublas();

}  // namespace hearth::cuda
