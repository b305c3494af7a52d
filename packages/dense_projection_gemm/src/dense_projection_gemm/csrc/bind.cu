// The functions that Python calls.
#include "split_host.h"

TVM_FFI_DLL_EXPORT_TYPED_FUNC(prepare_split, dense_projection_gemm::prepare_split);
