// Linear layers on the device against float64. Needs a Hopper GPU; skips elsewhere.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>

#include "backend/cuda/gemm/dense.h"
#include "backend/cuda/linear/linear.h"
#include "backend/cuda/row_peaks.h"
#include "backend/cuda/testing/matrix.h"

namespace nfp::cuda {
namespace {

using testing::Kind;
using testing::TestMatrix;

class DeviceBytes {
 public:
  explicit DeviceBytes(size_t bytes) : bytes_(bytes) {
    EXPECT_EQ(cudaMalloc(&data_, std::max<size_t>(bytes, 1)), cudaSuccess);
  }
  ~DeviceBytes() { cudaFree(data_); }
  DeviceBytes(const DeviceBytes&) = delete;
  DeviceBytes& operator=(const DeviceBytes&) = delete;
  void set(const std::vector<uint8_t>& host) {
    EXPECT_EQ(cudaMemcpy(data_, host.data(), host.size(), cudaMemcpyHostToDevice), cudaSuccess);
  }
  void fill(int byte) { EXPECT_EQ(cudaMemset(data_, byte, bytes_), cudaSuccess); }
  std::vector<uint8_t> host() const {
    std::vector<uint8_t> out(bytes_);
    EXPECT_EQ(cudaMemcpy(out.data(), data_, bytes_, cudaMemcpyDeviceToHost), cudaSuccess);
    return out;
  }
  void* get() const { return data_; }

 private:
  void* data_ = nullptr;
  size_t bytes_;
};

float half_at(const std::vector<uint8_t>& bytes, size_t i) {
  uint16_t bits = 0;
  std::memcpy(&bits, &bytes[i * 2], 2);
  return fp16_to_fp32(bits);
}
float float_at(const std::vector<uint8_t>& bytes, size_t i) {
  float value = 0;
  std::memcpy(&value, &bytes[i * 4], 4);
  return value;
}

struct Part {
  Kind kind;
  int64_t rows;
};
struct Case {
  const char* name;
  std::vector<Part> parts;
  int64_t k;
  RowOrder order = RowOrder::kConcat;
  bool bias = false;
};
void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }

class LinearGpu : public ::testing::Test {
 protected:
  void SetUp() override {
    auto created = LinearRunner::create(nullptr);
    if (!created.ok()) GTEST_SKIP() << created.error().message;
    runner_.emplace(std::move(*created));
    auto uploader = DeviceUploader::create(120, size_t{1} << 20);  // small, so that it goes around
    ASSERT_TRUE(uploader.ok()) << uploader.error().message;
    uploader_ = std::move(*uploader);
    gemm_memory_ = std::make_unique<DeviceBytes>(Workspace::kBytes);
    gemm_memory_->fill(0);
    dense_memory_ = std::make_unique<DeviceBytes>(DenseGemm::kWorkspaceBytes);
  }

  LinearWorkspace workspace(const DeviceBytes* scratch = nullptr, size_t bytes = 0) const {
    LinearWorkspace out;
    out.gemm = {gemm_memory_->get(), Workspace::kBytes};
    out.dense = dense_memory_->get();
    out.scratch = scratch != nullptr ? scratch->get() : nullptr;
    out.scratch_bytes = bytes;
    return out;
  }

