// What the kernels take: plain C++17, read by nvcc, by the host compiler and by the emulator's build.
//
// Strides count elements. H is the number of key heads, HV of value heads; a value head hv reads key head hv / (HV / H).
// Chunk records and tiles are indexed by chunk * HV + hv, where chunk counts through the pack.
#pragma once

#include <cstdint>

namespace cake::gdn {

inline constexpr int kChunk = 64;       // tokens of a chunk
inline constexpr int kHeadDim = 128;    // K and V
inline constexpr int kTileBytes = kChunk * kChunk * 2;
inline constexpr int kTokenTileBytes = kChunk * kHeadDim * 2;
inline constexpr int kStateTileBytes = kHeadDim * kHeadDim * 2;
inline constexpr int kStateElements = kHeadDim * kHeadDim;

// One chunk of the pack; unused entries of the table's capacity have tokens == 0.
struct alignas(16) Chunk {
  int32_t first_token;
  int32_t tokens;
  int32_t sequence;
  int32_t reserved;
};

// One segment; unused entries have sequence == -1. An empty sequence is one segment without chunks.
struct alignas(16) Segment {
  int32_t first_chunk;
  int32_t chunks;
  int32_t sequence;
  int32_t index;        // within its sequence
  int32_t segments;     // of its sequence
  int32_t long_index;   // counts the segments of sequences that have several; -1 in a sequence of one
  int32_t reserved[2];
};

// Four rows of kChunk floats: what the chain needs of gates and beta, made once per chunk and value head.
enum ScalarRow : int { kGamma = 0, kEnd = 1, kBeta = 2, kLog2Decay = 3, kScalarRows = 4 };
inline constexpr int kScalarBytes = kScalarRows * kChunk * 4;

struct TokenMatrix {          // [T, heads, 128] BF16, last dimension contiguous, rows 16-byte aligned
  void* data;
  int64_t token_stride;
  int64_t head_stride;
};

struct TokenScalars {         // [T, HV], FP32 or BF16
  void* data;
  int64_t token_stride;
  int64_t head_stride;
  int32_t is_bf16;
};

struct StateArray {           // [N, HV, K, V] or, V first, [N, HV, V, K]; FP32; data may be null
  float* data;
  int64_t k_stride;
  int64_t v_stride;
};

struct Heads {
  int32_t key_heads;
  int32_t value_heads;
  int32_t group;              // value_heads / key_heads
};

struct WyParams {
  Heads heads;
  TokenMatrix q, k;
  TokenScalars decay;         // chunk-local inclusive sums of the log gates, FP32
  TokenScalars beta;
  const Chunk* chunks;
  char* inverse;              // T tiles
  char* attention;            // P tiles, scale folded in
  float* scalars;
  float scale;
};

struct ChainParams {
  Heads heads;
  TokenMatrix q, k, v, o;
  const Chunk* chunks;
  const Segment* segments;
  const char* inverse;
  const char* attention;
  const float* scalars;
  char* entry_states;         // S0 of every chunk, transposed (V x K) BF16 tiles
  char* residuals;            // X tiles
  char* writes;               // V' tiles
  StateArray initial, final;
  const float* segment_entry; // [long, HV, V, K] FP32, entry state of every segment but the first
  float* segment_exit;        // [long, HV, V, K] FP32: N of a segment (the exit state itself for the first)
  float* segment_factor;      // [long, HV, K, K] FP32: M transposed
  float scale;
  int32_t slices;             // CTAs that share the value columns of one head
};

struct ReverseParams {
  Heads heads;
  TokenMatrix q, k, grad_o, grad_v;
  const Chunk* chunks;
  const Segment* segments;
  const char* inverse;
  const char* attention;
  const float* scalars;
  char* exit_grads;           // dS1 of every chunk, transposed BF16 tiles
  char* residual_grads;       // dR tiles
  StateArray grad_final, grad_initial;
  const float* segment_exit_grad;  // [long, HV, V, K]: gradient of the exit state of every segment but the last
  float* segment_entry_grad;       // [long, HV, V, K]: Y of a segment (the gradient itself for the last)
  float scale;
  int32_t slices;
};

struct ComposeParams {
  Heads heads;
  const Segment* segments;
  int32_t segment_capacity;
  const float* factor;        // M transposed
  const float* offset;        // N, or Y
  float* result;              // entry states, or exit gradients
};

struct ChunkGradParams {
  Heads heads;
  TokenMatrix q, k, grad_o, grad_q, grad_k;
  TokenScalars grad_decay, grad_beta;   // gradients of the log gates and of beta
  const Chunk* chunks;
  const float* scalars;
  const char* entry_states;
  const char* exit_grads;
  const char* residuals;
  const char* writes;
  const char* residual_grads;
  float scale;
};

}  // namespace cake::gdn
