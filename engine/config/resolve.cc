#include "engine/config/resolve.h"

#include <algorithm>
#include <cmath>
#include <filesystem>

#include "absl/algorithm/container.h"
#include "absl/strings/match.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "engine/base/file.h"
#include "engine/config/run_length.h"

namespace zero {
namespace {

constexpr char kTokenizers[] =
    "\"bytes\", \"none\" or the path of a tokenizer.json, of a "
    "SentencePiece model or of a folder with one";

class Resolver : public BatchResolver {
 public:
  using BatchResolver::BatchResolver;

  void Run() {
    const bool keys_are_right = problems_.empty();
    Base();
    // A wrong key may be the one that would be missing.
    if (keys_are_right) Required();
    if (!problems_.empty()) return;
    if (!has_base_) DefaultsOfFamily();
    // Keys that others' validity depends on come first.
    for (const char* path :
         {"model.rope_scaling.rope_type", "optimizer.type", "scheduler.type",
          "lr_scaling.rule", "lr_scaling.base_batch_size",
          "lr_scaling.warmup_steps", "lr_scaling.warmup_epochs"}) {
      Set(path);
    }
    CheckLrScaling();
    CheckApplies();
    if (!problems_.empty()) return;
    for (const auto& [path, key] : given_.keys) Set(path);
    Data();
    Complete();
    Documents();
    Batch();
    if (problems_.empty()) CheckSize();
    Precision();
    Autos();
    Zero();
    Optimizer();
    Scheduler();
    Training();
    Unread();
    Origins();
  }

 private:
  // Reports the required keys together if several are missing, as they are in a
  // config written for DeepSpeed. One alone is reported where it is used.
  void Required() {
    const auto given = [&](const char* path) { return Given(path); };
    const auto any = [&](std::vector<const char*> paths, auto has) {
      return absl::c_any_of(paths, has);
    };
    const std::vector<const char*> batches = {"train_batch_size",
                                              "train_micro_batch_size_per_gpu",
                                              "elasticity.enabled"};
    const struct {
      bool is_there;
      const char *key, *example;
    } kRequired[] = {
        {any({"model.preset", "model.from_pretrained", "model.model_type"},
             given),
         "model.preset (or model.from_pretrained, or model.model_type)",
         R"("model": {"preset": "gpt2"})"},
        {options_.missing_files != MissingFiles::kError || Given("data.train"),
         "data.train", R"("data": {"train": "my_text.txt"})"},
        {any({"training.steps", "training.epochs"}, given),
         "training.steps (or training.epochs)",
         R"("training": {"steps": 1000})"},
        {any(batches, given) ||
             any(batches, [&](const char* path) { return IsAuto(path); }),
         "train_batch_size (or train_micro_batch_size_per_gpu)",
         R"("train_batch_size": 8)"},
    };
    std::vector<std::string> keys, examples;
    for (const auto& [is_there, key, example] : kRequired) {
      if (is_there) continue;
      keys.push_back(key);
      examples.push_back(absl::StrCat("\n  ", example));
    }
    if (keys.size() < 2) return;
    Problem("", "missing: ", absl::StrJoin(keys, ", "),
            "; add them, for example after the first {:",
            absl::StrJoin(examples, ","), given_.keys.empty() ? "" : ",");
  }

  void CheckApplies() {
    if (!problems_.empty()) return;
    for (const auto& [path, given] : given_.keys) {
      const KeySpec* key = FindKey(path);
      if (key->Applies(config_)) continue;
      if (path == "scheduler.params.warmup_num_steps" &&
          config_.lr_scaling.active()) {
        continue;  // 0, which CheckLrScaling lets pass
      }
      if (absl::StartsWith(path, "model.")) {
        Problem(path, WrongFamily(path.substr(6), key->applies_to));
      } else {
        const std::string type = path.substr(0, path.find('.')) + ".type";
        Problem(path, "belongs to ", key->applies_to, "; ", type, " is ",
                ValueText(FindKey(type)->get(config_)));
      }
    }
  }

  // ---- Data ---------------------------------------------------------------

