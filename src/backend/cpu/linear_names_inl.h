// What the matrix kernels of linear_inl.h and tiles_inl.h both name.
#pragma once

#include "backend/cpu/kernel_table.h"

// Sanitizers make thousands of unrolled lines slow to compile, and have no use for them.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define NFP_UNROLL
#else
#define NFP_UNROLL _Pragma("GCC unroll 24")
#endif

namespace nfp {
namespace {

using cpu::kBlockSteps;
using cpu::kGroupBytes;
using cpu::kGroupPanels;
using cpu::kPanelRows;
using cpu::LinearTask;
using cpu::Panel;
using cpu::PanelKind;

constexpr int64_t kGroupColumns = kGroupPanels * kPanelRows;

}  // namespace
}  // namespace nfp
