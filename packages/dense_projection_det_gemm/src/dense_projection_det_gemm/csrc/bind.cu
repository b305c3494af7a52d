// The functions that Python calls: each makes a launch of what the plan chose and returns it as a function of the stream.
#include "cake/gemm/host/prepare.h"

TVM_FFI_DLL_EXPORT_TYPED_FUNC(prepare_gemm, cake::gemm::prepare_gemm);
