// Loads and stores of every width and space, initialised module variables, parameters by value, generic addresses.
#include "common.cuh"

struct Bytes12 {
  uint8_t a[3];
  uint16_t b;
  int8_t c[5];
};
struct Parameters {
  uint8_t first;
  uint64_t wide;
  float scale[5];
  Bytes12 nested;
  int32_t table[32];
};

__constant__ int32_t constant_table[16] = {3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, -3};
__constant__ double constant_doubles[3] = {0.5, -2.25, 1e300};
__device__ uint16_t global_table[8] = {1, 2, 4, 8, 16, 32, 64, 65535};
__device__ uint32_t global_counter = 41;
__device__ uint32_t global_zero[4];
__device__ const uint16_t* global_pointer = global_table + 3;

extern "C" __global__ void vectors(const uint8_t* in, uint8_t* out) {
  int i = threadIdx.x;
  reinterpret_cast<uint4*>(out)[i] = reinterpret_cast<const uint4*>(in)[i];
  out += 16 * blockDim.x;
  uint2 two = reinterpret_cast<const uint2*>(in)[i];
  reinterpret_cast<uint2*>(out)[i] = make_uint2(two.y, two.x);
  out += 8 * blockDim.x;
  ushort4 s = reinterpret_cast<const ushort4*>(in)[i];
  reinterpret_cast<ushort4*>(out)[i] = make_ushort4(s.w, s.z, s.y, s.x);
  out += 8 * blockDim.x;
  uchar4 b = reinterpret_cast<const uchar4*>(in)[i];
  reinterpret_cast<uchar4*>(out)[i] = make_uchar4(b.w, b.z, b.y, b.x);
  out += 4 * blockDim.x;
  double2 d = reinterpret_cast<const double2*>(in)[i];
  reinterpret_cast<longlong2*>(out)[i] = make_longlong2(__double_as_longlong(d.y), __double_as_longlong(d.x));
  out += 16 * blockDim.x;
  int32_t wide = reinterpret_cast<const int8_t*>(in)[i] * 1000 + reinterpret_cast<const int16_t*>(in)[i];
  reinterpret_cast<int32_t*>(out)[i] = wide;
  out += 4 * blockDim.x;
  int64_t wider = reinterpret_cast<const int32_t*>(in)[i];
  reinterpret_cast<int64_t*>(out)[i] = wider * 3;
}

extern "C" __global__ void variables(uint32_t* out) {
  int i = threadIdx.x;
  uint32_t r = constant_table[i & 15] + static_cast<int>(constant_doubles[i & 1] * 4) + global_table[i & 7];
  r += global_pointer[i & 3] * 3 + global_zero[i & 3];
  out[i] = r + global_counter;
  __syncthreads();
  if (i == 0) global_counter += 1;
  if (i < 4) global_zero[i] = i + 5;
}

extern "C" __global__ void by_value(const __grid_constant__ Parameters p, uint32_t* out) {
  int i = threadIdx.x;
  uint32_t r = p.first + static_cast<uint32_t>(p.wide >> (i & 31)) + __float_as_uint(p.scale[i % 5]);
  r += p.nested.a[i % 3] * 7 + p.nested.b + static_cast<uint32_t>(p.nested.c[i % 5]) * 11;
  out[i] = r ^ static_cast<uint32_t>(p.table[i & 31]);
}

__device__ __noinline__ uint32_t through_generic(const uint32_t* p, int count) {
  uint32_t r = 0;
  for (int k = 0; k < count; k++) r = r * 17 + p[k];
  r += (__isShared(p) ? 1u : 0u) + (__isGlobal(p) ? 2u : 0u) + (__isLocal(p) ? 4u : 0u) + (__isConstant(p) ? 8u : 0u);
  return r;
}

extern "C" __global__ void generic_addresses(const uint32_t* in, uint32_t* out) {
  __shared__ uint32_t tile[128];
  int i = threadIdx.x;
  tile[i] = scramble(i);
  uint32_t local[4];
  for (int k = 0; k < 4; k++) local[k] = in[(i + k) & 127];
  __syncthreads();
  const uint32_t* p;
  switch (i % 3) {
    case 0: p = tile + (i & 63); break;
    case 1: p = in + (i & 63); break;
    default: p = local; break;
  }
  out[i] = through_generic(p, 4);
}

