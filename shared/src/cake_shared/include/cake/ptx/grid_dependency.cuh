// Programmatic dependent launch: a kernel may become resident while the one before it on the stream still runs.
//
// A chain in which every CTA of every kernel waits before its first access of global memory, and before it may return, keeps
// the order of the stream: a kernel ends after the one that it waited for, and so after all before that. A kernel may do without
// what the one before it does, and wait at its end alone, if that one lets it start only after it has itself waited.
#pragma once

namespace cake::ptx {

// Lets the next kernel on the stream become resident once all CTAs of this one have called this or ended.
__device__ __forceinline__ void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// Returns when the kernel before this one has ended and its writes are visible; at once where the launch was an ordinary one.
__device__ __forceinline__ void wait_for_predecessor() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

}  // namespace cake::ptx
