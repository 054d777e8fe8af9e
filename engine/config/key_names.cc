#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "engine/base/nearest.h"
#include "engine/config/keys.h"

namespace zero {
namespace {

// Other programs' names for our keys, and for options of the command line.
struct Synonym {
  const char* theirs;
  const char* ours;
};
constexpr Synonym kSynonyms[] = {
    {"batch_size", "train_batch_size"},
    {"global_batch_size", "train_batch_size"},
    {"micro_batch_size", "train_micro_batch_size_per_gpu"},
    {"per_device_train_batch_size", "train_micro_batch_size_per_gpu"},
    {"accumulation_steps", "gradient_accumulation_steps"},
    {"learning_rate", "optimizer.params.lr"},
    {"beta1", "optimizer.params.betas"},
    {"beta2", "optimizer.params.betas"},
    {"grad_clip", "gradient_clipping"},
    {"max_grad_norm", "gradient_clipping"},
    {"clip_grad", "gradient_clipping"},
    {"lr_scheduler_type", "scheduler.type"},
    {"lr_scheduler_kwargs", "scheduler.params"},
    {"optim", "optimizer.type"},
    {"adam_beta1", "optimizer.params.betas"},
    {"adam_beta2", "optimizer.params.betas"},
    {"adam_epsilon", "optimizer.params.eps"},
    {"logging_steps", "steps_per_print"},
    {"log_interval", "steps_per_print"},
    {"warmup_steps", "scheduler.params.warmup_num_steps"},
    {"warmup_iters", "scheduler.params.warmup_num_steps"},
    {"warmup_ratio", "scheduler.params.warmup_num_steps"},
    {"max_steps", "training.steps"},
    {"max_iters", "training.steps"},
    {"train_steps", "training.steps"},
    {"num_train_epochs", "training.epochs"},
    {"num_epochs", "training.epochs"},
    {"eval_interval", "training.eval_every"},
    {"eval_steps", "training.eval_every"},
    {"output_dir", "training.out_dir"},
    {"save_steps", "training.save_every"},
    {"save_interval", "training.save_every"},
    {"async_mode", "training.async_save"},
    {"save_total_limit", "training.keep_last"},
    {"resume_from_checkpoint", "training.resume"},
    {"seq_len", "data.sequence_length"},
    {"seq_length", "data.sequence_length"},
    {"block_size", "data.sequence_length"},
    {"max_length", "data.sequence_length"},
    {"reset_position_ids", "data.reset_attention_mask"},
    {"eod_mask_loss", "data.reset_attention_mask"},
    {"packing", "data.reset_attention_mask"},
    {"packed", "data.reset_attention_mask"},
    {"attn_mask_type", "data.reset_attention_mask"},
    {"block_cross_document_attention", "data.reset_attention_mask"},
    {"eot_token_id", "data.eos_token_id"},
    {"eod_token_id", "data.eos_token_id"},
    {"dataset", "data.train"},
    {"train_files", "data.train"},
    {"val", "data.validation"},
    {"family", "model.model_type"},
    {"name", "model.preset"},
    {"gradient_checkpointing", "activation_checkpointing.enabled"},
    {"zero_stage", "zero_optimization.stage"},
    {"comm_overlap", "zero_optimization.overlap_comm"},
    {"prefetch_bucket_size", "zero_optimization.stage3_prefetch_bucket_size"},
    {"ranks", "--ranks"},
    {"world_size", "--ranks"},
    {"nproc_per_node", "--ranks"},
    {"threads", "--threads"},
    {"num_threads", "--threads"},
    {"precision", "bf16.enabled"},
    {"dtype", "bf16.enabled"},
};

// The same for hyperparameters, whose names GPT-2 and the other families have
// from Hugging Face; `theirs` are separated by spaces.
constexpr struct {
  const char *gpt2, *others, *theirs;
} kModelSynonyms[] = {
    {"n_layer", "num_hidden_layers",
     "num_layers n_layers layers num_blocks n_block depth"},
    {"n_embd", "hidden_size",
     "hidden_dim d_model n_embed embed_dim embedding_dim embedding_size "
     "model_dim dim width hidden"},
    {"n_head", "num_attention_heads",
     "num_heads n_heads heads nhead attention_heads"},
    {"n_inner", "intermediate_size",
     "ffn_dim d_ff d_ffn ffn_hidden_size ff_dim dim_feedforward "
     "intermediate_dim mlp_dim inner_dim"},
    {"n_positions", "max_position_embeddings",
     "max_seq_len max_seq_length max_sequence_length context_length "
     "max_positions"},
    {"layer_norm_epsilon", "rms_norm_eps", "norm_eps layer_norm_eps ln_eps"},
    {"activation_function", "hidden_act", "activation act_fn"},
    {"vocab_size", "vocab_size", "n_vocab vocab padded_vocab_size"},
    {"num_key_value_heads", "num_key_value_heads",
     "num_kv_heads n_kv_heads n_kv_head kv_heads num_query_groups"},
    {"tie_word_embeddings", "tie_word_embeddings",
     "tie_embeddings tied_embeddings tie_weights weight_tying"},
};

std::string ModelKey(absl::string_view name) {
  for (const auto& [gpt2, others, theirs] : kModelSynonyms) {
    const std::vector<absl::string_view> names = absl::StrSplit(theirs, ' ');
    if (std::find(names.begin(), names.end(), name) == names.end()) continue;
    if (absl::string_view(gpt2) == others) {
      return absl::StrCat("; did you mean \"model.", gpt2, "\"?");
    }
    return absl::StrCat("; did you mean \"model.", gpt2,
                        "\" (model_type gpt2) or \"model.", others,
                        "\" (other families)?");
  }
  return "";
}

}  // namespace

std::string NearestKey(absl::string_view parent, absl::string_view name) {
  std::vector<std::string> siblings, leaves, paths, elsewhere;
  for (const KeySpec& key : AllKeys()) {
    if (key.treatment != Treatment::kUsed) continue;
    const std::string leaf = key.name();
    if (key.section() == parent) siblings.push_back(leaf);
    if (leaf == name) elsewhere.push_back(key.path);
    if (!key.is_leaf()) continue;
    leaves.push_back(leaf);
    paths.push_back(key.path);
  }
  const auto ask = [](absl::string_view what) {
    return absl::StrCat("; did you mean \"", what, "\"?");
  };
  if (elsewhere.size() == 1) return ask(elsewhere[0]);
  for (const Synonym& synonym : kSynonyms) {
    if (name == synonym.theirs) return ask(synonym.ours);
  }
  if (parent == "model") {
    if (std::string key = ModelKey(name); !key.empty()) return key;
  }
  if (const auto near = NearestNames(name, siblings, 1); !near.empty()) {
    return ask(near[0]);
  }
  const auto near = NearestNames(name, leaves, 1);
  if (near.empty()) return "";
  const auto leaf = std::find(leaves.begin(), leaves.end(), near[0]);
  return ask(paths[static_cast<size_t>(leaf - leaves.begin())]);
}

std::string KnownKeys(absl::string_view parent) {
  constexpr size_t kColumns = 80;
  std::vector<std::string> lines = {"; known here:"};
  for (const KeySpec& key : AllKeys()) {
    if (key.treatment != Treatment::kUsed || key.section() != parent) continue;
    const std::string name = absl::StrCat(" ", key.name(), ",");
    if (lines.size() == 1 || lines.back().size() + name.size() > kColumns) {
      lines.push_back("   ");
    }
    lines.back() += name;
  }
  lines.back().pop_back();  // the last comma
  return absl::StrJoin(lines, "\n");
}

}  // namespace zero
