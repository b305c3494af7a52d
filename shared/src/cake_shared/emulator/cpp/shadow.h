// What is known about each byte of a CTA's shared memory beside its value.
#pragma once
#include <memory>
#include <vector>

#include "core.h"

namespace cake::emu {

struct Cta;
struct Warp;
struct AsyncOp;

class SharedShadow {
 public:
  SharedShadow(Cta& cta, u32 granule);
  void access(Warp& w, u32 offset, u32 bytes, bool reads, bool writes, bool atomic, int lane) {
    (void)w;
    (void)atomic;
    if (reads) check_written(offset, bytes, lane);
    if (writes) std::memset(written_.data() + offset, 1, bytes);
  }
  // Accesses of the asynchronous proxy on behalf of `issuer`: wgmma, tcgen05 and bulk copies.
  void async_access(Warp& issuer, u32 offset, u32 bytes, bool reads, bool writes) {
    (void)issuer;
    if (reads) check_written(offset, bytes, -1);
    if (writes) std::memset(written_.data() + offset, 1, bytes);
  }
  // What orders the accesses of different warps.
  void barrier_arrive(Warp&, u32, bool) {}
  void barrier_released(Cta&, u32) {}
  void cluster_arrive(Warp&) {}
  void cluster_released(Cta&) {}
  void cluster_wait(Warp&) {}
  void proxy_fence(Warp&) {}
  void copy_begin(Warp&, u32, u32, int) {}
  void copy_issued(Warp&, const std::shared_ptr<AsyncOp>&) {}
  void copy_waited(Warp&) {}
  void copy_signal(Warp&, u32) {}
  void bulk_waited(Warp&) {}
  void async_arrived(u32 offset, u32 bytes, u32 barrier) { (void)offset, (void)bytes, (void)barrier; }
  void mbarrier_init(Warp&, u32) {}
  void mbarrier_inval(u32) {}
  bool is_mbarrier(u32) const { return false; }
  void mbarrier_phase(u32) {}
  void mbarrier_arrive(Warp&, u32) {}
  void mbarrier_acquire(Warp&, u32) {}

 private:
  void check_written(u32 offset, u32 bytes, int lane) const;
  std::vector<u8> written_;
};

}  // namespace cake::emu