  void LocateAll(const std::string& path, std::vector<std::string>* files) {
    std::vector<std::string> missing;
    for (std::string& file : *files) {
      file = Locate(file);
      if (!Exists(file)) missing.push_back(file);
      if (IsFolder(file)) {
        Lacking(path,
                absl::StrCat(JsonQuote(file), " is a folder, want files: ",
                             JsonQuote(file + "/*")));
      }
    }
    if (!missing.empty()) Lacking(path, Missing(missing));
  }

  void Data() {
    DataConfig& data = config_.data;
    if (data.train.empty()) {
      Lacking("data.train",
              "missing; want a file, a glob or a list of them, for example "
              "--set data.train=my_text.txt");
    }
    LocateAll("data.train", &data.train);
    LocateAll("data.validation", &data.validation);
    if (!data.validation.empty() && data.validation_fraction > 0) {
      Problem("data.validation_fraction", Cite("data.validation"),
              " already gives the validation data; delete one");
    }
    Tokenizer();
    JsonLines();
  }

  void Tokenizer() {
    DataConfig& data = config_.data;
    const std::string path = "data.tokenizer";
    const auto in_folder = [&](const std::string& dir) {
      const bool known = options_.model_tokenizer != nullptr && !dir.empty();
      return known ? options_.model_tokenizer(dir) : std::string();
    };
    if (!Given(path)) {
      const std::string own = in_folder(config_.model.from_pretrained);
      if (!own.empty()) {
        data.tokenizer = own;
        return Derived(path, "the model's own");
      }
      const bool tokens =
          data.format == TokenFormat::kLlmc ||
          data.format == TokenFormat::kRawU16 ||
          (data.format == TokenFormat::kAuto && !data.train.empty() &&
           absl::EndsWith(data.train[0], ".bin"));
      if (tokens) {
        data.tokenizer = "none";
        Derived(path, "data.train holds tokens");
      }
    }
    if (data.tokenizer == "none") {
      if (data.format == TokenFormat::kText) {
        Problem(path,
                "\"none\", but data.format is \"text\"; want \"bytes\" "
                "or the path of a tokenizer");
      }
      return;
    }
    if (data.tokenizer == "bytes") return;
    if (data.tokenizer.empty()) {
      return Problem(path, "empty; want ", kTokenizers);
    }
    data.tokenizer = Locate(data.tokenizer);
    if (IsFolder(data.tokenizer)) {
      const std::string file = in_folder(data.tokenizer);
      if (file.empty()) {
        return Lacking(path, absl::StrCat(JsonQuote(data.tokenizer),
                                          " is a folder without a "
                                          "tokenizer.json or "
                                          "tokenizer.model; want ",
                                          kTokenizers));
      }
      data.tokenizer = file;
    }
    if (!PathExists(data.tokenizer)) {
      Lacking(path, absl::StrCat("want ", kTokenizers, "; ",
                                 Missing({data.tokenizer})));
    }
  }

  // Samples are packed into sequences and do not see each other.
  void JsonLines() {
    DataConfig& data = config_.data;
    const auto is_jsonl = [&](const std::string& file) {
      return IsJsonLines(file, data.format);
    };
    if (absl::c_none_of(data.train, is_jsonl) &&
        absl::c_none_of(data.validation, is_jsonl)) {
      return;
    }
    const std::string apart = "data.reset_attention_mask";
    if (Given(apart) && !data.reset_attention_mask) {
      Problem(apart,
              "false, but samples of JSON lines never see each other; delete "
              "it");
    }
    data.reset_attention_mask = true;
    if (!Given(apart)) Derived(apart, "samples of JSON lines are kept apart");
    if (data.tokenizer == "none") {
      Problem("data.tokenizer",
              "\"none\", but JSON lines are text; want \"bytes\" "
              "or the path of a tokenizer");
    }
  }

  // Separates documents by the token between them.
  void Documents() {
    const DataConfig& data = config_.data;
    if (!data.reset_attention_mask || data.tokenizer != "none") return;
    const std::string id = "data.eos_token_id";
    if (!Given(id)) {
      return Problem(
          "data.reset_attention_mask", "true, but ", Cite("data.tokenizer"),
          " is \"none\" and cannot tell which token separates documents; want ",
          id,
          " (50256 in GPT-2's token files), or the "
          "tokenizer");
    }
    if (data.eos_token_id >= config_.model.vocab_size) {
      Problem(id, data.eos_token_id, " is not a token of ",
              Cite("model.vocab_size"), " = ", config_.model.vocab_size);
    }
  }

