// The report as one HTML page: its plots are SVG inside it, so that it can be mailed or kept.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <map>

#include "replay/report.h"

namespace nfp {
namespace {

constexpr std::array<const char*, 8> kColors = {"#2563eb", "#dc2626", "#059669", "#d97706",
                                                "#7c3aed", "#0891b2", "#be185d", "#4b5563"};
constexpr double kWidth = 560, kHeight = 260, kLeft = 56, kBottom = 34, kTop = 14, kRight = 12;

std::string escaped(std::string_view text) {
  std::string safe;
  for (const char c : text) {
    if (c == '&')
      safe += "&amp;";
    else if (c == '<')
      safe += "&lt;";
    else if (c == '>')
      safe += "&gt;";
    else if (c == '"')
      safe += "&quot;";
    else
      safe += c;
  }
  return safe;
}

struct Line {
  std::string name;
  std::vector<std::pair<double, double>> points;
};

// Lines over a linear x axis and a y axis from 0 to `most`; in `log_x` the x axis is logarithmic.
std::string plot(const std::string& title, const std::string& x_name, const std::string& y_name,
                 const std::vector<Line>& lines, double most, bool log_x) {
  double low = 1e300, high = -1e300;
  for (const Line& line : lines) {
    for (const auto& [x, y] : line.points) low = std::min(low, x), high = std::max(high, x);
  }
  if (low > high) return "";
  if (log_x) low = std::max(low, high / 1e4);
  const auto place = [&](double x) {
    const double from = log_x ? std::log10(low) : low, to = log_x ? std::log10(high) : high;
    const double at = log_x ? std::log10(std::max(x, low)) : x;
    return kLeft + (kWidth - kLeft - kRight) * (to > from ? (at - from) / (to - from) : 0.5);
  };
  const auto height = [&](double y) { return kHeight - kBottom - (kHeight - kBottom - kTop) * y / most; };
  std::string svg = fmt::format("<figure><figcaption>{}</figcaption><svg viewBox=\"0 0 {} {}\" role=\"img\">", title,
                                kWidth, kHeight);
  for (int i = 0; i <= 4; ++i) {
    const double y = most * i / 4;
    svg += fmt::format("<line x1=\"{}\" x2=\"{}\" y1=\"{:.1f}\" y2=\"{:.1f}\" class=\"grid\"/>", kLeft, kWidth - kRight,
                       height(y), height(y));
    svg += fmt::format("<text x=\"{}\" y=\"{:.1f}\" text-anchor=\"end\">{:.3g}</text>", kLeft - 6, height(y) + 4, y);
    const double share = i / 4.0;
    const double x = log_x ? std::pow(10, std::log10(low) + share * (std::log10(high) - std::log10(low)))
                           : low + share * (high - low);
    svg += fmt::format("<text x=\"{:.1f}\" y=\"{}\" text-anchor=\"middle\">{:.3g}</text>", place(x), kHeight - 18, x);
  }
  svg += fmt::format("<text x=\"{}\" y=\"{}\" text-anchor=\"middle\">{}</text>", (kLeft + kWidth) / 2, kHeight - 4,
                     x_name);
  svg += fmt::format("<text x=\"12\" y=\"{}\" text-anchor=\"middle\" transform=\"rotate(-90 12 {})\">{}</text>",
                     kHeight / 2, kHeight / 2, y_name);
  for (size_t i = 0; i < lines.size(); ++i) {
    svg += fmt::format("<polyline fill=\"none\" stroke-width=\"1.8\" stroke=\"{}\" points=\"",
                       kColors[i % kColors.size()]);
    for (const auto& [x, y] : lines[i].points)
      svg += fmt::format("{:.1f},{:.1f} ", place(x), height(std::min(y, most)));
    svg += "\"/>";
    for (const auto& [x, y] : lines[i].points) {
      if (lines[i].points.size() > 12) break;
      svg += fmt::format("<circle r=\"3\" cx=\"{:.1f}\" cy=\"{:.1f}\" fill=\"{}\"/>", place(x),
                         height(std::min(y, most)), kColors[i % kColors.size()]);
    }
  }
  svg += "</svg><p class=\"legend\">";
  for (size_t i = 0; i < lines.size(); ++i) {
    svg +=
        fmt::format("<span style=\"color:{}\">&#9632; {}</span> ", kColors[i % kColors.size()], escaped(lines[i].name));
  }
  return svg + "</p></figure>";
}

// Share of requests whose value is at most x, in a hundred points.
Line distribution(const std::string& name, std::vector<double> values) {
  Line line{name, {}};
  std::sort(values.begin(), values.end());
  for (int i = 1; i <= 100 && !values.empty(); ++i) {
    const auto index = static_cast<size_t>(std::ceil(i / 100.0 * static_cast<double>(values.size()))) - 1;
    line.points.emplace_back(std::max(values[index], 1e-4), i);
  }
  return line;
}

std::string cell(const std::optional<double>& value, double scale, int digits) {
  return value && std::isfinite(*value) ? fmt::format("{:.{}f}", scale * *value, digits) : std::string("-");
}

std::string figures(const ReplayReport& report) {
  std::string html =
      "<table><tr><th>policy</th><th>requests/s</th><th>tight, %</th><th>loose, %</th><th>FP16 tokens, %</th>"
      "<th>TTFT p50, s</th><th>p90</th><th>p99</th><th>worst</th><th>TPOT p50, ms</th><th>p90</th><th>longest gap, "
      "ms</th>"
      "<th>goodput</th><th>switches</th></tr>";
  for (const ReplaySummary& row : report.rows) {
    html += fmt::format(
        "<tr><td>{}</td><td>{:.2f}</td><td>{}</td><td>{}</td><td>{}</td><td>{:.3f}</td><td>{:.3f}</td><td>{:.3f}</td>"
        "<td>{:.2f}</td><td>{:.1f}</td><td>{:.1f}</td><td>{:.0f}</td><td>{}</td><td>{}</td></tr>",
        escaped(row.policy), row.rate, cell(row.tight, 100, 1), cell(row.loose, 100, 1), cell(row.fp16_share, 100, 1),
        row.ttft.p50, row.ttft.p90, row.ttft.p99, row.ttft.worst, 1e3 * row.tpot.p50, 1e3 * row.tpot.p90,
        1e3 * row.gap.worst, cell(row.goodput, 1, 2), row.switches);
  }
  return html + "</table>";
}

// A table of what became of requests by what they say of themselves; empty where they say the same.
template <typename Groups>
std::string group_table(const ReplayReport& report, const Groups& groups_of, const char* by) {
  std::string lines;
  for (const ReplaySummary& row : report.rows) {
    for (const auto& [key, group] : groups_of(row)) {
      lines += fmt::format(
          "<tr><td>{}</td><td>{:.2f}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{:.3f}</td>"
          "<td>{:.3f}</td><td>{:.3f}</td><td>{:.2f}</td><td>{:.1f}</td></tr>",
          escaped(row.policy), row.rate, key, group.requests, group.failed, cell(group.tight, 100, 1),
          cell(group.loose, 100, 1), group.ttft.p50, group.ttft.p90, group.ttft.p99, group.ttft.worst,
          1e3 * group.tpot.p50);
    }
  }
  if (lines.empty()) return lines;
  return fmt::format(
      "<h2>By {0}</h2><table><tr><th>policy</th><th>requests/s</th><th>{0}</th><th>requests</th><th>failed</th>"
      "<th>tight, %</th><th>loose, %</th><th>TTFT p50, s</th><th>p90</th><th>p99</th><th>worst</th>"
      "<th>TPOT p50, ms</th></tr>{1}</table>",
      by, lines);
}

}  // namespace

std::string to_html(const ReplayReport& report) {
  std::string html =
      "<!doctype html><html lang=\"en\"><meta charset=\"utf-8\"><title>nestedfp replay</title><style>"
      "body{font:15px/1.5 system-ui,sans-serif;max-width:1180px;margin:2em auto;padding:0 1em;color:#1f2937}"
      "table{border-collapse:collapse;width:100%}td,th{padding:.25em .6em;text-align:right;border-bottom:1px solid "
      "#e5e7eb}"
      "td:first-child,th:first-child{text-align:left}figure{display:inline-block;width:48%;min-width:420px;margin:1em "
      "0}"
      "figcaption{font-weight:600}svg text{font-size:11px;fill:#4b5563}.grid{stroke:#e5e7eb}.legend{font-size:13px}"
      "code{background:#f3f4f6;padding:.1em .3em;word-break:break-all}</style><h1>nestedfp replay</h1>";
  html += fmt::format("<p>{} on {}</p><p><code>{}</code></p>", escaped(report.trace), escaped(report.machine),
                      escaped(report.command));
  if (!report.rows.empty()) html += figures(report);  // the highest rates alone have none
  std::map<std::string, std::array<Line, 2>> by_rate;
  std::vector<std::string> order;
  std::vector<Line> ttft, tpot;
  for (size_t i = 0; i < report.rows.size(); ++i) {
    const ReplaySummary& row = report.rows[i];
    auto& lines = by_rate[row.policy];
    if (lines[0].points.empty()) order.push_back(row.policy);
    lines[0].name = lines[1].name = row.policy;
    lines[0].points.emplace_back(row.rate, 100 * row.tight.value_or(0));
    lines[1].points.emplace_back(row.rate, std::isfinite(row.fp16_share) ? 100 * row.fp16_share : 0);
    if (i >= report.outcomes.size()) continue;
    std::vector<double> first, mean;
    for (const ReplayedRequest& request : report.outcomes[i].requests) {
      if (!request.done) continue;
      first.push_back(request.ttft_s);
      if (request.output > 1) mean.push_back(1e3 * request.tpot_s);
    }
    const std::string name = fmt::format("{} at {:.2f}/s", row.policy, row.rate);
    ttft.push_back(distribution(name, std::move(first)));
    tpot.push_back(distribution(name, std::move(mean)));
  }
  html +=
      "<p>Tight and loose: time to first token and mean time between tokens are each at most 5 and 10 times those of "
      "the request alone in FP16.</p>";
  html += group_table(
      report, [](const ReplaySummary& row) -> auto& { return row.by_priority; }, "priority");
  html += group_table(
      report, [](const ReplaySummary& row) -> auto& { return row.by_precision; }, "precision");
  if (!report.limits.empty()) {
    html += fmt::format("<h2>Highest rate with {:.1f} % tight</h2><table><tr><th>policy</th><th>requests/s</th></tr>",
                        100 * report.attainment.value_or(0));
    for (const auto& limit : report.limits) {
      html += fmt::format("<tr><td>{}</td><td>{}</td></tr>", escaped(limit.policy),
                          limit.rate > 0 ? fmt::format("{:.2f}", limit.rate) : "holds at no rate");
    }
    html += "</table>";
  }
  std::vector<Line> attained, shares;
  for (const std::string& policy : order) {
    attained.push_back(by_rate[policy][0]);
    shares.push_back(by_rate[policy][1]);
    std::sort(attained.back().points.begin(), attained.back().points.end());
    std::sort(shares.back().points.begin(), shares.back().points.end());
  }
  if (std::any_of(report.rows.begin(), report.rows.end(), [](const auto& row) { return row.tight.has_value(); })) {
    html += plot("Requests that attain tight", "requests/s", "%", attained, 100, false);
    html += plot("Tokens computed in FP16", "requests/s", "%", shares, 100, false);
  }
  html += plot("Time to first token", "seconds", "% of requests", ttft, 100, true);
  html += plot("Mean time between tokens", "milliseconds", "% of requests", tpot, 100, true);
  return html + "</html>\n";
}

}  // namespace nfp
