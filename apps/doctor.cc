// nestedfp doctor: what this machine has, and what is missed costs.
#include "doctor/doctor.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <memory>

#include "json_output.h"
#include "server/grammar/grammar.h"
#include "verbs.h"

namespace nfp {

void add_doctor(CLI::App& app, Status& status) {
  CLI::App* verb =
      app.add_subcommand("doctor", "Show what this machine has, and what it costs where something is missing");
  verb->footer("Example:\n  nestedfp doctor");
  auto json = std::make_shared<bool>(false);
  verb->add_flag("--json", *json, "print one JSON object");
  verb->callback([json, &status] {
    status = ok_status();
    const std::vector<Finding> findings = diagnose(read_system_facts(server::grammars_available()));
    if (*json) {
      nlohmann::ordered_json list = nlohmann::ordered_json::array();
      for (const Finding& f : findings) {
        list.push_back({{"id", f.id},
                        {"title", f.title},
                        {"health", name_of(f.health)},
                        {"found", f.found},
                        {"cost", f.cost},
                        {"remedy", f.remedy}});
      }
      const nlohmann::ordered_json out = {{"version", NFP_VERSION}, {"findings", list}};
      print_indented(out);
      return;
    }
    for (const Finding& f : findings) {
      fmt::print("{:<8} {:<21} {}\n", f.health == Health::kGood ? "" : name_of(f.health), f.title, f.found);
      if (!f.cost.empty()) fmt::print("{:30} costs: {}\n", "", f.cost);
      if (!f.remedy.empty()) fmt::print("{:30} do: {}\n", "", f.remedy);
    }
  });
}

}  // namespace nfp
