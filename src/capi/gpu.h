// The device behind the C interface.
#pragma once

#include <memory>
#include <string>

#include "backend/cuda/context.h"
#include "backend/cuda/gemm/gemm.h"
#include "backend/cuda/gemm/plan/tuning_table.h"
#include "nestedfp.h"

// The device's tables, shared by all weights on it.
struct nfp_gpu {
  nfp::cuda::Gemm gemm;
  nfp::cuda::TuningTable table;
  std::string name;
  nfp::cuda::Context context;  // what streams and pointers of its calls belong to
};
