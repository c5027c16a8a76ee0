#include "backend/cuda/step/step.h"

#include <algorithm>

#include "backend/cuda/launch.h"
#include "backend/cuda/step/step_kernels.h"

namespace nfp::cuda {
namespace {

bool aligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

Status bad(std::string_view what, std::string_view field, std::string_view rule) {
  return error(ErrorCode::kUsage, "{}: {} {}", what, field, rule);
}

}  // namespace

Status run_embed(const EmbedCall& c, CUstream_st* stream) {
  const EmbeddingTable& t = c.table;
  if (c.rows <= 0 || c.rows > INT32_MAX) return bad("embed", "rows", "must be 1 to 2^31 - 1");
  if (t.vocab <= 0 || t.hidden <= 0 || t.hidden % 8 != 0)
    return bad("embed", "table", "needs a vocabulary and a hidden size that is a multiple of 8");
  const bool nested = t.upper != nullptr;
  if (nested ? t.lower == nullptr || !aligned(t.upper) || !aligned(t.lower) : t.dense == nullptr || !aligned(t.dense))
    return bad("embed", "table", "needs both planes or dense, 16-byte aligned");
  if (c.tokens.ids == nullptr) return bad("embed", "tokens.ids", "is null");
  if (c.tokens.source != nullptr && c.tokens.previous == nullptr) return bad("embed", "tokens.previous", "is null");
  if (c.out == nullptr || !aligned(c.out)) return bad("embed", "out", "must be 16-byte aligned");
  EmbedParams p{t, c.tokens, static_cast<int64_t>(PlaneShape{t.vocab, t.hidden}.slab_bytes()), c.scale, c.out};
  const int64_t units = nested ? (t.hidden + 63) / 64 * 4 : t.hidden / 8;
  LaunchShape shape;
  shape.grid = static_cast<int>(c.rows);
  shape.block = static_cast<int>(std::min<int64_t>(kEmbedThreads, (units + 31) / 32 * 32));
  shape.dependent = c.dependent_launch;
  void* arguments[] = {&p};
  return launch("embed", embed_function(nested, c.out_is_f32), shape, arguments, stream);
}

Status run_rope(const RopeCall& c, CUstream_st* stream) {
  RopeParams p{c, 0};
  if (c.tokens <= 0 || c.heads <= 0 || c.kv_heads <= 0)
    return bad("rope", "tokens, heads, kv_heads", "must be positive");
  if (c.head_dim <= 0 || c.head_dim % 8 != 0 || c.head_dim > 256)
    return bad("rope", "head_dim", "must be a multiple of 8 up to 256");
  if (c.rotary_dim < 0 || c.rotary_dim % 8 != 0 || c.rotary_dim > c.head_dim)
    return bad("rope", "rotary_dim", "must be a multiple of 8 up to head_dim");
  if (c.block_size <= 0) return bad("rope", "block_size", "must be positive");
  if (c.qkv == nullptr || c.keys == nullptr || c.values == nullptr || !aligned(c.qkv) || !aligned(c.keys) ||
      !aligned(c.values) || c.cos_sin == nullptr || !aligned(c.cos_sin) || !aligned(c.q_norm) || !aligned(c.k_norm))
    return bad("rope", "qkv, keys, values, cos_sin and the norms", "must be 16-byte aligned");
  if (c.query_start != nullptr) {
    if (c.context == nullptr || c.block_table == nullptr || c.table_width <= 0 || c.sequences <= 0 ||
        c.first_sequence < 0)
      return bad("rope", "context, block_table, table_width or sequences", "is missing");
  } else if (c.positions == nullptr || c.slots == nullptr) {
    return bad("rope", "positions or slots", "is null");
  }
  if (c.bf16 && c.e4m3_cache) return bad("rope", "bf16", "does not go with e4m3_cache");
  if (c.block_stride % 8 != 0 || c.block_stride < 0) return bad("rope", "block_stride", "must be a multiple of 8");
  if (p.call.rotary_dim == 0) p.call.rotary_dim = c.head_dim;
  if (c.block_stride == 0) p.call.block_stride = int64_t{c.kv_heads} * c.block_size * c.head_dim;
  p.items = c.tokens * (c.heads + 2 * c.kv_heads);
  if (p.items > int64_t{INT32_MAX}) return bad("rope", "tokens", "are too many: 2^31 - 1 heads at most");
  // A lane has one vector of each half, or two of what does not rotate.
  const int half = p.call.rotary_dim / 2;
  const int vector = half % 8 == 0 ? 8 : 4;
  const int pairs = half / vector;
  const int rest = c.head_dim / vector - 2 * pairs;
  const int units = pairs + (rest + 1) / 2;
  int lanes = 1;
  while (lanes < units) lanes *= 2;
  LaunchShape shape;
  const int64_t per_block = kRopeThreads / lanes;
  shape.grid = static_cast<int>((p.items + per_block - 1) / per_block);
  shape.block = kRopeThreads;
  shape.dependent = c.dependent_launch;
  void* arguments[] = {&p};
  return launch("rope",
                rope_function(c.bf16         ? RopeStore::kBf16
                              : c.e4m3_cache ? RopeStore::kE4m3
                                             : RopeStore::kF16,
                              vector, lanes),
                shape, arguments, stream);
}

Status run_gather(const GatherCall& c, CUstream_st* stream) {
  if (c.count <= 0 || c.count > INT32_MAX) return bad("gather", "count", "must be 1 to 2^31 - 1");
  if (c.hidden <= 0 || c.hidden % 8 != 0) return bad("gather", "hidden", "must be a positive multiple of 8");
  if (c.x == nullptr || c.out == nullptr || !aligned(c.x) || !aligned(c.out) || c.rows == nullptr)
    return bad("gather", "x, rows and out", "must be there, 16-byte aligned");
  CopyParams p{c.x, c.rows, c.out, c.hidden / (c.is_f32 ? 4 : 8)};
  LaunchShape shape;
  shape.grid = static_cast<int>(c.count);
  shape.block = static_cast<int>(std::min<int64_t>(kCopyThreads, (p.vectors + 31) / 32 * 32));
  shape.dependent = c.dependent_launch;
  void* arguments[] = {&p};
  return launch("gather", gather_function(), shape, arguments, stream);
}

Status run_soft_cap(const SoftCapCall& c, CUstream_st* stream) {
  if (c.count <= 0) return bad("soft_cap", "count", "must be positive");
  if (!(c.cap > 0)) return bad("soft_cap", "cap", "must be positive");
  if (c.x == nullptr) return bad("soft_cap", "x", "is null");
  SoftCapParams p{c.x, c.count, c.cap};
  LaunchShape shape;
  shape.grid = static_cast<int>(std::min<int64_t>((c.count + kCopyThreads - 1) / kCopyThreads, int64_t{132} * 16));
  shape.block = kCopyThreads;
  shape.dependent = c.dependent_launch;
  void* arguments[] = {&p};
  return launch("soft_cap", soft_cap_function(), shape, arguments, stream);
}

Status run_add(const AddCall& c, CUstream_st* stream) {
  if (c.count <= 0 || c.count % 8 != 0) return bad("add", "count", "must be a positive multiple of 8");
  if (c.x == nullptr || c.residual == nullptr || !aligned(c.x) || !aligned(c.residual))
    return bad("add", "x and residual", "must be there, 16-byte aligned");
  CopyParams p{c.x, nullptr, c.residual, c.count / 8};
  LaunchShape shape;
  shape.grid = static_cast<int>(std::min<int64_t>((p.vectors + kCopyThreads - 1) / kCopyThreads, int64_t{132} * 8));
  shape.block = kCopyThreads;
  shape.dependent = c.dependent_launch;
  void* arguments[] = {&p};
  return launch("add", add_function(), shape, arguments, stream);
}

Status run_copy(const CopyCall& c, CUstream_st* stream) {
  if (c.pieces < 1 || c.pieces > CopyCall::kMostPieces) return bad("copy", "pieces", "must be 1 to 4");
  int64_t most = 0;  // words
  for (int i = 0; i < c.pieces; ++i) {
    const CopyCall::Piece& piece = c.piece[i];
    if (piece.bytes <= 0 || piece.rows <= 0 || piece.bytes > CopyCall::kMostBytes / piece.rows)
      return bad("copy", "bytes and rows", "must be positive, up to 512 KB");
    const auto places = reinterpret_cast<uintptr_t>(piece.src) | reinterpret_cast<uintptr_t>(piece.dst);
    if (piece.src == nullptr || piece.dst == nullptr || places % 4 != 0 ||
        (piece.bytes | piece.src_pitch | piece.dst_pitch) % 4 != 0)
      return bad("copy", "src, dst, bytes and pitches", "must be there, whole words of 4 bytes");
    most = std::max(most, piece.bytes / 4 * piece.rows);
  }
  CopyCall p = c;
  LaunchShape shape;
  shape.grid = static_cast<int>((most + kCopyThreads - 1) / kCopyThreads);
  shape.grid_y = c.pieces;
  shape.block = kCopyThreads;
  void* arguments[] = {&p};
  return launch("copy", copy_function(), shape, arguments, stream);
}

Status run_take_mark(const TakeMarkCall& c, CUstream_st* stream) {
  if (c.device == nullptr || c.host == nullptr) return bad("take_mark", "device or host", "is null");
  TakeMarkCall p = c;
  LaunchShape shape;
  shape.dependent = true;
  void* arguments[] = {&p};
  return launch("take_mark", take_mark_function(), shape, arguments, stream);
}

}  // namespace nfp::cuda
