// What the stages of the rule take: plain C++17, read by nvcc, by a C++ compiler and by the emulator.
//
// Strides count elements. A value head h reads key head h / group. Tiles and scalars of the workspace are indexed by
// chunk * value_heads + h, where chunk is a row of the chunk table; those of a WavePart by its own count. BF16 tiles are stored as
// cake/tile/swizzle128.cuh states.
#pragma once

#include <cstdint>

#include "cake/host/kernel_ref.h"
#include "cake/work/chunks.h"
#include "cake/gdn/params.h"
#include "cake/gdn/wave_part.h"

namespace cake::gdn {

inline constexpr int kChunk = cake::work::kChunkTokens;
inline constexpr int kHeadDim = 128;                          // K and V
inline constexpr int kSquareTileBytes = kChunk * kChunk * 2;  // T, P
inline constexpr int kTokenTileBytes = kChunk * kHeadDim * 2;
inline constexpr int kStateTileBytes = kHeadDim * kHeadDim * 2;
inline constexpr int kStateElements = kHeadDim * kHeadDim;

// Rows of the scalars of a chunk and value head, kChunk floats each: gamma, e, beta and b in units of log 2.
enum ScalarRow : int { kGamma = 0, kEnd = 1, kBeta = 2, kLog2Decay = 3, kScalarRows = 4 };
inline constexpr int kScalarFloats = kScalarRows * kChunk;

// Threads of a CTA, which the launch and the kernel must agree on; a chain runs with 32 * warps.
inline constexpr int kPrologueThreads = 128;
inline constexpr int kWyThreads = 128;
inline constexpr int kChainThreads = 256;
inline constexpr int kSegmentStatesThreads = 512;
inline constexpr int kTokenGradientsThreads = 256;
inline constexpr int kGateParametersThreads = 256;

inline constexpr int kPrologueRowsPerWarp = 8;

// So many CTAs at most write what no chunk writes.
inline constexpr int kUncoveredCtas = 132;

// Up to so many sequences every CTA of the prologue that needs the offsets makes them for itself.
inline constexpr int kScannedSequences = 1024;

// In powers of two: where gates multiply to less, native programs count a segment's entry state, or the gradient of its exit state, as
// gone. It must have been 2^76 times larger than what a segment adds to come up to a rounding of that in FP32.
inline constexpr float kForgottenLog2 = -100.f;

// Value columns that a CTA of the segment_entries and segment_exits stages owns.
inline constexpr int kSegmentStatesColumns = 16;

struct Heads {
  int32_t key_heads;
  int32_t value_heads;
  int32_t group;           // value_heads / key_heads
  int32_t tokens_per_row;  // T of [B, T, ...]
};

struct TokenRows {  // [B, T, heads, 128] BF16, last dimension contiguous, every row 16-byte aligned
  void* data;
  int64_t row_stride, token_stride, head_stride;
};

struct TokenScalars {  // [B, T, value_heads], FP32 or BF16; data may be null
  void* data;
  int64_t row_stride, token_stride, head_stride;
  int32_t is_bf16;
};

struct HeadScalars {  // [value_heads], FP32 or BF16; data may be null
  void* data;
  int64_t stride;
  int32_t is_bf16;
};

struct States {  // [sequences, value_heads, K, V], or V first, contiguous FP32; data may be null
  float* data;
  int64_t k_stride, v_stride;
};

// g = -exp(A_log) softplus(raw + dt_bias). Gates given as they are: the prologue has them in raw, without A_log; raw.data is null
// for token_gradients.
struct GateOption {
  TokenScalars raw;
  HeadScalars a_log, dt_bias;
};

// beta = top * sigmoid(logit); top is 0 where beta is given as it is.
struct BetaOption {
  TokenScalars beta;
  float top;
};

struct NormalisedRows {
  TokenRows from;
  uint16_t* to;       // [B * T, heads, 128] BF16
  float* reciprocal;  // [B * T, heads]: 1 / sqrt(sum x^2 + 1e-6)
};

// A contiguous result [B * T, row_bytes] whose rows past the last sequence are zero.
struct ResultRows {
  void* data;
  int64_t row_bytes;
};
inline constexpr int kMaxResults = 5;

struct Uncovered {
  ResultRows results[kMaxResults];
  int32_t result_count;
  const float* states_from;  // [sequences, value_heads, K * V]: what an empty sequence hands on; null: zeros
  float* states_to;          // null: none
};

struct PrologueParams {
  PackOffsetsParams pack;
  int32_t scans_offsets;  // 0: pack_offsets has made them
  int32_t key_heads, value_heads;
  int32_t gate_ctas, uncovered_ctas, row_ctas;
  GateOption gate;        // without A_log the gates are its raw ones, as they are
  float* sums;            // [chunks, value_heads, 64]
  NormalisedRows rows[2];  // q and k; unused where row_ctas is 0
  Uncovered uncovered;
};

struct WyParams {
  Heads heads;
  PackTables tables;
  TokenRows q, k;
  BetaOption beta;
  const float* sums;  // [chunks, value_heads, 64]
  char* inverse;      // T tiles
  char* attention;    // P tiles, scale folded in
  float* scalars;
  float scale;
};

struct ChainParams {
  Heads heads;
  PackTables tables;
  TokenRows q, k, v, o;
  const char* inverse;
  const char* attention;
  const float* scalars;
  char* entry_states;      // S0 of every chunk, transposed (V x K)
  char* residuals;         // X tiles
  char* writes;            // V' tiles; of native programs U = V' / beta
  States initial, final;
  float* segment_entries;  // [slots, value_heads, V, K] FP32: entry states; from segment_pairs, N of the segment before
  float* segment_factors;  // [slots, value_heads, K, K] FP32: M transposed; native programs leave out what gates forget
  int32_t slots_per_row;
  int32_t warps;           // of a CTA, 4 or 8; each owns 16 value columns
  int32_t pair_columns;    // columns that segment_pairs runs: 128 for M alone, 256 for M and N
  int32_t keeps_entries;   // chunk_output: entry states that it makes itself are wanted, too
  float scale;
  WavePart part;           // of chunk_states
};

struct ReverseParams {
  Heads heads;
  PackTables tables;
  TokenRows q, k, grad_o, grad_v;
  const char* inverse;
  const char* attention;
  const float* scalars;
  char* exit_gradients;      // dS1 of every chunk, transposed
  char* residual_gradients;  // dR tiles: of portable programs
  float deferred_below;      // native programs leave dR in the rows of dv whose beta is smaller than this
  WavePart part;
  float* cut_gradients;      // [cut slots, value heads of the part, V, K] FP32: from the later half of a segment to its earlier one
  States grad_final, grad_initial;
  float* segment_exits;      // [slots, value_heads, V, K] FP32: gradient of the exit state of the segment before the slot's;
                             // from segment_gradients, Y of the slot's segment
  int32_t slots_per_row;
  int32_t warps;
  float scale;
};

// Stretches of a row of tokens at each of which at most one sequence of several segments can be found: see segment_states.cuh.
CAKE_HOST_DEVICE constexpr int32_t segment_stretches_of(int32_t tokens_per_row) {
  constexpr int32_t kTokens = cake::work::kSegmentedAboveTokens;
  return tokens_per_row / kTokens + (tokens_per_row % kTokens != 0);
}

struct SegmentStatesParams {
  Heads heads;
  PackTables tables;
  const float* factors;  // M transposed
  float* states;         // N to entry states, or Y to exit gradients, in place
  const float* scalars;  // tell which M are zero; null: none are known to be
  int32_t slots_per_row;
  int32_t items;         // stretches, value heads and slices of columns
};

struct TokenGradientsParams {
  Heads heads;
  PackTables tables;
  TokenRows q, k, grad_o, grad_q, grad_k;
  TokenRows v, grad_v;        // native programs alone, which keep neither X nor dR; rows of grad_v that hold dR become dv
  WavePart part;
  TokenScalars grad_gate, grad_beta;
  const float* q_reciprocal;  // [B * T, key_heads], or null where q is used as given; then q is the normalised one
  const float* k_reciprocal;
  GateOption gate;
  float beta_top;             // as BetaOption
  double* gate_partials;      // [chunks, value_heads, 2]: of A_log and dt_bias; null without the gate option
  const float* scalars;
  const char* entry_states;
  const char* exit_gradients;
  const char* residuals;
  const char* writes;
  const char* residual_gradients;
  float scale;
  Uncovered uncovered;        // of the call, where no prologue is launched; in one of its waves
};

struct GateParametersParams {
  PackTables tables;
  const double* gate_partials;
  HeadScalars grad_a_log, grad_dt_bias;
  int32_t heads;
};

}  // namespace cake::gdn

CAKE_DECLARE_KERNEL(prologue_any, cake::gdn::PrologueParams)
CAKE_DECLARE_KERNEL(wy_any, cake::gdn::WyParams)
CAKE_DECLARE_KERNEL(segment_pairs_any, cake::gdn::ChainParams)
CAKE_DECLARE_KERNEL(segment_entries_any, cake::gdn::SegmentStatesParams)
CAKE_DECLARE_KERNEL(chunk_output_any, cake::gdn::ChainParams)
CAKE_DECLARE_KERNEL(chunk_states_any, cake::gdn::ChainParams)
CAKE_DECLARE_KERNEL(segment_gradients_any, cake::gdn::ReverseParams)
CAKE_DECLARE_KERNEL(segment_exits_any, cake::gdn::SegmentStatesParams)
CAKE_DECLARE_KERNEL(value_gradients_any, cake::gdn::ReverseParams)
CAKE_DECLARE_KERNEL(token_gradients_any, cake::gdn::TokenGradientsParams)
CAKE_DECLARE_KERNEL(gate_parameters_any, cake::gdn::GateParametersParams)
