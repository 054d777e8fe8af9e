// `zero devices`: this machine's devices; under mpirun or srun those of all
// hosts, and how fast they reach each other.
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/time/time.h"
#include "engine/base/file.h"
#include "engine/base/status.h"
#include "engine/comm/launch.h"
#include "engine/comm/links.h"
#include "engine/comm/mpi_network.h"
#include "engine/train/console.h"
#include "engine/train/machine_speed.h"
#include "engine/train/product_rate.h"
#include "nlohmann/json.hpp"
#include "tools/cli/commands.h"
#include "tools/cli/ranks.h"
#include "tools/cli/signals.h"

namespace zero {
namespace {

using Json = nlohmann::ordered_json;

// Timeout of a message; a process that has not arrived by then is missing.
constexpr absl::Duration kTimeout = absl::Minutes(2);

std::string ProductsText(Device& device) {
  std::string text;
  for (DType dtype : {DType::kF32, DType::kBF16}) {
    const ProductRate rate = MeasureProductRate(device, dtype, {});
    absl::StrAppendFormat(&text, "\n      %s products: %.0f GFLOP/s (n = %d)",
                          DTypeName(dtype), rate.flops / 1e9, rate.size);
  }
  return text;
}

// Offload's links.
std::string HostText(Device& device) {
  const auto speed = MeasureHostSpeed(device);
  if (!speed.ok()) return std::string(speed.status().message());
  return absl::StrFormat(
      "copies to it %.1f GB/s, from it %.1f GB/s; AdamW %.2f G elements/s by "
      "%s",
      1e-9 * speed->down, 1e-9 * speed->up, 1e-9 * speed->updates,
      Counted(device.host().info().num_threads, "thread"));
}

std::string GpuText(Device& gpu) {
  const DeviceInfo info = gpu.info();
  const DeviceMemory memory = gpu.memory();
  std::string text = absl::StrFormat(
      "%s, %s, %d SMs, %s (%s free), %s", info.name, info.isa, info.num_threads,
      HumanBytes(static_cast<double>(memory.total_bytes)),
      HumanBytes(static_cast<double>(memory.free_bytes)), info.driver);
  if (info.peak_flops_bf16 > 0) {
    absl::StrAppendFormat(&text,
                          "\n      bf16 peak: %.0f GFLOP/s, the vendor's",
                          info.peak_flops_bf16 / 1e9);
  }
  absl::StrAppend(&text, ProductsText(gpu),
                  "\n      its host: ", HostText(gpu));
  for (const std::string& note : gpu.notes()) {
    absl::StrAppend(&text, "\n      note: ", note);
  }
  return text;
}

absl::Status ShowDisk(const std::string& folder) {
  if (!PathExists(folder)) {
    return absl::NotFoundError(absl::StrCat(
        "--disk ", folder, " does not exist; name a folder on the disk"));
  }
  const DiskTrial trial = {.folder = folder};
  ZERO_ASSIGN_OR_RETURN(const double seconds, MeasureDisk(trial));
  const auto bytes = static_cast<double>(trial.pieces * trial.piece_bytes);
  absl::PrintF("disk  %s: %.2f GB/s read while as much is written (%s)\n",
               folder, 1e-9 * bytes / seconds, HumanBytes(bytes));
  return absl::OkStatus();
}

absl::Status ShowMachine(const RunOptions& options, const std::string& disk) {
  ZERO_ASSIGN_OR_RETURN(const auto cpu, OpenDevice(options));
  const DeviceInfo info = cpu->info();
  absl::PrintF("cpu   %s, %s, %s, %s%s\n", info.name, info.isa,
               Counted(info.num_threads, "thread"),
               HumanBytes(static_cast<double>(info.memory_bytes)),
               ProductsText(*cpu));
  absl::PrintF("      as a host: %s\n", HostText(*cpu));
  // If there is no GPU, why.
  for (int index = 0; index < std::max(NumCudaDevices(), 1); ++index) {
    const auto gpu = MakeCudaDevice(index, {}, cpu->host().info().num_threads);
    absl::PrintF("cuda  %s\n", gpu.ok()
                                   ? absl::StrCat(index, ": ", GpuText(**gpu))
                                   : std::string(gpu.status().message()));
  }
  return disk.empty() ? absl::OkStatus() : ShowDisk(disk);
}

// A process's description of itself, as text.
std::string FactsOf(const RunOptions& options, const Device& cpu) {
  const DeviceInfo info = cpu.info();
  Json facts = {{"host", HostName()},
                {"cores", AllowedCores()},
                {"cpu", info.name.substr(0, 200)},
                {"isa", info.isa},
                {"bytes", info.memory_bytes},
                {"gpus", NumCudaDevices()}};
  // One process per host opens one of its GPUs.
  if (options.launch->local_rank == 0 && NumCudaDevices() > 0) {
    const auto gpu = MakeCudaDevice(0);
    facts["gpu"] = gpu.ok() ? (*gpu)->info().name.substr(0, 200) : "";
  }
  return facts.dump();
}

// One line per host, and one with the differences of its processes.
void PrintHosts(const std::vector<Json>& processes, Console* console) {
  std::vector<std::string> order;
  std::map<std::string, std::vector<int>> by_host;
  for (size_t process = 0; process < processes.size(); ++process) {
    const std::string host = processes[process]["host"];
    if (by_host[host].empty()) order.push_back(host);
    by_host[host].push_back(static_cast<int>(process));
  }
  std::vector<std::pair<std::string, std::string>> rows;
  for (const std::string& host : order) {
    const Json& first = processes[by_host[host].front()];
    std::vector<std::string> numbers, cores;
    for (const int process : by_host[host]) {
      numbers.push_back(absl::StrCat(process));
      cores.push_back(absl::StrCat(processes[process]["cores"].get<int>()));
    }
    const bool alike = std::count(cores.begin(), cores.end(), cores[0]) ==
                       static_cast<int64_t>(cores.size());
    const int gpus = first["gpus"];
    rows.push_back(
        {host,
         absl::StrFormat(
             "process%s %s, %s cores each, %s, %s, %s, %s",
             numbers.size() == 1 ? "" : "es", absl::StrJoin(numbers, ", "),
             alike ? cores[0] : absl::StrJoin(cores, ", "),
             first["cpu"].get<std::string>(), first["isa"].get<std::string>(),
             HumanBytes(first["bytes"].get<double>()),
             gpus == 0
                 ? "no GPU"
                 : absl::StrFormat("%d x %s", gpus, first.value("gpu", "")))});
  }
  console->Table("hosts", rows);
}

void PrintLinks(const std::vector<Json>& processes,
                const std::vector<LinkSpeed>& links, Console* console) {
  std::vector<std::pair<std::string, std::string>> rows;
  for (const LinkSpeed& link : links) {
    const std::string from = processes[link.from]["host"];
    const std::string to = processes[link.to]["host"];
    rows.push_back(
        {from == to ? "within " + from : absl::StrCat(from, " to ", to),
         absl::StrFormat("%6.2f GB/s, %.1f us", link.bytes_per_second / 1e9,
                         absl::ToDoubleMicroseconds(link.latency))});
  }
  if (rows.empty()) return;
  console->Table("between processes, one way, with no other traffic", rows);
}

absl::Status ShowCluster(const RunOptions& options, MpiNetwork& network) {
  ZERO_ASSIGN_OR_RETURN(const auto cpu, OpenDevice(options));
  ZERO_ASSIGN_OR_RETURN(
      const std::vector<std::string> texts,
      ExchangeTexts(network, FactsOf(options, *cpu), kTimeout));
  std::vector<Json> processes;
  std::vector<std::string> hosts;
  for (const std::string& text : texts) {
    processes.push_back(Json::parse(text));
    hosts.push_back(processes.back()["host"]);
  }
  ZERO_ASSIGN_OR_RETURN(const std::vector<LinkSpeed> links,
                        MeasureLinks(network, LinksToMeasure(hosts), kTimeout));
  if (network.process() > 0) return absl::OkStatus();
  Console console(stdout, /*is_terminal=*/false);
  console.Line(absl::StrCat(network.num_processes(),
                            " processes, connected by ", network.library()));
  PrintHosts(processes, &console);
  PrintLinks(processes, links, &console);
  return absl::OkStatus();
}

absl::Status Devices(RunOptions options, const std::string& disk) {
  ZERO_RETURN_IF_ERROR(ReadRanks(&options));
  if (!options.launch.has_value() || !options.launch->has_mpi) {
    return ShowMachine(options, disk);
  }
  const std::atomic<bool>* const stop = InstallStopSignals("");
  ZERO_ASSIGN_OR_RETURN(
      const std::shared_ptr<MpiNetwork> network,
      MpiNetwork::Open({.stop = stop, .tell = [](const std::string& line) {
                          absl::FPrintF(stderr, "zero: %s\n", line);
                        }}));
  ZERO_RETURN_IF_ERROR(ShowCluster(options, *network));
  network->Finish(kTimeout);
  return absl::OkStatus();
}

}  // namespace

Command AddDevices(CLI::App& app) {
  auto options = std::make_shared<RunOptions>();
  auto disk = std::make_shared<std::string>();
  app.add_option("--threads", options->threads,
                 "compute threads (default: all cores)")
      ->check(CLI::Range(1, 1024));
  AddHostThreadsOption(app, options.get());
  app.add_option("--disk", *disk,
                 "also time the disk of this folder, with a file of 1 GiB, as "
                 "an nvme_path of offload")
      ->type_name("DIR");
  return [options, disk] { return Devices(*options, *disk); };
}

}  // namespace zero
