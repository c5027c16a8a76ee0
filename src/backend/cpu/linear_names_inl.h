// What the matrix kernels of linear_inl.h and tiles_inl.h both name.
#pragma once

#include "backend/cpu/kernel_table.h"
#include "backend/cpu/unroll.h"

namespace nfp {
namespace {

using cpu::kBlockSteps;
using cpu::kGroupBytes;
using cpu::kGroupPanels;
using cpu::kPanelRows;
using cpu::LinearTask;
using cpu::Panel;
using cpu::PanelKind;

inline constexpr int64_t kGroupColumns = int64_t{kGroupPanels} * kPanelRows;

// The panel at `panel`, or where that is past the task's end the one that is multiplied then; null if none is known.
inline const Panel* panel_at(const LinearTask& task, const Panel* panel) {
  const int64_t beyond = panel - (task.panels + task.last);
  if (beyond < 0) return panel;
  return beyond < task.next_count ? task.next + beyond : nullptr;
}

}  // namespace
}  // namespace nfp
