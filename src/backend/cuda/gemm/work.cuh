// The order in which thread blocks take tiles and shares of tiles.
#pragma once

#include <cstdint>

#include "backend/cuda/gemm/kernel_params.h"

namespace nfp::cuda {

struct Work {
  int tile;
  int k_begin;  // iterations
  int k_end;
  int share;  // that this is a part of, for a cut tile
};

// What one cluster does: its shares of the cut tiles (ShareLength), then whole tiles.
class WorkList {
 public:
  __device__ WorkList(const KernelParams& p, int cluster, int clusters)
      : p_(p), clusters_(clusters), share_(cluster), tile_(p.split_tiles + cluster) {}

  __device__ bool next(Work& work) {
    while (true) {
      if (position_ < end_) {
        work.tile = position_ / p_.k_iterations;
        work.k_begin = position_ - work.tile * p_.k_iterations;
        work.k_end = min(p_.k_iterations, work.k_begin + end_ - position_);
        work.share = share_ - clusters_;
        position_ += work.k_end - work.k_begin;
        return true;
      }
      if (share_ >= p_.shares) break;
      position_ = p_.length.begin(share_);
      end_ = p_.length.begin(share_ + 1);
      share_ += clusters_;
    }
    if (tile_ >= p_.tiles) return false;
    work = {tile_, 0, p_.k_iterations, 0};
    tile_ += clusters_;
    return true;
  }

 private:
  const KernelParams& p_;
  int clusters_;
  int share_;
  int tile_;
  int position_ = 0;
  int end_ = 0;
};

struct TileOrigin {
  int token;
  int cluster_row;  // in units of clusters
};
// Neighbours in time share group_m token tiles, so that a wave of tiles is near square in bytes and stays in the L2.
__device__ __forceinline__ TileOrigin tile_origin(const KernelParams& p, int tile) {
  const int group = tile / (p.group_m * p.n_tiles);
  const int inside = tile - group * p.group_m * p.n_tiles;
  const int height = min(p.group_m, p.m_tiles - group * p.group_m);
  return {group * p.group_m + inside % height, inside / height};
}

}  // namespace nfp::cuda
