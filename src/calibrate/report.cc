// An evaluation as JSON, and as one self-contained page.
#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <map>

#include "calibrate/evaluate.h"

namespace nfp {
namespace {

constexpr std::array<GemmType, 4> kTypes = {GemmType::kQkv, GemmType::kOutput, GemmType::kGateUp, GemmType::kDown};
constexpr std::array<const char*, 4> kColours = {"#4477aa", "#ee6677", "#228833", "#ccaa22"};

std::string escape(std::string_view text) {
  std::string out;
  for (char c : text) {
    if (c == '<') {
      out += "&lt;";
    } else if (c == '>') {
      out += "&gt;";
    } else if (c == '&') {
      out += "&amp;";
    } else if (c == '"') {
      out += "&quot;";
    } else {
      out += c;
    }
  }
  return out;
}

double change(const FormResult& form, double base) { return (form.result.perplexity / base - 1) * 100; }

// Root mean square over the layers of one type.
std::map<std::pair<std::string, GemmType>, double> error_by_type(const Evaluation& evaluation) {
  std::map<std::pair<std::string, GemmType>, std::pair<double, int>> sums;
  for (const LayerError& layer : evaluation.layers) {
    auto& [sum, count] = sums[{layer.weights, layer.type}];
    sum += layer.error * layer.error;
    ++count;
  }
  std::map<std::pair<std::string, GemmType>, double> means;
  for (const auto& [key, value] : sums) means[key] = std::sqrt(value.first / value.second);
  return means;
}

struct Point {
  double x, y;
};
struct Curve {
  std::string name, colour;
  bool dashed = false;
  std::vector<Point> points;
};

// 1, 2 or 5 times a power of ten: between three and eight of it make `most`.
double round_step(double most) {
  const double power = std::pow(10.0, std::floor(std::log10(most / 3)));
  for (const double factor : {5.0, 2.0}) {
    if (factor * power * 3 <= most) return factor * power;
  }
  return power;
}

// A line plot from zero up, as inline SVG.
std::string plot(const std::string& x_label, const std::string& y_label, double x_most,
                 const std::vector<Curve>& curves) {
  constexpr double kWidth = 690, kHeight = 300, kLeft = 70, kRight = 240, kTop = 15, kBottom = 45;
  double y_most = 0;
  for (const Curve& curve : curves) {
    for (const Point& p : curve.points) y_most = std::max(y_most, p.y);
  }
  if (y_most <= 0 || x_most <= 0) return "";
  y_most *= 1.08;
  const auto px = [&](double x) { return kLeft + x / x_most * (kWidth - kLeft - kRight); };
  const auto py = [&](double y) { return kHeight - kBottom - y / y_most * (kHeight - kTop - kBottom); };
  std::string svg = fmt::format("<svg viewBox='0 0 {} {}' role='img' aria-label='{} over {}'>", kWidth, kHeight,
                                escape(y_label), escape(x_label));
  const double step = round_step(y_most);
  for (int i = 0; i * step <= y_most; ++i) {
    const double y = i * step;
    svg +=
        fmt::format("<line class='grid' x1='{0}' x2='{1}' y1='{2:.1f}' y2='{2:.1f}'/>", kLeft, kWidth - kRight, py(y));
    svg += fmt::format("<text x='{}' y='{:.1f}' text-anchor='end'>{:.2g}</text>", kLeft - 6, py(y) + 4, y);
  }
  const double x_step = round_step(x_most);
  for (int i = 0; i * x_step <= x_most; ++i) {
    svg += fmt::format("<text x='{:.1f}' y='{}' text-anchor='middle'>{:.3g}</text>", px(i * x_step),
                       kHeight - kBottom + 16, i * x_step);
  }
  svg += fmt::format("<text x='{:.1f}' y='{}' text-anchor='middle'>{}</text>", px(x_most / 2), kHeight - 8,
                     escape(x_label));
  svg += fmt::format("<text transform='translate(14 {:.1f}) rotate(-90)' text-anchor='middle'>{}</text>",
                     py(y_most / 2), escape(y_label));
  double legend = kTop + 10;
  for (const Curve& curve : curves) {
    std::string path;
    for (const Point& p : curve.points) path += fmt::format("{:.1f},{:.1f} ", px(p.x), py(p.y));
    const char* dash = curve.dashed ? " stroke-dasharray='5 4'" : "";
    if (curve.points.size() > 1) {
      svg +=
          fmt::format("<polyline fill='none' stroke='{}' stroke-width='2'{} points='{}'/>", curve.colour, dash, path);
    }
    for (const Point& p : curve.points) {
      svg += fmt::format("<circle cx='{:.1f}' cy='{:.1f}' r='2.5' fill='{}'/>", px(p.x), py(p.y), curve.colour);
    }
    svg += fmt::format("<line x1='{0}' x2='{1}' y1='{2}' y2='{2}' stroke='{3}' stroke-width='2'{4}/>",
                       kWidth - kRight + 10, kWidth - kRight + 34, legend - 4, curve.colour, dash);
    svg += fmt::format("<text x='{}' y='{}'>{}</text>", kWidth - kRight + 40, legend, escape(curve.name));
    legend += 18;
  }
  return svg + "</svg>";
}

std::string share_plot(const Evaluation& evaluation) {
  Curve calibrated{"calibrated", kColours[0], false, {{0, 0}}};
  Curve activations{"calibrated, E4M3 activations", kColours[3], false, {}};
  Curve nearest{"nearest", kColours[1], false, {}}, channel{"per channel", kColours[2], false, {}};
  for (const FormResult& form : evaluation.forms) {
    if (is_exact(form.precision) || !form.result.kld) continue;
    const Point point = {form.share * 100, form.result.kld->mean};
    const bool rounded = form.precision == Precision::kFp8W8A8;
    if (rounded && form.weights == "calibrated") activations.points.push_back(point);
    if (rounded || form.activations != "16/32 bit") continue;
    if (form.weights == "calibrated") calibrated.points.push_back(point);
    if (form.weights == "nearest") nearest.points.push_back(point);
    if (form.weights == "per channel") channel.points.push_back(point);
  }
  for (Curve* curve : {&calibrated, &activations}) {
    std::sort(curve->points.begin(), curve->points.end(), [](Point a, Point b) { return a.x < b.x; });
  }
  std::vector<Curve> curves = {nearest, channel};
  if (!activations.points.empty()) curves.insert(curves.begin(), activations);
  if (calibrated.points.size() > 1) curves.insert(curves.begin(), calibrated);
  return plot("weights in FP8, %", "KL divergence from FP16, nats", 100, curves);
}

std::string layer_plot(const Evaluation& evaluation) {
  std::vector<Curve> curves;
  double last = 1;
  for (const char* weights : {"nearest", "calibrated"}) {
    for (size_t t = 0; t < kTypes.size(); ++t) {
      Curve curve{
          fmt::format("{}, {}", name_of(kTypes[t]), weights), kColours[t], std::string_view(weights) == "nearest", {}};
      for (const LayerError& layer : evaluation.layers) {
        if (layer.weights != weights || layer.type != kTypes[t]) continue;
        curve.points.push_back({static_cast<double>(layer.layer), layer.error});
        last = std::max(last, static_cast<double>(layer.layer));
      }
      if (!curve.points.empty()) curves.push_back(std::move(curve));
    }
  }
  return plot("layer", "relative error of the outputs", last, curves);
}

constexpr const char* kHead = R"(<!doctype html><html lang="en"><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1"><title>nestedfp: quality of FP8</title><style>
:root{color-scheme:light dark}body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}
table{border-collapse:collapse;margin:1rem 0}th,td{padding:.25rem .8rem;text-align:right;border-bottom:1px solid #8884}
th:first-child,td:first-child,th:nth-child(2),td:nth-child(2){text-align:left}svg{max-width:100%;font-size:12px}
svg text{fill:currentColor}.grid{stroke:#8884}</style>
)";

}  // namespace

std::string evaluation_to_json(const Evaluation& evaluation) {
  nlohmann::ordered_json json = {{"model", evaluation.model},
                                 {"file", evaluation.file},
                                 {"ctx", evaluation.ctx},
                                 {"calibration", evaluation.calibration}};
  const double base = evaluation.forms.front().result.perplexity;
  for (const FormResult& form : evaluation.forms) {
    nlohmann::ordered_json row = {{"weights", form.weights},
                                  {"precision", name_of(form.precision)},
                                  {"activations", form.activations},
                                  {"fp8_share", form.share},
                                  {"chunks", form.result.chunks},
                                  {"scored_tokens", form.result.scored},
                                  {"perplexity", form.result.perplexity},
                                  {"error", form.result.error},
                                  {"change_percent", change(form, base)},
                                  {"seconds", form.result.seconds}};
    if (form.result.kld) {
      row["kld_mean"] = form.result.kld->mean;
      row["kld_error"] = form.result.kld->mean_error;
      row["kld_p99"] = form.result.kld->p99;
      row["same_top"] = form.result.kld->same_top;
    }
    json["forms"].push_back(std::move(row));
  }
  json["error_by_type"] = nlohmann::ordered_json::array();
  for (const auto& [key, value] : error_by_type(evaluation)) {
    json["error_by_type"].push_back({{"weights", key.first}, {"type", name_of(key.second)}, {"error", value}});
  }
  json["layers"] = nlohmann::ordered_json::array();
  for (const LayerError& layer : evaluation.layers) {
    json["layers"].push_back(
        {{"weights", layer.weights}, {"type", name_of(layer.type)}, {"layer", layer.layer}, {"error", layer.error}});
  }
  json["order"] = nlohmann::ordered_json::parse(sensitivity_to_json(evaluation.sensitivities));
  return json.dump(2, ' ', false, nlohmann::json::error_handler_t::replace);
}

std::string evaluation_to_html(const Evaluation& evaluation) {
  const FormResult& base = evaluation.forms.front();
  std::string html = kHead;
  html += fmt::format(
      "<h1>Quality of FP8: {}</h1><p>Text {}: {} chunks of {} tokens, the second half of each scored. FP16 perplexity "
      "{:.4f} &plusmn; {:.4f}.",
      escape(evaluation.model), escape(evaluation.file), base.result.chunks, evaluation.ctx, base.result.perplexity,
      base.result.error);
  if (!evaluation.calibration.empty()) html += " Calibrated on " + escape(evaluation.calibration) + ".";
  html +=
      "</p><table><tr><th>weights<th>activations<th>in FP8<th>perplexity<th>change<th>KL mean<th>KL 99 %<th>same "
      "top</tr>";
  for (const FormResult& form : evaluation.forms) {
    html += fmt::format("<tr><td>{}<td>{}<td>{:.0f} %<td>{:.4f}<td>{:+.2f} %", escape(form.weights),
                        escape(form.activations), form.share * 100, form.result.perplexity,
                        change(form, base.result.perplexity));
    if (form.result.kld) {
      html += fmt::format("<td>{:.5f}<td>{:.4f}<td>{:.1f} %</tr>", form.result.kld->mean, form.result.kld->p99,
                          form.result.kld->same_top * 100);
    } else {
      html += "<td><td><td></tr>";
    }
  }
  html += "</table><h2>Divergence by share of weights in FP8</h2>" + share_plot(evaluation);
  html += "<h2>Error of each layer's outputs, fed exact inputs</h2>" + layer_plot(evaluation);
  html += "<table><tr><th>weights<th>layers<th>root mean square error</tr>";
  for (const auto& [key, value] : error_by_type(evaluation)) {
    html += fmt::format("<tr><td>{}<td>{}<td>{:.4f}</tr>", escape(key.first), name_of(key.second), value);
  }
  html += "</table>";
  if (!evaluation.sensitivities.empty()) {
    html +=
        "<h2>Order of sensitivity</h2><p>KL divergence when that layer alone runs in FP8, least harm a weight "
        "first.</p>"
        "<table><tr><th>layer<th><th>weights<th>KL</tr>";
    for (const Sensitivity& entry : evaluation.sensitivities) {
      html += fmt::format("<tr><td>{}<td>{}<td>{}<td>{:.2e}</tr>", escape(entry.matrices.front()),
                          entry.matrices.size() > 1 ? "and those beside it" : "", entry.weights, entry.kld);
    }
    html += "</table>";
  }
  return html + "</html>\n";
}

}  // namespace nfp
