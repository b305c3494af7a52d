// The functions that Python calls: each makes a launch of what the plan chose and returns it as a function of the stream.
#include "cake/gemm/host/prepare.h"
#include "router_host.h"

TVM_FFI_DLL_EXPORT_TYPED_FUNC(prepare_gemm, cake::gemm::prepare_gemm);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(run_gemm, cake::gemm::run_gemm);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(prepare_pair, cake::gemm::prepare_pair);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(run_pair, cake::gemm::run_pair);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(prepare_router, dense_projection_det_gemm::prepare_router);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(run_router, dense_projection_det_gemm::run_router);