  // Notes the keys whose "auto" differs from Hugging Face's Trainer.
  void Autos() {
    std::vector<std::string> values;
    if (IsAuto("optimizer.params.lr")) {
      values.push_back(absl::StrCat("optimizer.params.lr ",
                                    JsonDouble(config_.optimizer.lr),
                                    " (there 5e-05)"));
    }
    if (IsAuto("gradient_clipping")) {
      values.push_back("gradient_clipping off (there 1.0)");
    }
    const std::string warmup = "scheduler.params.warmup_num_steps";
    if (IsAuto(warmup) && FindKey(warmup)->Applies(config_)) {
      values.push_back(absl::StrCat(
          warmup, " ", config_.scheduler.warmup_num_steps, " (there 0)"));
    }
    if (IsAuto("bf16.enabled") && config_.param_dtype() == DType::kF32) {
      values.push_back("bf16.enabled false (there --bf16)");
    } else if (IsAuto("fp16.enabled") && config_.param_dtype() == DType::kF32) {
      values.push_back("fp16.enabled false (there --fp16)");
    }
    if (values.empty()) return;
    Note("\"auto\" is zero's default, not that of Hugging Face's Trainer: ",
         absl::StrJoin(values, ", "));
  }

  void Precision() {
    if (config_.bf16 && config_.fp16.enabled) {
      Problem("fp16.enabled", "true, and so is ", Cite("bf16.enabled"),
              "; choose one");
    }
    const std::string accumulated = "data_types.grad_accum_dtype";
    if (config_.grad_accum_dtype != DType::kF32 &&
        config_.grad_accum_dtype != config_.param_dtype()) {
      Problem(accumulated,
              absl::StrFormat("\"%s\", but parameters are %s; want \"fp32\" or "
                              "their dtype",
                              DTypeName(config_.grad_accum_dtype),
                              DTypeName(config_.param_dtype())));
    }
    if (config_.stochastic_rounding && config_.param_dtype() == DType::kF32) {
      Problem("data_types.stochastic_rounding",
              "true, but parameters are fp32 and nothing is rounded; want "
              "false, or bf16.enabled or fp16.enabled");
    }
    if (!Given("communication_data_type")) {
      config_.communication_data_type = config_.grad_accum_dtype;
      Derived("communication_data_type", accumulated);
    }
    const LossScalerOptions& scaler = config_.fp16.scaler;
    const double initial =
        std::ldexp(1.0, static_cast<int>(scaler.initial_scale_power));
    if (FindKey("fp16.min_loss_scale")->IsRead(config_) &&
        scaler.min_loss_scale > initial) {
      Problem("fp16.min_loss_scale", JsonDouble(scaler.min_loss_scale),
              " is more than the first scale, 2 to the "
              "initial_scale_power = ",
              JsonDouble(initial));
    }
  }

  // ---- Ranks --------------------------------------------------------------

  void Zero() {
    const std::string algorithm = "communication.algorithm";
    const std::string stage = "zero_optimization.stage";
    if (config_.communication.algorithm ==
            CommunicationAlgorithm::kParameterServer &&
        config_.zero_optimization.stage > 0) {
      Problem(algorithm,
              "\"parameter_server\" keeps the whole optimizer on "
              "rank 0, but ",
              Cite(stage), " is ", config_.zero_optimization.stage,
              " and shards it; want stage 0, or direct or ring");
    }
    Backend();
    Hosts();
    GroupsOfHosts();
    Offload();
    const std::string path = "zero_optimization.mics_shard_size";
    const int64_t size = config_.zero_optimization.mics_shard_size;
    const int64_t world = options_.world;
    if (size == -1) return;
    if (size == 0) {
      return Problem(path,
                     "0 ranks cannot share anything; want -1 (off) or a "
                     "divisor of the number of ranks");
    }
    if (config_.zero_optimization.stage == 0) {
      return Problem(path, size, ", but ", Cite("zero_optimization.stage"),
                     " is 0 and shards nothing; delete it, or "
                     "raise the stage");
    }
    // One rank has nothing to shard. `zero eval` loads the config of a run on
    // one rank.
    if (world == 1 || world % size == 0) return;
    std::vector<int64_t> divisors;
    for (int64_t d = 1; d <= world; ++d) {
      if (world % d == 0) divisors.push_back(d);
    }
    Problem(path, size, " does not divide the ", world, " ranks; want one of ",
            absl::StrJoin(divisors, ", "));
  }