extern "C" __global__ void shared_memory(const uint32_t* in, uint32_t* out, int n) {
  extern __shared__ __align__(16) uint8_t raw[];
  __shared__ uint32_t fixed[33 * 8];
  __shared__ uint8_t small[40];
  uint32_t* dynamic = reinterpret_cast<uint32_t*>(raw);
  int i = threadIdx.x;
  for (int k = i; k < n; k += blockDim.x) dynamic[n - 1 - k] = in[k];
  if (i < 40) small[i] = static_cast<uint8_t>(in[i] >> 8);
  __syncthreads();
  for (int k = i; k < 256; k += blockDim.x) fixed[(k % 8) * 33 + k / 8] = dynamic[k % n];
  __syncthreads();
  uint32_t r = 0;
  for (int k = 0; k < 8; k++) r = r * 5 + fixed[k * 33 + (i & 31)];
  uint4 q = reinterpret_cast<uint4*>(raw)[i % (n / 4)];
  out[i] = r + (q.x ^ q.y ^ q.z ^ q.w) + small[i % 40];
}

// Cache operators, eviction hints and memory orders move no bits: the values say that they were executed.
extern "C" __global__ void hints(const uint32_t* in, uint32_t* out) {
  int i = threadIdx.x;
  uint32_t v, r = 0;
  uint64_t policy;
  const uint32_t* p = in + i;
#define LOAD(op) asm volatile(op " %0, [%1];" : "=r"(v) : "l"(p) : "memory"); r = r * 3 + v;
  LOAD("ld.global.ca.u32") LOAD("ld.global.cg.u32") LOAD("ld.global.cs.u32") LOAD("ld.global.cv.u32")
  LOAD("ld.global.lu.u32") LOAD("ld.global.nc.u32") LOAD("ld.global.nc.L1::no_allocate.L2::128B.u32")
  LOAD("ld.volatile.global.u32") LOAD("ld.relaxed.gpu.global.u32") LOAD("ld.acquire.gpu.global.u32")
  LOAD("ld.acquire.sys.global.u32") LOAD("ld.relaxed.cta.global.L1::evict_last.u32") LOAD("ld.weak.global.u32")
#undef LOAD
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile("ld.global.L2::cache_hint.u32 %0, [%1], %2;" : "=r"(v) : "l"(p), "l"(policy));
  r += v;
  asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
  asm volatile("prefetchu.L1 [%0];" ::"l"(p));
#define STORE(op, k) asm volatile(op " [%0], %1;" ::"l"(out + i + (k) * blockDim.x), "r"(r + (k)) : "memory");
  STORE("st.global.wb.u32", 0) STORE("st.global.cg.u32", 1) STORE("st.global.cs.u32", 2) STORE("st.global.wt.u32", 3)
  STORE("st.volatile.global.u32", 4) STORE("st.relaxed.gpu.global.u32", 5) STORE("st.release.gpu.global.u32", 6)
  STORE("st.release.sys.global.u32", 7) STORE("st.global.L1::no_allocate.u32", 8)
#undef STORE
  asm volatile("fence.acq_rel.cta; fence.acq_rel.gpu; fence.sc.sys; membar.cta; membar.gl; membar.sys;" ::: "memory");
  asm volatile("nanosleep.u32 20;");
}

extern "C" __global__ void special_registers(uint32_t* out) {
  uint32_t v, t = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
  uint32_t block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  uint32_t* p = out + (block * blockDim.x * blockDim.y * blockDim.z + t) * 16;
  p[0] = threadIdx.x | threadIdx.y << 8 | threadIdx.z << 16;
  p[1] = blockIdx.x | blockIdx.y << 8 | blockIdx.z << 16;
  p[2] = blockDim.x | blockDim.y << 8 | blockDim.z << 16;
  p[3] = gridDim.x | gridDim.y << 8 | gridDim.z << 16;
#define READ(k, name) asm volatile("mov.u32 %0, " name ";" : "=r"(v)); p[k] = v;
  READ(4, "%laneid") READ(5, "%lanemask_lt") READ(6, "%lanemask_le") READ(7, "%lanemask_gt") READ(8, "%lanemask_ge")
  READ(9, "%lanemask_eq") READ(10, "%dynamic_smem_size") READ(11, "%cluster_ctarank") READ(12, "%cluster_nctarank")
  READ(13, "%cluster_ctaid.x") READ(14, "%nclusterid.x") READ(15, "%clusterid.y")
#undef READ
}
