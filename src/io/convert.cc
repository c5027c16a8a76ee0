#include "io/convert.h"

#include <algorithm>
#include <bit>
#include <filesystem>
#include <utility>

#include "base/atomic_file.h"
#include "io/checkpoint_writer.h"
#include "io/json_object.h"
#include "io/linear_names.h"
#include "io/nested_layout.h"
#include "io/safetensors_set.h"

namespace nfp {
namespace {

struct Planned {
  const TensorInfo* tensor = nullptr;
  std::unique_ptr<MatrixReader> reader;  // of a matrix that is nested, else empty
  std::vector<int8_t> exponents;         // of its rows

  uint64_t main_bytes() const {
    return reader == nullptr ? tensor->bytes() : tensor->bytes() / size_of(tensor->dtype) + 4 * tensor->rows();
  }
};

class Converter {
 public:
  Converter(const ModelSource& source, const ConvertOptions& options, ThreadPool& threads)
      : source_(source), options_(options), threads_(threads) {}

  Result<ConvertReport> run(const std::string& dst) {
    if (source_.kind() == SourceKind::kNested) {
      return error(ErrorCode::kUsage, "{}: is a nested checkpoint already", source_.path());
    }
    NFP_ASSIGN_OR_RETURN(const auto config, parse_json_object(source_.config_json(), source_.path() + "/config.json"));
    if (config.contains("quantization_config")) {
      return error(ErrorCode::kUnsupported,
                   "{}: config.json has a quantization_config; convert the FP16 or BF16 original instead",
                   source_.path());
    }
    // The plain size is a close upper bound of what will be written: scales take 4 bytes a row more.
    uint64_t needed = 0;
    for (const TensorInfo& tensor : source_.tensors()) needed += tensor.bytes();
    NFP_ASSIGN_OR_RETURN(OutputDirectory out, OutputDirectory::create(dst, options_.force, source_.path(), needed));
    if (Status status = write(out); !status.ok()) return out.at_place(std::move(status).error());
    return report_;
  }

 private:
  Status write(OutputDirectory& out) {
    NFP_RETURN_IF_ERROR(plan());
    NFP_RETURN_IF_ERROR(out.make_folder(kNestedFolder));
    std::vector<uint64_t> sizes;
    for (const Planned& planned : plan_) sizes.push_back(planned.main_bytes());
    const std::vector<size_t> firsts = partition_shards(sizes, options_.shard_bytes);
    ProgressCounter progress(options_.progress, "converting", source_.file_bytes());
    for (size_t s = 0; s + 1 < firsts.size(); ++s) {
      NFP_RETURN_IF_ERROR(write_shard(out, s, firsts.size() - 1,
                                      std::span(plan_).subspan(firsts[s], firsts[s + 1] - firsts[s]), progress));
    }
    NFP_RETURN_IF_ERROR(write_index(out.file(kModelIndex), main_map_, main_bytes_));
    NFP_RETURN_IF_ERROR(
        write_index(out.file(std::string(kNestedFolder) + "/" + kLowerIndex), lower_map_, lower_bytes_));
    NFP_ASSIGN_OR_RETURN(const std::string config,
                         nested_config(source_.config_json(), source_.path() + "/config.json", header_, ignore_));
    NFP_RETURN_IF_ERROR(write_file(out.file("config.json"), config));
    NFP_RETURN_IF_ERROR(copy_side_files(source_, out));
    if (source_.kind() == SourceKind::kHuggingFace) NFP_RETURN_IF_ERROR(keep_layout(out));
    report_.bytes = main_bytes_ + lower_bytes_;
    return out.commit();
  }

