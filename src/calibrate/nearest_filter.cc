#include "calibrate/nearest_filter.h"

#include <utility>

#include "calibrate/upper_choice.h"

namespace nfp {
MatrixFilter nearest_filter() {
  return [](const std::string& tensor, std::unique_ptr<MatrixReader> reader) -> Result<std::unique_ptr<MatrixReader>> {
    auto nearest = std::make_shared<UpperChoice>();
    nearest->name = tensor;
    nearest->rows = reader->rows();
    nearest->cols = reader->cols();
    nearest->rule = UpperRule::kRestricted;
    nearest->bits.assign(static_cast<size_t>(nearest->rows * choice_row_bytes(nearest->cols)), 0);
    return make_chosen_reader(std::move(reader), std::move(nearest));
  };
}

}  // namespace nfp