  // "auto" in mics_shard_size: a group is a host.
  void GroupsOfHosts() {
    const std::string path = "zero_optimization.mics_shard_size";
    ZeroConfig& zero = config_.zero_optimization;
    const int64_t world = options_.world;
    if (!IsAuto(path) || world == 1) return;
    const int64_t told = config_.communication.ranks_per_host;
    const int64_t ranks = told > 0 ? told
                          : options_.ranks_per_host > 0
                              ? options_.ranks_per_host
                              : world;
    const char* const whose = told > 0 ? "of communication.ranks_per_host"
                              : options_.ranks_per_host > 0
                                  ? "that the launcher started on this host"
                                  : "of this process";
    if (world % ranks != 0) {
      return Problem(path, "auto: the ", ranks, " ranks ", whose,
                     " do not divide the ", world,
                     "; want the same number on each host, or name a number");
    }
    const char* reason = nullptr;
    if (zero.stage == 0) {
      reason = "zero_optimization.stage 0 shards nothing";
    } else if (ranks == world) {
      reason = "all ranks are on one host";
    } else if (ranks == 1) {
      reason = "each host has one rank, which has no other to share with";
    }
    if (reason != nullptr) {
      return Note(path, " auto: one group of all ", world, " ranks, as ",
                  reason);
    }
    zero.mics_shard_size = ranks;
    Derived(path, "the ranks of a host");
    Note(path, " auto: ", world / ranks, " groups of the ", ranks, " ranks ",
         whose);
  }

  // Derives values from the home of the parameters.
  void CompleteOffload() {
    ZeroConfig& zero = config_.zero_optimization;
    const std::string section = "zero_optimization.";
    const std::string optimizer = section + "offload_optimizer.device";
    // DeepSpeed ignores it too, and its examples set it at stage 2: a note is
    // enough.
    if (zero.stage == 1 || zero.stage == 2) {
      zero.offload_param = OffloadDevice::kNone;
    }
    if (zero.offload_param == OffloadDevice::kNone || Given(optimizer)) return;
    zero.offload_optimizer = zero.offload_param;
    const std::string folder = section + "offload_optimizer.nvme_path";
    const char* const why = "the host updates the parameters that it keeps";
    Derived(optimizer, why);
    if (zero.uses_nvme() && !Given(folder)) {
      zero.optimizer_nvme_path = zero.param_nvme_path;
      Derived(folder, why);
    }
    Note(Origin(section + "offload_param.device"), ": ", optimizer, " is ",
         ValueText(FindKey(optimizer)->get(config_)), ", too: ", why);
  }

  void Offload() {
    CompleteOffload();
    const ZeroConfig& zero = config_.zero_optimization;
    const std::string section = "zero_optimization.";
    const std::string optimizer = section + "offload_optimizer.device";
    if (zero.delayed_update && zero.offload_optimizer == OffloadDevice::kNone) {
      Problem(section + "offload_optimizer.delayed_update.enabled",
              "true, but ", optimizer,
              " is \"none\": the device updates, so there is no host update to "
              "overlap with the next step; set it to cpu, or delete this key");
    }
    if (zero.offload() == Offload::kNone) return;
    const std::string param = section + "offload_param.device";
    const bool offloads_param = zero.offload_param != OffloadDevice::kNone;
    const char* const device =
        (offloads_param ? zero.offload_param : zero.offload_optimizer) ==
                OffloadDevice::kNvme
            ? "\"nvme\""
            : "\"cpu\"";
    if (zero.stage == 0) {
      return Problem(offloads_param ? param : optimizer, device, " needs ",
                     section, offloads_param ? "stage 3" : "stage 1, 2 or 3",
                     ", but ", Cite(section + "stage"),
                     " is 0, which offloads nothing; raise it, or set the "
                     "device to none");
    }
    if (offloads_param && zero.offload_optimizer == OffloadDevice::kNone) {
      Problem(param, device, " also needs ", optimizer,
              " \"cpu\" or \"nvme\": the host updates the parameters that it "
              "keeps");
    }
    const std::string ratio = section + "offload_optimizer.ratio";
    if (zero.offload_optimizer_ratio < 1 && offloads_param) {
      Problem(
          ratio, JsonDouble(zero.offload_optimizer_ratio), ", but ",
          Cite(param), " is ", device,
          ": the host updates all the parameters that it keeps; delete one");
    }
    if (zero.offload_optimizer_ratio < 1 && zero.delayed_update) {
      Problem(ratio, JsonDouble(zero.offload_optimizer_ratio), ", but ",
              Cite(section + "offload_optimizer.delayed_update.enabled"),
              " is true: what the device updates would not be delayed, and "
              "results would depend on the ratio; delete one");
    }
    if (zero.update_before_norm) UpdateBeforeNorm();
    if (zero.uses_nvme()) Disk();
  }

