// cuBLASLt's functions, each of which finds the library's own when it is
// called first. The library takes 150 MB and a tenth of a second when it is
// loaded, and a run on the CPU should not pay for that; so it is not linked.
#include <cublasLt.h>
#include <dlfcn.h>

#include <string>

#include "absl/strings/str_cat.h"
#include "kernels/cuda/check.h"

namespace {

constexpr char kLibrary[] = "libcublasLt.so.13";

// The library's function; throws DeviceError with the remedy where there is no
// such library or function.
void* Find(const char* name) {
  static void* const library = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
  void* const function = library == nullptr ? nullptr : dlsym(library, name);
  if (function == nullptr) {
    const char* why = dlerror();
    zero::cuda::ThrowDeviceError(
        name, __FILE__, __LINE__,
        absl::StrCat(why == nullptr ? kLibrary : why,
                     "; install the CUDA toolkit, or add its folder to "
                     "LD_LIBRARY_PATH"));
  }
  return function;
}

}  // namespace

// Defines `name` with its declared type and passes the call on.
#define ZERO_FORWARD(name, parameters, arguments)       \
  cublasStatus_t name parameters {                      \
    static const auto function =                        \
        reinterpret_cast<decltype(&name)>(Find(#name)); \
    return function arguments;                          \
  }

extern "C" {

ZERO_FORWARD(cublasLtCreate, (cublasLtHandle_t * handle), (handle))
ZERO_FORWARD(cublasLtDestroy, (cublasLtHandle_t handle), (handle))
ZERO_FORWARD(cublasLtMatmulDescInit_internal,
             (cublasLtMatmulDesc_t desc, size_t size,
              cublasComputeType_t compute, cudaDataType_t scale),
             (desc, size, compute, scale))
ZERO_FORWARD(cublasLtMatmulDescSetAttribute,
             (cublasLtMatmulDesc_t desc,
              cublasLtMatmulDescAttributes_t attribute, const void* value,
              size_t size),
             (desc, attribute, value, size))
ZERO_FORWARD(cublasLtMatrixLayoutInit_internal,
             (cublasLtMatrixLayout_t layout, size_t size, cudaDataType type,
              uint64_t rows, uint64_t cols, int64_t ld),
             (layout, size, type, rows, cols, ld))
ZERO_FORWARD(cublasLtMatmulPreferenceInit_internal,
             (cublasLtMatmulPreference_t preference, size_t size),
             (preference, size))
ZERO_FORWARD(cublasLtMatmulPreferenceSetAttribute,
             (cublasLtMatmulPreference_t preference,
              cublasLtMatmulPreferenceAttributes_t attribute, const void* value,
              size_t size),
             (preference, attribute, value, size))
ZERO_FORWARD(cublasLtMatmulAlgoGetHeuristic,
             (cublasLtHandle_t handle, cublasLtMatmulDesc_t desc,
              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
              cublasLtMatmulPreference_t preference, int wanted,
              cublasLtMatmulHeuristicResult_t* results, int* found),
             (handle, desc, a, b, c, d, preference, wanted, results, found))
ZERO_FORWARD(cublasLtMatmul,
             (cublasLtHandle_t handle, cublasLtMatmulDesc_t desc,
              const void* alpha, const void* a, cublasLtMatrixLayout_t a_layout,
              const void* b, cublasLtMatrixLayout_t b_layout, const void* beta,
              const void* c, cublasLtMatrixLayout_t c_layout, void* d,
              cublasLtMatrixLayout_t d_layout, const cublasLtMatmulAlgo_t* algo,
              void* workspace, size_t workspace_bytes, cudaStream_t stream),
             (handle, desc, alpha, a, a_layout, b, b_layout, beta, c, c_layout,
              d, d_layout, algo, workspace, workspace_bytes, stream))

const char* cublasLtGetStatusName(cublasStatus_t status) {
  static const auto function =
      reinterpret_cast<decltype(&cublasLtGetStatusName)>(
          Find("cublasLtGetStatusName"));
  return function(status);
}

}  // extern "C"
