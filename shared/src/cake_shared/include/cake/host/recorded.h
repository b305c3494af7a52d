// Launches that are always made together, recorded once: a call then costs the host one launch instead of several.
//
// A CUDA graph of them, made where it is asked for; on a stream that is being captured they are launched one by one and become part
// of that capture. In the emulator they are always launched one by one.
#pragma once

#include <memory>
#include <utility>

#include "cake/host/launch.h"

namespace cake::host {

#ifdef CAKE_EMULATOR

template <class Launches>
class Recorded {
 public:
  Recorded(DLDevice, Launches launches) : launches_(std::move(launches)) {}
  void operator()(int64_t stream) const { launches_(stream); }

 private:
  Launches launches_;
};

#else

namespace detail {

struct GraphDeleter {
  void operator()(cudaGraphExec_t graph) const { cudaGraphExecDestroy(graph); }
};

// Allows for a while what a capture that goes on elsewhere in the process would forbid this thread.
class RelaxedCapture {
 public:
  RelaxedCapture() { check_cuda(cudaThreadExchangeStreamCaptureMode(&mode_), "cudaThreadExchangeStreamCaptureMode"); }
  ~RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

template <class Launches>
cudaGraphExec_t record(const Launches& launches) {
  const RelaxedCapture relaxed;
  cudaStream_t stream = nullptr;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
  cudaError_t status = cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed);
  try {
    if (status == cudaSuccess) launches(reinterpret_cast<int64_t>(stream));
  } catch (...) {
    cudaStreamEndCapture(stream, &graph);
    if (graph != nullptr) cudaGraphDestroy(graph);
    cudaStreamDestroy(stream);
    throw;
  }
  if (status == cudaSuccess) status = cudaStreamEndCapture(stream, &graph);
  if (status == cudaSuccess) status = cudaGraphInstantiate(&exec, graph, 0);
  if (graph != nullptr) cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
  check_cuda(status, "recording of launches");
  return exec;
}

}  // namespace detail

template <class Launches>
class Recorded {
 public:
  Recorded(DLDevice device, Launches launches) : device_(device), launches_(std::move(launches)) {
    const DeviceGuard current(device_);
    graph_ = std::shared_ptr<CUgraphExec_st>(detail::record(launches_), detail::GraphDeleter());
  }

  void operator()(int64_t stream) const {
    const DeviceGuard current(device_);
    const cudaStream_t on = reinterpret_cast<cudaStream_t>(stream);
    cudaStreamCaptureStatus capturing = cudaStreamCaptureStatusNone;
    check_cuda(cudaStreamIsCapturing(on, &capturing), "cudaStreamIsCapturing");
    if (capturing != cudaStreamCaptureStatusNone) {
      launches_(stream);
    } else {
      check_cuda(cudaGraphLaunch(graph_.get(), on), "cudaGraphLaunch");
    }
  }

 private:
  DLDevice device_;
  Launches launches_;
  std::shared_ptr<CUgraphExec_st> graph_;
};

#endif

}  // namespace cake::host