  Status plan() {
    uint64_t linear_bytes = 0;
    for (const TensorInfo& tensor : source_.tensors()) linear_bytes += is_linear(tensor) ? tensor.file_bytes : 0;
    ProgressCounter progress(options_.progress, "analysing", linear_bytes);
    int64_t bf16 = 0, fp16 = 0;
    for (const TensorInfo& tensor : source_.tensors()) {
      Planned& planned = plan_.emplace_back();
      planned.tensor = &tensor;
      if (!is_linear(tensor)) continue;
      MatrixAnalysis found;
      NFP_ASSIGN_OR_RETURN(std::unique_ptr<MatrixReader> reader, source_.matrix(tensor.name, threads_, &found));
      source_.release(tensor);
      progress.add(tensor.file_bytes);
      if (found.storage != Storage::kNested) {
        header_.dense[tensor.name] = found.reason;
        ignore_.push_back(tensor.name.substr(0, tensor.name.rfind('.')));
        ++report_.dense;
        continue;
      }
      if (options_.filter) {
        NFP_ASSIGN_OR_RETURN(reader, options_.filter(tensor.name, std::move(reader)));
      }
      header_.uppers_restricted = header_.uppers_restricted && reader->uppers_restricted();
      planned.reader = std::move(reader);
      planned.exponents = std::move(found.exponents);
      ++report_.nested;
      report_.rows_shifted += found.rows_shifted;
      report_.inexact += found.inexact_nested;
      if (found.inexact_nested > 0) header_.inexact[tensor.name] = found.inexact_nested;
      ++(tensor.dtype == DType::kBF16 ? bf16 : fp16);
    }
    if (report_.nested == 0) {
      return error(ErrorCode::kUnsupported, "{}: has no linear layer that can be nested; nothing to convert",
                   source_.path());
    }
    if (!source_.has("lm_head.weight")) ignore_.emplace_back("lm_head");  // tied to the embedding
    header_.source_dtype = bf16 > fp16 ? DType::kBF16 : DType::kF16;
    for (const Planned& planned : plan_) {
      const DType dtype = planned.tensor->dtype == DType::kBF16 ? DType::kBF16 : DType::kF16;
      if (planned.reader != nullptr && dtype != header_.source_dtype)
        header_.other_dtypes[planned.tensor->name] = dtype;
    }
    header_.calibration = options_.calibration;
    return ok_status();
  }

  static bool is_linear(const TensorInfo& tensor) {
    return tensor.shape.rank() == 2 && tensor.shape.elements() > 0 && linear_kind(tensor.name).has_value();
  }

  // Scales first, then what is not nested by falling width, then the uppers: so every tensor is aligned.
  Status write_shard(const OutputDirectory& out, size_t shard, size_t shards, std::span<Planned> part,
                     ProgressCounter& progress) {
    const std::string main_file = shard_file("model", shard, shards);
    const std::string lower_file = shard_file("lower", shard, shards);
    std::vector<Planned*> nested, plain;
    for (Planned& planned : part) (planned.reader != nullptr ? nested : plain).push_back(&planned);
    std::stable_sort(plain.begin(), plain.end(), [](const Planned* a, const Planned* b) {
      return size_of(a->tensor->dtype) > size_of(b->tensor->dtype);
    });
    std::vector<SafetensorsItem> main, lower;
    const auto four_or_more = [](const Planned* p) { return size_of(p->tensor->dtype) >= 4; };
    const size_t wide = static_cast<size_t>(std::count_if(plain.begin(), plain.end(), four_or_more));
    const auto add_plain = [&](size_t from, size_t to) {
      for (size_t i = from; i < to; ++i) {
        main.push_back({plain[i]->tensor->name, plain[i]->tensor->dtype, plain[i]->tensor->shape});
      }
    };
    add_plain(0, wide);
    for (const Planned* p : nested) main.push_back({scale_name(p->tensor->name), DType::kF32, {p->tensor->rows(), 1}});
    add_plain(wide, plain.size());
    for (const Planned* p : nested) {
      main.push_back({p->tensor->name, DType::kF8E4M3, p->tensor->shape});
      lower.push_back({lower_name(p->tensor->name), DType::kU8, p->tensor->shape});
    }
    for (const SafetensorsItem& item : main) {
      main_map_[item.name] = main_file;
      main_bytes_ += item.bytes();
    }
    for (const SafetensorsItem& item : lower) {
      lower_map_[item.name] = lower_file;
      lower_bytes_ += item.bytes();
    }

    NFP_ASSIGN_OR_RETURN(auto main_writer, SafetensorsWriter::create(out.file(main_file), main, {{"format", "pt"}}));
    for (size_t i = 0; i < wide; ++i) {
      NFP_RETURN_IF_ERROR(copy_tensor(source_, *plain[i]->tensor, main_writer, threads_, progress));
    }
    for (const Planned* p : nested) NFP_RETURN_IF_ERROR(write_scales(*p, main_writer));
    for (size_t i = wide; i < plain.size(); ++i) {
      NFP_RETURN_IF_ERROR(copy_tensor(source_, *plain[i]->tensor, main_writer, threads_, progress));
    }
    if (nested.empty()) return main_writer.finish();
    NFP_ASSIGN_OR_RETURN(auto lower_writer,
                         SafetensorsWriter::create(out.file(std::string(kNestedFolder) + "/" + lower_file), lower, {}));
    for (Planned* p : nested) {
      NFP_RETURN_IF_ERROR(write_planes(*p->reader, main_writer, lower_writer));
      p->reader.reset();
      progress.add(p->tensor->file_bytes);
    }
    NFP_RETURN_IF_ERROR(main_writer.finish());
    return lower_writer.finish();
  }