  void UpdateBeforeNorm() {
    const ZeroConfig& zero = config_.zero_optimization;
    const std::string section = "zero_optimization.offload_optimizer.";
    const auto refuse = [&](const std::string& key, const char* why) {
      Problem(section + "update_before_norm", "true, but ", Cite(key), " is ",
              ValueText(FindKey(key)->get(config_)), ": ", why,
              "; delete one of the two");
    };
    if (config_.gradient_clipping > 0) {
      refuse("gradient_clipping", "clipping needs the norm of all gradients");
    }
    if (config_.fp16.enabled) {
      refuse("fp16.enabled", "a step that overflows has to be skipped");
    }
    if (config_.optimizer.spec.needs_tensor_norms()) {
      refuse("optimizer.type", "it needs norms of whole parameters first");
    }
    if (zero.delayed_update) {
      refuse(section + "delayed_update.enabled",
             "its update runs during the next step");
    }
    if (zero.uses_nvme()) {
      refuse(zero.offload_optimizer == OffloadDevice::kNvme
                 ? section + "device"
                 : "zero_optimization.offload_param.device",
             "states on a disk are read in the order of the next forward");
    }
  }

  void Disk() {
    const ZeroConfig& zero = config_.zero_optimization;
    const bool optimizer = zero.offload_optimizer == OffloadDevice::kNvme;
    const bool param = zero.offload_param == OffloadDevice::kNvme;
    const std::string of_optimizer =
        "zero_optimization.offload_optimizer.nvme_path";
    const std::string of_param = "zero_optimization.offload_param.nvme_path";
    if (zero.delayed_update) {
      Problem("zero_optimization.offload_optimizer.delayed_update.enabled",
              "true does not go with device \"nvme\": the host would have to "
              "keep new parameters until the next step has used the old ones, "
              "but states on a disk only pass through its memory; set the "
              "devices to cpu, or delete this key");
    }
    const auto want = [&](const std::string& path, bool used,
                          const std::string& value) {
      if (!used) return;
      if (value.empty()) {
        return Problem(path,
                       "device \"nvme\" needs a folder on a local disk, for "
                       "example \"/local_nvme\"");
      }
      // A mistyped mount point would fill another disk.
      const std::string parent = FolderOf(value);
      if (IsFolder(parent)) return;
      Lacking(path,
              absl::StrCat(JsonQuote(value), ": there is no folder ",
                           JsonQuote(parent),
                           "; a run makes only the last folder of the path, so "
                           "correct it, mount the disk, or make the folder"));
    };
    want(of_optimizer, optimizer, zero.optimizer_nvme_path);
    want(of_param, param, zero.param_nvme_path);
    if (optimizer && param && !zero.optimizer_nvme_path.empty() &&
        !zero.param_nvme_path.empty() &&
        zero.optimizer_nvme_path != zero.param_nvme_path) {
      Problem(of_param, "\"", zero.param_nvme_path, "\", but ",
              Cite(of_optimizer), " is \"", zero.optimizer_nvme_path,
              "\"; a rank has one file, write the same folder");
    }
    if (config_.aio.block_size % 4096 != 0) {
      Problem("aio.block_size", config_.aio.block_size,
              " is not a multiple of 4096, the blocks of disks; want ",
              config_.aio.block_size / 4096 * 4096);
    }
  }

