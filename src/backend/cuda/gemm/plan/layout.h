// The device's layout of a nested weight matrix, and its scalar reference. Nothing here needs CUDA.
//
// A plane (upper or lower bytes of W[n, k]) is cut into blocks of 64 rows x 64 k, 4096 contiguous bytes each; the
// blocks of 64 rows follow each other along k, so a thread block streams one contiguous run of memory. n is padded to
// 64 and k to 128 with zero weights, so that copies need no bounds.
//
// Inside a block:
//   * K is permuted. In a 64 x 16 wgmma A fragment a thread with c = lane % 4 holds k = {2c, 2c+1, 2c+8, 2c+9} of each
//   k16 step j
//     (PTX ISA, "Register Fragments for wgmma.mma_async.m64nNk16"); byte 16c + 4j + i of a row is logical
//     k = 16j + {2c, 2c+1, 2c+8, 2c+9}[i]. One 16-byte load then feeds four k16 steps.
//   * The 16-byte chunk c of row r is stored at chunk c ^ ((r / 2) % 4): wgmma's 64-byte swizzle. FP16 mode's 16-byte
//   loads
//     stay free of bank conflicts, and FP8 mode can name the block in a matrix descriptor as it lies.
//   * Lower bytes are stored as (lower + 64) mod 256 where the matrix allows the biased join (Join below).
//
// E4M3 activations use the same permutation of k (activation_byte), so that FP8 mode's dot products pair equal k.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace nfp::cuda {

inline constexpr int kBlockRows = 64;
inline constexpr int kBlockK = 64;
inline constexpr int kBlockBytes = kBlockRows * kBlockK;
inline constexpr uint8_t kLowerBias = 64;

// How FP16 is rebuilt from two bytes (docs/format.md).
enum class Join : uint8_t {
  kBiased,  // lower stored + 64: 7 instructions for 4 weights; needs MatrixReader::uppers_restricted()
  kFree,    // Algorithm 1 of the NestedFP paper on unbiased lowers: 8 instructions, any valid upper
};

struct PlaneShape {
  int64_t n = 0;  // logical rows (output features)
  int64_t k = 0;  // logical columns (input features)

  int64_t row_blocks() const { return (n + kBlockRows - 1) / kBlockRows; }
  // Even: FP8 mode advances by 128.
  int64_t k_groups() const {
    constexpr int64_t kPair = int64_t{2} * kBlockK;
    return (k + kPair - 1) / kPair * 2;
  }
  int64_t padded_k() const { return k_groups() * kBlockK; }
  // Bytes of the 64 rows of one block of rows: contiguous, block after block.
  size_t slab_bytes() const { return static_cast<size_t>(k_groups()) * kBlockBytes; }
  size_t bytes() const { return static_cast<size_t>(row_blocks()) * slab_bytes(); }
};

// Where k (0..63 inside its group) goes in a row of 64 bytes, and back.
constexpr int permuted_byte(int k) {
  const int j = k / 16;
  const int in_step = k % 16;
  const int c = (in_step % 8) / 2;
  const int i = (in_step / 8) * 2 + in_step % 2;
  return 16 * c + 4 * j + i;
}
constexpr int logical_k(int byte) {
  const int c = byte / 16;
  const int j = (byte % 16) / 4;
  const int i = byte % 4;
  return 16 * j + 2 * c + (i / 2) * 8 + i % 2;
}

// Byte offset of W[row, k] in a plane.
size_t plane_offset(const PlaneShape& shape, int64_t row, int64_t k);

// Position of logical k in a row of E4M3 activations (rows of padded_k() bytes, padding zero).
constexpr int64_t activation_byte(int64_t k) {
  return k / kBlockK * kBlockK + permuted_byte(static_cast<int>(k % kBlockK));
}
// A row of k codes in order of k -> padded_k() bytes in that order. What fused/arrange_codes.h does on the device.
void permute_activations(int64_t k, std::span<const uint8_t> codes, std::span<uint8_t> row);

enum class Plane : uint8_t { kUpper, kLower };

// Writes one slab: `rows` holds up to 64 logical rows of shape.k bytes each, as MatrixReader::read_nested gives them;
// missing rows become zero weights. out: slab_bytes().
void pack_slab(const PlaneShape& shape, Plane plane, Join join, std::span<const uint8_t> rows, int row_count,
               uint8_t* out);

// The row of a SwiGLU pair's fused matrix that holds gate (or up) row i: blocks of 8 gate rows and 8 up rows alternate,
// which puts a gate value and its up value in the same thread of a wgmma accumulator.
constexpr int64_t swiglu_gate_row(int64_t i) { return i / 8 * 16 + i % 8; }
constexpr int64_t swiglu_up_row(int64_t i) { return swiglu_gate_row(i) + 8; }

// FP16 bits from the two stored bytes, exactly as the kernels compute them.
constexpr uint16_t join_fp16(Join join, uint8_t upper, uint8_t lower) {
  const int t = join == Join::kBiased ? upper : upper - (lower >> 7);
  const int high = ((t >> 1) & 0x3f) | (t & 0x80);
  const int bits = (high << 8) + lower - (join == Join::kBiased ? kLowerBias : 0);
  return static_cast<uint16_t>(bits);
}

}  // namespace nfp::cuda