  static Status write_scales(const Planned& planned, SafetensorsWriter& writer) {
    std::vector<float> scales;
    for (const int8_t e : planned.exponents) {
      scales.push_back(std::bit_cast<float>(static_cast<uint32_t>(e - 8 + 127) << 23));  // 2^(e-8)
    }
    return writer.write(std::as_bytes(std::span(scales)));
  }

  Status write_planes(const MatrixReader& reader, SafetensorsWriter& uppers, SafetensorsWriter& lowers) {
    const int64_t cols = reader.cols();
    const int64_t chunk = std::clamp<int64_t>(kCopyBytes / (2 * cols), 1, reader.rows());
    std::vector<uint8_t> upper(static_cast<size_t>(chunk * cols)), lower(upper.size());
    std::vector<int8_t> exponents(static_cast<size_t>(chunk));
    for (int64_t first = 0; first < reader.rows(); first += chunk) {
      const int64_t count = std::min(chunk, reader.rows() - first);
      NFP_RETURN_IF_ERROR(for_rows(threads_, count, [&](int64_t from, int64_t n) {
        return reader.read_nested(first + from, n, upper.data() + from * cols, lower.data() + from * cols,
                                  exponents.data() + from);
      }));
      const auto bytes = static_cast<size_t>(count * cols);
      NFP_RETURN_IF_ERROR(uppers.write(std::as_bytes(std::span(upper).first(bytes))));
      NFP_RETURN_IF_ERROR(lowers.write(std::as_bytes(std::span(lower).first(bytes))));
    }
    return ok_status();
  }

  // Where every tensor comes back in the dtype it had and the files have no holes, restore can give back the same
  // files.
  Status keep_layout(const OutputDirectory& out) {
    NFP_RETURN_IF_ERROR(out.make_folder(kSourceFolder));
    const auto file = [&](const std::string& name) { return out.file(std::string(kSourceFolder) + "/" + name); };
    NFP_RETURN_IF_ERROR(write_file(file("config.json"), source_.config_json()));
    for (const TensorInfo& tensor : source_.tensors()) {
      if (is_linear(tensor) && !header_.dense.contains(tensor.name) && tensor.dtype == DType::kF32) return ok_status();
    }
    NFP_ASSIGN_OR_RETURN(const auto set, SafetensorsSet::open(source_.path(), kModelFile, kModelIndex));
    std::vector<std::pair<std::string, std::string_view>> headers;
    for (const auto& mapped : set.files()) {
      NFP_ASSIGN_OR_RETURN(const SafetensorsHeader header, parse_safetensors(mapped->bytes(), mapped->path()));
      if (!header.covers_file || header.tensors.empty()) return ok_status();
      for (const SafetensorsEntry& entry : header.tensors) {
        if (!source_.has(entry.name)) return ok_status();
      }
      headers.emplace_back(std::filesystem::path(mapped->path()).filename().string(), header.text);
    }
    for (const auto& [name, text] : headers) NFP_RETURN_IF_ERROR(write_file(file(name + kHeaderSuffix), text));
    NFP_ASSIGN_OR_RETURN(const auto index, source_.text_file(kModelIndex));
    return index ? write_file(file(kModelIndex), *index) : ok_status();
  }

  const ModelSource& source_;
  const ConvertOptions& options_;
  ThreadPool& threads_;
  std::vector<Planned> plan_;
  NestedHeader header_;
  std::vector<std::string> ignore_;
  std::map<std::string, std::string> main_map_, lower_map_;
  uint64_t main_bytes_ = 0, lower_bytes_ = 0;
  ConvertReport report_;
};

}  // namespace

Result<ConvertReport> convert(const ModelSource& source, const std::string& dst, const ConvertOptions& options,
                              ThreadPool& threads) {
  return Converter(source, options, threads).run(dst);
}

}  // namespace nfp