  void Backend() {
    const std::string backend = "communication.backend";
    const std::string algorithm = "communication.algorithm";
    if (config_.communication.backend == CommunicationBackend::kMpi &&
        config_.communication.algorithm == CommunicationAlgorithm::kRing) {
      Problem(backend, "\"mpi\" sums in rank order, but ", Cite(algorithm),
              " is \"ring\"; want direct, or backend local");
    }
    if (config_.communication.backend != CommunicationBackend::kNccl) return;
    if (config_.communication.algorithm ==
        CommunicationAlgorithm::kHierarchical) {
      Problem(backend, "\"nccl\" knows the hosts itself, but ", Cite(algorithm),
              " is \"hierarchical\"; want direct");
    }
    if (config_.communication.algorithm == CommunicationAlgorithm::kRing) {
      Problem(backend, "\"nccl\" chooses its rings and trees itself, but ",
              Cite(algorithm), " is \"ring\"; want direct, or backend local");
    }
    if (config_.communication.algorithm ==
            CommunicationAlgorithm::kParameterServer &&
        config_.communication_data_type != DType::kF32) {
      Problem(backend,
              "\"nccl\" would round the sums of a parameter "
              "server at every hop, for ",
              Cite("communication_data_type"), " is ",
              DTypeName(config_.communication_data_type),
              "; want fp32, or backend local");
    }
  }

  void Hosts() {
    const double factor = config_.communication.straggler_factor;
    if (factor > 0 && factor <= 1) {
      Problem("communication.straggler_factor", JsonDouble(factor),
              " would name ranks that are no slower than the others; want more "
              "than 1, or 0 for none");
    }
    const std::string path = "communication.ranks_per_host";
    const int64_t ranks = config_.communication.ranks_per_host;
    if (ranks == 0 || options_.world == 1 || options_.world % ranks == 0) {
      return;
    }
    Problem(path, ranks, " does not divide the ", options_.world,
            " ranks; want the same number on each host");
  }

  // ---- Optimizer and schedule ---------------------------------------------

  void Optimizer() {
    const OptimizerSpec& o = config_.optimizer.spec;
    if (o.nesterov && (o.momentum == 0 || o.dampening != 0)) {
      Problem("optimizer.params.nesterov",
              "needs momentum > 0 and dampening 0");
    }
    if (o.min_coeff > o.max_coeff) {
      Problem("optimizer.params.min_coeff", JsonDouble(o.min_coeff),
              " is more than max_coeff ", JsonDouble(o.max_coeff));
    }
  }

  // The keys of lr_scaling, with each other and with the scheduler.
  void CheckLrScaling() {
    LrScalingConfig& scaling = config_.lr_scaling;
    const std::string rule = "lr_scaling.rule",
                      base = "lr_scaling.base_batch_size";
    if (!Given(rule) && Given(base)) {
      scaling.rule = LrScaleRule::kLinear;
      Derived(rule, "base_batch_size is given");
    }
    if (scaling.rule != LrScaleRule::kNone && !Given(base)) {
      Problem(base,
              "missing; want the batch size for which "
              "optimizer.params.lr was chosen");
    }
    if (scaling.rule == LrScaleRule::kNone && Given(base)) {
      Problem(base, Cite(rule),
              " is \"none\" and does not use "
              "it; delete one");
    }
    if (!scaling.active()) {
      for (const char* path :
           {"lr_scaling.warmup_steps", "lr_scaling.warmup_epochs"}) {
        if (ValueText(FindKey(path)->get(config_)) ==
            ValueText(FindKey(path)->get(Config()))) {
          continue;
        }
        Problem(path, Cite(rule),
                " is \"none\", so there is no scaled rate to warm up to; give ",
                base, ", or a scheduler that warms up");
      }
      return;
    }
    if (scaling.warmup_steps > 0 && scaling.warmup_epochs > 0) {
      Problem("lr_scaling.warmup_epochs", Cite("lr_scaling.warmup_steps"),
              " says it too; delete one");
    }
    config_.scheduler.warmup_num_steps = 0;
    for (const char* name :
         {"warmup_num_steps", "warmup_min_lr", "warmup_max_lr", "warmup_type",
          "warmup_min_ratio"}) {
      const std::string path = absl::StrCat("scheduler.params.", name);
      const auto it = given_.keys.find(path);
      if (it == given_.keys.end() || it->second.value == KeyValue(int64_t{0})) {
        continue;
      }
      Problem(
          path,
          "a second warm-up: lr_scaling warms up to the scaled rate and the "
          "scheduler continues from there; delete this key or lr_scaling");
    }
    if (config_.scheduler.kind == LrScheduleKind::kOneCycle) {
      Problem("scheduler.type",
              "\"OneCycle\" has a warm-up of its own and sets its own rates; "
              "delete it or lr_scaling");
    }
  }

