// The functions of cuBLASLt, looked up at run time in the copy that torch has loaded. A link
// dependency would fail with a CPU build of torch, which has no such library, and could load a
// second copy. The header cublasLt.h fits all libraries of the same major version.
#pragma once

#include <cublasLt.h>
#include <cuda_runtime.h>
#include <dlfcn.h>

#include <string>
#include <type_traits>

#include "common/check.h"

namespace lightseq {

struct CublasLt {
  decltype(&cublasLtCreate) create;
  decltype(&cublasLtGetVersion) version;
  decltype(&cublasLtGetStatusString) message;
  decltype(&cublasLtMatmul) matmul;
  decltype(&cublasLtMatmulAlgoGetHeuristic) get_heuristic;
  decltype(&cublasLtMatmulDescInit_internal) init_desc;
  decltype(&cublasLtMatmulDescSetAttribute) set_desc;
  decltype(&cublasLtMatmulPreferenceInit_internal) init_preference;
  decltype(&cublasLtMatmulPreferenceSetAttribute) set_preference;
  decltype(&cublasLtMatrixLayoutInit_internal) init_layout;

  void check(cublasStatus_t status, const char* op) const {
    require(status == CUBLAS_STATUS_SUCCESS, op, ": cuBLASLt: ", message(status));
  }
};

inline const CublasLt& cublaslt() {
  static const CublasLt functions = [] {
    const std::string name = "libcublasLt.so." + std::to_string(CUDART_VERSION / 1000);
    void* library = dlopen(name.c_str(), RTLD_NOLOAD | RTLD_LAZY);
    if (library == nullptr) library = dlopen(name.c_str(), RTLD_LAZY);
    require(library != nullptr, "lightseq: ", name,
            " was not found; install a CUDA build of torch, which includes it");
    const auto find = [&](auto& function, const char* symbol) {
      void* const address = dlsym(library, symbol);
      require(address != nullptr, "lightseq: ", name, " has no ", symbol);
      function = reinterpret_cast<std::decay_t<decltype(function)>>(address);
    };
    CublasLt lt;
    find(lt.create, "cublasLtCreate");
    find(lt.version, "cublasLtGetVersion");
    find(lt.message, "cublasLtGetStatusString");
    find(lt.matmul, "cublasLtMatmul");
    find(lt.get_heuristic, "cublasLtMatmulAlgoGetHeuristic");
    find(lt.init_desc, "cublasLtMatmulDescInit_internal");
    find(lt.set_desc, "cublasLtMatmulDescSetAttribute");
    find(lt.init_preference, "cublasLtMatmulPreferenceInit_internal");
    find(lt.set_preference, "cublasLtMatmulPreferenceSetAttribute");
    find(lt.init_layout, "cublasLtMatrixLayoutInit_internal");
    return lt;
  }();
  return functions;
}

}  // namespace lightseq