  ThreadPool threads_{4};
  std::optional<LinearRunner> runner_;
  std::unique_ptr<DeviceUploader> uploader_;
  std::unique_ptr<DeviceBytes> gemm_memory_, dense_memory_;
};

class LinearGpuCase : public LinearGpu, public ::testing::WithParamInterface<Case> {};

struct Layer {
  std::vector<std::unique_ptr<TestMatrix>> parts;
  LinearSpec spec;
};
Layer make_layer(const Case& c) {
  Layer layer;
  layer.spec.order = c.order;
  std::mt19937 random(9);
  std::normal_distribution<float> normal;
  for (const Part& part : c.parts) {
    layer.parts.push_back(
        std::make_unique<TestMatrix>(part.kind, part.rows, c.k, static_cast<uint32_t>(layer.parts.size() + 1)));
    layer.spec.parts.push_back(layer.parts.back().get());
    for (int64_t r = 0; c.bias && r < part.rows; ++r) layer.spec.bias.push_back(normal(random));
  }
  return layer;
}

// Activations as a test knows them, and their bytes in both forms.
struct Input {
  std::vector<float> f16, e4m3;  // [m, k] what the two forms are worth
  std::vector<uint8_t> f16_bytes, e4m3_bytes;
};
Input make_input(int64_t m, int64_t reserved, int64_t k) {
  Input in;
  std::mt19937 random(static_cast<uint32_t>(1000 + m));  // not a weight's seed: their products would all be positive
  std::normal_distribution<float> normal;
  in.f16_bytes.resize(activation_bytes(reserved, k), 0xff);
  in.e4m3_bytes.resize(in.f16_bytes.size(), 0xff);
  for (int64_t t = 0; t < m; ++t) {
    float largest = 0;
    for (int64_t i = 0; i < k; ++i) {
      const uint16_t bits = fp32_to_fp16(normal(random));
      std::memcpy(&in.f16_bytes[static_cast<size_t>(t * k + i) * 2], &bits, 2);
      in.f16.push_back(fp16_to_fp32(bits));
      largest = std::max(largest, std::abs(in.f16.back()));
    }
    const float scale = largest / 448.0f;
    uint8_t* row = &in.e4m3_bytes[static_cast<size_t>(t * e4m3_row_bytes(k))];
    std::fill_n(row, e4m3_row_bytes(k), uint8_t{0});
    for (int64_t i = 0; i < k; ++i) {
      const uint8_t code = fp32_to_e4m3(in.f16[static_cast<size_t>(t * k + i)] / scale);
      row[activation_byte(i)] = code;
      in.e4m3.push_back(e4m3_to_fp32(code) * scale);
    }
    std::memcpy(&in.e4m3_bytes[e4m3_scale_offset(reserved, k) + static_cast<size_t>(t) * 4], &scale, 4);
  }
  return in;
}

// What y should be in the order of the concatenation, and how far sums may be from it.
struct Expected {
  std::vector<double> value, slack;
};
Expected expect(const Layer& layer, const CudaWeight& weight, const Input& in, int64_t m, bool upper_only, bool fp8) {
  Expected out;
  const std::span<const WeightSegment> segments = weight.segments();
  const bool interleaved = weight.interleaved();  // then it is one segment
  const int64_t k = layer.parts.front()->cols();
  const std::vector<float>& x = fp8 ? in.e4m3 : in.f16;
  // As in gemm_gpu_test.cc: FP32 sums, and Hopper's shorter ones of E4M3 products.
  const int64_t sums = fp8 ? k / 32 + 2 : k;
  const double loss = static_cast<double>(sums) * (fp8 ? 0x1p-13 : 0x1p-23);
  for (int64_t t = 0; t < m; ++t) {
    size_t row = 0;
    for (const auto& part : layer.parts) {
      for (int64_t r = 0; r < part->rows(); ++r, ++row) {
        const bool nested = std::any_of(segments.begin(), segments.end(), [row, interleaved](const WeightSegment& s) {
          const auto at = static_cast<int64_t>(row);
          return s.nested && (interleaved || (at >= s.first_column && at < s.first_column + s.rows));
        });
        double sum = layer.spec.bias.empty() ? 0.0 : layer.spec.bias[row], total = std::abs(sum);
        for (int64_t i = 0; i < k; ++i) {
          const double product =
              double{upper_only && nested ? part->fp8(r, i) : part->exact(r, i)} * x[static_cast<size_t>(t * k + i)];
          sum += product;
          total += std::abs(product);
        }
        out.value.push_back(sum);
        // cuBLASLt adds an FP16 bias to FP16 outputs.
        out.slack.push_back(total * loss + (layer.spec.bias.empty() ? 0 : std::abs(layer.spec.bias[row]) * 0x1p-11));
      }
    }
  }
  return out;
}

TEST_P(LinearGpuCase, MatchesFloat64) {
  const Case c = GetParam();
  const Layer layer = make_layer(c);
  const auto made = CudaWeight::make(layer.spec, *uploader_, threads_);
  ASSERT_TRUE(made.ok()) << made.error().message;
  ASSERT_TRUE(uploader_->finish().ok());
  const CudaWeight& weight = **made;
  const int64_t n = weight.n(), k = weight.k();
  const bool swiglu = c.order == RowOrder::kInterleave;
  const int64_t columns = swiglu ? n / 2 : n;
  for (const int64_t m : {1, 6, 70}) {
    const int64_t reserved = m + 3;
    const Input in = make_input(m, reserved, k);
    DeviceBytes x(in.f16_bytes.size());
    const size_t scratch_bytes = LinearRunner::scratch_bytes(weight, m);
    const DeviceBytes scratch(scratch_bytes);
    for (const Precision step : {Precision::kFp16, Precision::kFp8W8A8, Precision::kFp8}) {
      const bool fp8 = !is_exact(weight.consumes(step));
      x.set(fp8 ? in.e4m3_bytes : in.f16_bytes);
      const Expected want = expect(layer, weight, in, m, !is_exact(step), fp8);
      enum class Out { kF16, kF32, kF16Residual, kF32Residual, kE4M3, kGeluF16, kGeluE4M3 };
      for (const Out kind :
           {Out::kF16, Out::kF32, Out::kF16Residual, Out::kF32Residual, Out::kE4M3, Out::kGeluF16, Out::kGeluE4M3}) {
        const bool gelu = kind == Out::kGeluF16 || kind == Out::kGeluE4M3;
        if (gelu && !swiglu) continue;
        const Out out = kind == Out::kGeluF16 ? Out::kF16 : kind == Out::kGeluE4M3 ? Out::kE4M3 : kind;
        const bool f32 = out == Out::kF32 || out == Out::kF32Residual;
        const bool residual = out == Out::kF16Residual || out == Out::kF32Residual;
        if (swiglu ? f32 || residual : out == Out::kE4M3) continue;
        const size_t y_bytes = f32 ? static_cast<size_t>(reserved * columns) * 4 : activation_bytes(reserved, columns);
        DeviceBytes y(y_bytes);
        y.fill(0xff);
        std::vector<float> before(static_cast<size_t>(m * columns), 0.0f);
        if (residual) {
          std::vector<uint8_t> bytes(y_bytes, 0xff);
          for (size_t i = 0; i < before.size(); ++i) {
            const uint16_t bits = fp32_to_fp16(static_cast<float>(static_cast<int>(i % 37) - 18) * 0.37f);
            before[i] = fp16_to_fp32(bits);
            std::memcpy(&bytes[i * (f32 ? 4 : 2)], f32 ? static_cast<const void*>(&before[i]) : &bits, f32 ? 4 : 2);
          }
          y.set(bytes);
        }
        LinearCall call;
        call.x = x.get();
        call.rows = m;
        call.reserved_rows = reserved;
        call.precision = step;
        call.epilogue = gelu ? LinearEpilogue::kGeglu : swiglu ? LinearEpilogue::kSwiglu : LinearEpilogue::kStore;
        call.consumer = out == Out::kE4M3 ? Precision::kFp8W8A8 : Precision::kFp16;
        call.y = y.get();
        call.y_is_f32 = f32;
        call.promoted_sums = residual;  // in some of the cases
        call.residual = residual ? y.get() : nullptr;
        call.workspace = workspace(&scratch, scratch_bytes);
        const Status status = runner_->run(weight, call);
        ASSERT_TRUE(status.ok()) << status.error().message;
        ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
        const std::vector<uint8_t> got = y.host();
        for (int64_t t = 0; t < m; ++t) {
          for (int64_t col = 0; col < columns; ++col) {
            const auto at = [&](int64_t row) { return static_cast<size_t>(t * n + row); };
            double value = want.value[at(col)], slack = want.slack[at(col)];
            if (swiglu) {
              const double gate = value, gate_slack = slack;
              const double up = want.value[at(columns + col)], up_slack = want.slack[at(columns + col)];
              const double cubic = std::sqrt(2 / M_PI) * (gate + 0.044715 * gate * gate * gate);
              value = (gelu ? gate * (1.0 + std::tanh(cubic)) / 2 : gate / (1.0 + std::exp(-gate))) * up;
              // (Slopes of SiLU are at most 1.1, of GELU 1.13.) FP16 in between (dense weights, GELU) rounds gate and
              // up; a rounded E4M3 sees a rounded product.
              const double rounding = (std::abs(gate) + std::abs(up)) * 0x1p-11 * (std::abs(gate) + std::abs(up) + 1);
              slack = (gelu ? 1.13 : 1.1) * gate_slack * std::abs(up) + (std::abs(gate) + gate_slack) * up_slack +
                      std::abs(value) * 0x1p-10 + rounding;
            }
            const auto place = static_cast<size_t>(t * columns + col);
            // cuBLASLt may round the product to FP16 before it adds the residual.
            if (residual && !f32) slack += (std::abs(value) + std::abs(double{before[place]})) * 0x1p-11;
            value += before[place];
            double result = 0;
            if (out == Out::kE4M3) {
              const double scale = float_at(got, e4m3_scale_offset(reserved, columns) / 4 + static_cast<size_t>(t));
              const uint8_t code = got[static_cast<size_t>(t * e4m3_row_bytes(columns) + activation_byte(col))];
              result = e4m3_to_fp32(code) * scale;
              slack += std::max(std::abs(value) * 0x1p-4, scale * 0x1p-10) * 1.01;
            } else {
              result = f32 ? float_at(got, place) : half_at(got, place);
              slack += std::abs(value) * (f32 ? 0x1p-22 : 0x1p-10);
            }
            ASSERT_LE(std::abs(result - value), slack + 2e-6)
                << "m " << m << ", step " << name_of(step) << ", output " << static_cast<int>(out) << ", token " << t
                << ", column " << col << ": " << result << " for " << value;
          }
        }
        if (out == Out::kE4M3) {
          for (int64_t t = 0; t < m; ++t) {
            for (int64_t i = columns; i < e4m3_row_bytes(columns); ++i) {
              ASSERT_EQ(got[static_cast<size_t>(t * e4m3_row_bytes(columns) + activation_byte(i))] & 0x7f, 0);
            }
          }
        } else {
          for (size_t i = static_cast<size_t>(m * columns) * (f32 ? 4 : 2); i < y_bytes; ++i) {
            ASSERT_EQ(got[i], 0xff) << "wrote past the last row";
          }
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Weights, LinearGpuCase,
    ::testing::Values(
        Case{"nested", {{Kind::kPlain, 320}}, 512}, Case{"exponents", {{Kind::kShifted, 197}}, 264},
        Case{"calibrated", {{Kind::kFree, 100}, {Kind::kRestricted, 65}}, 136, RowOrder::kConcat, true},
        Case{"qkv with bias",
             {{Kind::kPlain, 96}, {Kind::kShifted, 32}, {Kind::kPlain, 32}},
             48,
             RowOrder::kConcat,
             true},
        Case{"dense", {{Kind::kDense, 130}}, 200},
        Case{"dense, odd, with bias", {{Kind::kDense, 77}}, 56, RowOrder::kConcat, true},
        Case{"mixed",
             {{Kind::kPlain, 65}, {Kind::kDense, 31}, {Kind::kDense, 8}, {Kind::kFree, 65}},
             328,
             RowOrder::kConcat,
             true},
        Case{"one row", {{Kind::kPlain, 1}}, 8},
        Case{"k of 20", {{Kind::kShifted, 21}, {Kind::kPlain, 12}}, 20, RowOrder::kConcat, true},
        Case{"k of 33", {{Kind::kPlain, 40}}, 33},
        Case{"gate and up", {{Kind::kPlain, 176}, {Kind::kShifted, 176}}, 64, RowOrder::kInterleave},
        Case{"gate and up with bias", {{Kind::kFree, 1000}, {Kind::kPlain, 1000}}, 320, RowOrder::kInterleave, true},
        Case{"narrow gate and up", {{Kind::kPlain, 72}, {Kind::kPlain, 72}}, 40, RowOrder::kInterleave},
        Case{"gate nested, up dense", {{Kind::kShifted, 72}, {Kind::kDense, 72}}, 40, RowOrder::kInterleave, true}));

// A row's bits are the same alone and among others.
TEST_F(LinearGpu, BatchInvariantRowsDoNotChange) {
  Case c{"", {{Kind::kPlain, 512}, {Kind::kShifted, 100}}, 2048};
  const Layer layer = make_layer(c);
  const auto weight = CudaWeight::make(layer.spec, *uploader_, threads_);
  ASSERT_TRUE(weight.ok()) << weight.error().message;
  ASSERT_TRUE(uploader_->finish().ok());
  constexpr int64_t kMost = 300;
  const int64_t n = (*weight)->n();
  const Input in = make_input(kMost, kMost, c.k);
  DeviceBytes x(in.f16_bytes.size()), y(static_cast<size_t>(kMost * n) * 4);
  for (const Precision step : {Precision::kFp16, Precision::kFp8W8A8}) {
    x.set(is_exact(step) ? in.f16_bytes : in.e4m3_bytes);
    std::vector<uint8_t> first;
    for (const int64_t m : {kMost, int64_t{1}, int64_t{17}, int64_t{64}}) {
      LinearCall call;
      call.x = x.get();
      call.rows = m;
      call.reserved_rows = kMost;
      call.precision = step;
      call.y = y.get();
      call.y_is_f32 = true;
      call.reduction = Reduction::kBatchInvariant;
      call.workspace = workspace();
      const Status status = runner_->run(**weight, call);
      ASSERT_TRUE(status.ok()) << status.error().message;
      auto got = y.host();
      got.resize(static_cast<size_t>(n) * 4);
      if (first.empty()) first = got;
      ASSERT_EQ(got, first) << "m " << m << " " << name_of(step);
    }
  }
}

// Rounding by the peaks that the product found gives the bytes of rounding that finds them by itself, and leaves none.
TEST_F(LinearGpu, PeaksGiveTheSameCodes) {
  for (const auto& [rows, k] : {std::pair{72, 40}, {4104, 64}, {14336, 128}}) {
    const Layer layer =
        make_layer({"", {{Kind::kPlain, rows}, {Kind::kShifted, rows}}, k, RowOrder::kInterleave, true});
    const auto weight = CudaWeight::make(layer.spec, *uploader_, threads_);
    ASSERT_TRUE(weight.ok()) << weight.error().message;
    ASSERT_TRUE(uploader_->finish().ok());
    DeviceBytes peaks(RowPeaks::kBytes);
    peaks.fill(0);
    for (const int64_t m : {1, 6, 8, 9, 70}) {
      const Input in = make_input(m, m, k);
      DeviceBytes x(in.e4m3_bytes.size()), y(activation_bytes(m, rows));
      x.set(in.e4m3_bytes);
      const size_t scratch_bytes = LinearRunner::scratch_bytes(**weight, m);
      const DeviceBytes scratch(scratch_bytes);
      std::vector<uint8_t> want;
      for (const bool with_peaks : {false, true, true}) {
        y.fill(0xff);
        LinearCall call;
        call.x = x.get();
        call.rows = call.reserved_rows = m;
        call.precision = call.consumer = Precision::kFp8W8A8;
        call.epilogue = LinearEpilogue::kSwiglu;
        call.y = y.get();
        call.workspace = workspace(&scratch, scratch_bytes);
        if (with_peaks) call.workspace.peaks = static_cast<uint32_t*>(peaks.get());
        const Status status = runner_->run(**weight, call);
        ASSERT_TRUE(status.ok()) << status.error().message;
        const auto got = y.host();
        if (!with_peaks) want = got;
        ASSERT_EQ(got, want) << rows << " features, " << m << " rows";
        const auto left = peaks.host();
        ASSERT_TRUE(std::all_of(left.begin(), left.end(), [](uint8_t byte) { return byte == 0; })) << m;
      }
    }
  }
}

TEST_F(LinearGpu, BytesAndFormsAreWhatTheyAre) {
  const Layer nested = make_layer({"", {{Kind::kPlain, 128}}, 256, RowOrder::kConcat, false});
  const auto a = CudaWeight::make(nested.spec, *uploader_, threads_);
  ASSERT_TRUE(a.ok());
  EXPECT_EQ((*a)->bytes_held(), size_t{2} * 128 * 256);
  EXPECT_EQ((*a)->bytes_read(Precision::kFp16), size_t{2} * 128 * 256);
  EXPECT_EQ((*a)->bytes_read(Precision::kFp8W8A8), size_t{128} * 256);
  EXPECT_EQ((*a)->consumes(Precision::kFp8W8A8), Precision::kFp8W8A8);
  EXPECT_EQ((*a)->bytes_read(Precision::kFp8), size_t{128} * 256);
  EXPECT_EQ((*a)->consumes(Precision::kFp8), Precision::kFp16);
  EXPECT_EQ((*a)->segments()[0].matrix.row_scale, nullptr);
  const Layer mixed = make_layer({"", {{Kind::kShifted, 128}, {Kind::kDense, 64}}, 256, RowOrder::kConcat, false});
  const auto b = CudaWeight::make(mixed.spec, *uploader_, threads_);
  ASSERT_TRUE(b.ok());
  EXPECT_EQ((*b)->bytes_read(Precision::kFp8W8A8), size_t{128 + 2 * 64} * 256);
  EXPECT_EQ((*b)->consumes(Precision::kFp8W8A8), Precision::kFp16);
  EXPECT_NE((*b)->segments()[0].matrix.row_scale, nullptr);
}

// A ring of a few pieces, an error in the middle, and a whole weight after it.
TEST_F(LinearGpu, UploadsGoOnAfterAnError) {
  Layer bad = make_layer({"", {{Kind::kPlain, 2048}}, 1024, RowOrder::kConcat, false});
  bad.parts[0]->fail_at = 1000;
  const auto failed = CudaWeight::make(bad.spec, *uploader_, threads_);
  ASSERT_FALSE(failed.ok());
  EXPECT_NE(failed.error().message.find("row 1000"), std::string::npos);
  bad.parts[0]->fail_at = -1;
  const auto weight = CudaWeight::make(bad.spec, *uploader_, threads_);
  ASSERT_TRUE(weight.ok()) << weight.error().message;
  ASSERT_TRUE(uploader_->finish().ok());
  const NestedMatrix& matrix = (*weight)->segments()[0].matrix;
  const PlaneShape shape{2048, 1024};
  std::vector<uint8_t> upper(shape.bytes()), lower(shape.bytes());
  ASSERT_EQ(cudaMemcpy(upper.data(), matrix.upper, upper.size(), cudaMemcpyDeviceToHost), cudaSuccess);
  ASSERT_EQ(cudaMemcpy(lower.data(), matrix.lower, lower.size(), cudaMemcpyDeviceToHost), cudaSuccess);
  int64_t wrong = 0;
  for (int64_t r = 0; r < 2048; ++r) {
    for (int64_t i = 0; i < 1024; ++i) {
      const size_t at = plane_offset(shape, r, i);
      wrong += join_fp16(matrix.join, upper[at], lower[at]) != bad.parts[0]->bits(r, i);
    }
  }
  EXPECT_EQ(wrong, 0);
}

TEST_F(LinearGpu, RefusesCallsThatDoNotFit) {
  const Layer layer = make_layer({"", {{Kind::kPlain, 64}, {Kind::kPlain, 64}}, 64, RowOrder::kInterleave, false});
  const auto weight = CudaWeight::make(layer.spec, *uploader_, threads_);
  ASSERT_TRUE(weight.ok());
  ASSERT_TRUE(uploader_->finish().ok());
  const DeviceBytes memory(1 << 20);
  LinearCall good;
  good.x = memory.get();
  good.y = static_cast<uint8_t*>(memory.get()) + (1 << 19);
  good.rows = 2;
  good.reserved_rows = 4;
  good.epilogue = LinearEpilogue::kSwiglu;
  good.workspace = workspace();
  const auto message = [&](auto change) {
    LinearCall call = good;
    change(call);
    const Status status = runner_->run(**weight, call);
    return status.ok() ? std::string() : status.error().message;
  };
  EXPECT_EQ(message([](LinearCall&) {}), "");
  EXPECT_NE(message([](LinearCall& c) { c.epilogue = LinearEpilogue::kStore; }).find("epilogue"), std::string::npos);
  EXPECT_NE(message([](LinearCall& c) { c.y_is_f32 = true; }).find("y_is_f32"), std::string::npos);
  EXPECT_NE(message([](LinearCall& c) { c.rows = 5; }).find("rows"), std::string::npos);
  EXPECT_NE(message([](LinearCall& c) { c.consumer = Precision::kFp8W8A8; }).find("scratch"), std::string::npos);
  cudaDeviceSynchronize();
}

}  // namespace
}  // namespace nfp::cuda