  void Scheduler() {
    LrSchedule& s = config_.scheduler;
    const int64_t steps = config_.training.steps;
    const std::string params = "scheduler.params.";
    s.lr = config_.optimizer.lr;
    if (FindKey(params + "warmup_max_lr")->applies(config_)) {
      Peak(params + "warmup_max_lr", &s.warmup_max_lr);
    }
    const LrSchedule before = s;
    FillSchedule(steps, &s);
    if (s.total_num_steps != before.total_num_steps) {
      Derived(params + "total_num_steps", "training.steps");
    }
    if (s.decay_num_steps != before.decay_num_steps) {
      Derived(params + "decay_num_steps", "total_num_steps / 10, rounded up");
    }
    if (s.total_num_steps > 0 && s.decay_num_steps > s.total_num_steps) {
      Problem(params + "decay_num_steps", s.decay_num_steps, " is more than ",
              Cite(params + "total_num_steps"), " = ", s.total_num_steps);
    }
    if (s.kind == LrScheduleKind::kOneCycle) OneCycle();
    if (steps == 0 || config_.lr_scaling.warmup_epochs > 0) return;
    for (std::string& note :
         ScheduleNotes(config_, config_.lr_scaling.warmup_steps, steps)) {
      Note(std::move(note));
    }
  }

  void Peak(const std::string& path, double* peak) {
    if (!Given(path)) {
      *peak = config_.optimizer.lr;
      Derived(path, "optimizer.params.lr");
    } else if (Given("optimizer.params.lr") && *peak != config_.optimizer.lr) {
      Note(Origin(path), ": ", path, " ", JsonDouble(*peak),
           " is the peak; optimizer.params.lr ",
           JsonDouble(config_.optimizer.lr), " is not used");
    }
  }

  void OneCycle() {
    LrSchedule& s = config_.scheduler;
    const std::string params = "scheduler.params.";
    Peak(params + "cycle_max_lr", &s.cycle_max_lr);
    if (!Given(params + "cycle_second_step_size")) {
      s.cycle_second_step_size = s.cycle_first_step_size;
      Derived(params + "cycle_second_step_size", "cycle_first_step_size");
    }
    if (!Given(params + "cycle_second_stair_count")) {
      s.cycle_second_stair_count = s.cycle_first_stair_count;
      Derived(params + "cycle_second_stair_count", "cycle_first_stair_count");
    }
    if (s.cycle_min_lr > s.cycle_max_lr) {
      Problem(params + "cycle_min_lr", JsonDouble(s.cycle_min_lr),
              " is more than cycle_max_lr ", JsonDouble(s.cycle_max_lr));
    }
    if (s.cycle_min_mom > s.cycle_max_mom) {
      Problem(params + "cycle_min_mom", JsonDouble(s.cycle_min_mom),
              " is more than cycle_max_mom ", JsonDouble(s.cycle_max_mom));
    }
    if (config_.optimizer.spec.kind == OptimizerKind::kSgd) {
      if (Given(params + "cycle_momentum") && s.cycle_momentum) {
        Problem(params + "cycle_momentum",
                "true, but SGD has no beta1 to cycle");
      }
      s.cycle_momentum = false;
      if (!Given(params + "cycle_momentum")) {
        Derived(params + "cycle_momentum", "SGD has no beta1");
      }
    }
    const std::string betas = "optimizer.params.betas";
    if (s.cycle_momentum && Given(betas)) {
      Note(Origin(betas), ": ", betas, ": only beta2 is used, since ", params,
           "cycle_momentum sets beta1");
    }
  }

  // ---- Training -----------------------------------------------------------

  void Training() {
    TrainingConfig& t = config_.training;
    if (t.steps > 0 && t.epochs > 0) {
      Problem("training.epochs", Cite("training.steps"),
              " also says how long; delete one, or set it to \"auto\"");
    }
    if (t.steps == 0 && t.epochs == 0) {
      Problem("training.steps",
              "missing; want training.steps or "
              "training.epochs");
    }
    if (!Given("training.out_dir")) {
      t.out_dir =
          "out/" + std::filesystem::path(given_.sources[0]).stem().string();
      Derived("training.out_dir", "out/NAME of the config file");
    } else if (t.out_dir.empty()) {
      Problem("training.out_dir", "empty; want a folder");
    }
    if (!Given("training.sample.seed")) {
      t.sample.seed = t.seed;
      Derived("training.sample.seed", "training.seed");
    }
    const DataConfig& data = config_.data;
    const bool evaluates =
        !data.validation.empty() || data.validation_fraction > 0;
    const std::string no_data =
        "there is no validation data; want data.validation or "
        "data.validation_fraction";
    // One key turns validation off, regardless of the others.
    if (!evaluates && Given("data.validation_fraction")) {
      t.eval_every = t.eval_batches = 0;
    }
    if (t.eval_every > 0 && !evaluates) {
      Problem("training.eval_every", no_data);
    }
    if (t.eval_batches > 0 && !evaluates) {
      Problem("training.eval_batches", no_data);
    }
    if (t.sample_every > 0 && data.tokenizer == "none") {
      Problem("training.sample_every",
              "data.tokenizer is \"none\", so no text can be written; want a "
              "SentencePiece model there");
    }
    if (t.sample_every > 0 && t.sample.tokens == 0) {
      Problem("training.sample_every", Cite("training.sample.tokens"),
              " is 0; delete one");
    }
  }

  // ---- Keys that this run does not read -----------------------------------

  // Notes the unread keys that were given, one line per reason, and puts all
  // unread keys back to their defaults.
  void Unread() {
    struct Group {
      std::string origin, reason;
      std::vector<std::string> paths;
    };
    std::vector<Group> groups;
    std::vector<const KeySpec*> unread;
    for (const KeySpec& key : AllKeys()) {
      if (!key.Applies(config_) || key.IsRead(config_)) continue;
      unread.push_back(&key);
      if (!Given(key.path)) continue;
      const std::string reason = key.WhyUnread(config_);
      if (groups.empty() || groups.back().reason != reason) {
        groups.push_back({Origin(key.path), reason, {}});
      }
      groups.back().paths.push_back(key.path);
    }
    for (const KeySpec* key : unread) key->set(config_, key->get(Config()));
    for (const Group& group : groups) {
      Note(group.origin, ": ", absl::StrJoin(group.paths, ", "),
           group.paths.size() == 1 ? " is" : " are",
           " accepted and ignored: ", group.reason);
    }
  }

  // ---- Where values came from ---------------------------------------------

  void Origins() {
    for (const KeySpec& key : AllKeys()) {
      if (key.get == nullptr) continue;
      if (!key.IsRead(config_)) {
        loaded_.origins.erase(key.path);
        continue;
      }
      std::string& origin = loaded_.origins[key.path];
      const bool from_base =
          has_base_ && absl::StartsWith(key.path, "model.") &&
          key.path != "model.preset" && key.path != "model.from_pretrained" &&
          !absl::EndsWith(key.path, "_pdrop");
      if (origin.empty()) {
        origin = from_base ? base_origin_ : "default";
      } else if (from_base && Given(key.path)) {
        Config base;
        base.model = base_;
        const std::string theirs = ValueText(key.get(base));
        if (theirs != ValueText(key.get(config_))) {
          absl::StrAppend(&origin, " (", base_origin_, ": ", theirs, ")");
        }
      }
    }
  }
};

}  // namespace

void ResolveConfig(const GivenKeys& given, const LoadOptions& options,
                   LoadedConfig* loaded, std::vector<JsonProblem>* problems) {
  Resolver(given, options, loaded, problems).Run();
}

}  // namespace zero
