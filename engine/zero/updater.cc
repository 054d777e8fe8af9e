#include "engine/zero/updater.h"

#include <vector>

#include "optim/optimizer.h"

namespace zero {
namespace {

OptimizerStepOptions OptionsOf(const StepInput& input) {
  return {.lr = input.lr, .beta1 = input.beta1, .step = input.optimizer_step};
}

}  // namespace

// A UnitUpdate as the optimizer sees it.
struct Updater::View {
  UpdateState state;
  std::vector<float*> arrays;
  absl::Span<const TensorPart> parts;
};

Updater::Updater(const Rank& rank, const Plan& plan, const ModelStates& states,
                 RankNumbers& numbers, Stream& compute,
                 const ExecutorOptions& options)
    : rank_(&rank),
      ops_(&rank.device->ops()),
      plan_(&plan),
      states_(&states),
      numbers_(&numbers),
      compute_(&compute),
      options_(options),
      updates_(MakeUpdatePlan(
          plan, rank.rank(),
          {.weight_decay = static_cast<float>(options.optimizer.weight_decay),
           .decay_all = options.decay_all,
           .tensor_norms = options.optimizer.needs_tensor_norms()})) {}

void Updater::Take(Arena& arena) {
  const auto numbers = [&](int64_t elems) {
    return Tensor::Empty(arena, {elems}, DType::kF64, MemoryCategory::kInputs);
  };
  norm_sums_ = numbers(plan_->num_trained_segments + 2 * plan_->world);
  if (updates_.num_slots == 0) return;
  tensor_sums_ = numbers(
      2 * (updates_.num_slots + (1 + plan_->world) * updates_.num_tensors));
}

// Every rank sums the squares of its own pieces in segment order into one
// number, also where it has all pieces. The numbers are gathered and added in
// rank order: the same bits at every stage, and 16 bytes per rank. Other groups
// have the same pieces: those of the first one count.
void Updater::Norm(const StepInput& input, StepScalars* scalars) {
  scalars_ = scalars;
  const int64_t world = plan_->world;
  double* const of_pieces = norm_sums_.As<double>();
  double* const squares = of_pieces + plan_->num_trained_segments;
  double* const losses = squares + world;
  std::vector<SquaredSpan> spans;
  for (int u = 0; u < static_cast<int>(plan_->units.size()); ++u) {
    for (int s = 0; s < plan_->units[u].num_trained_segments; ++s) {
      spans.push_back({.src = states_->grads().Piece({u, s}).vector(),
                       .out = of_pieces + spans.size()});
    }
  }
  ops_->SumSquares(*compute_, {.spans = spans});
  ops_->Sum(*compute_,
            {.src = of_pieces,
             .size = CountsPieces() ? plan_->num_trained_segments : 0,
             .out = squares + rank_->rank()});
  rank_->device->Copy(*compute_, losses + rank_->rank(), &scalars->loss_sum,
                      sizeof(double));
  numbers_->Gather(
      kStepCollective,
      {norm_sums_.Slice(plan_->num_trained_segments, {world}),
       norm_sums_.Slice(plan_->num_trained_segments + world, {world})});
  ops_->Sum(*compute_,
            {.src = squares, .size = world, .out = &scalars->sum_squares});
  ops_->Sum(*compute_,
            {.src = losses, .size = world, .out = &scalars->global_loss});
  ops_->Clip(*compute_, {.sum_squares = &scalars->sum_squares,
                         .max_norm = options_.max_grad_norm,
                         .inverse_scale = 1.0f / input.loss_scale,
                         .keep_found = input.inherits_skip,
                         .norm = &scalars->norm,
                         .grad_scale = &scalars->grad_scale,
                         .found_non_finite = &scalars->found_non_finite});
}

Updater::View Updater::ViewOf(int unit, const StepInput& input) const {
  const UnitUpdate& update = updates_.units[unit];
  const FlatState& master = states_->master();
  View view;
  view.state = {
      .param = states_->params().Held(unit).vector(),
      .master = master.defined() ? master.Held(unit).vector() : Vector(),
      .grad = states_->grads().Held(unit).vector(),
      .grad_scale = &scalars_->grad_scale,
      .found_non_finite = &scalars_->found_non_finite,
      .ranges = update.ranges,
      .whole_param = !states_->params().sharded(),
      .whole_grad = !states_->grads().sharded(),
      .stochastic_rounding = options_.stochastic_rounding,
      .rounding_key = input.rounding_key,
      .first_element = update.first_element};
  for (const FlatState& array : states_->optimizer()) {
    view.arrays.push_back(array.Held(unit).As<float>());
  }
  view.parts = update.norms;
  return view;
}

// Every rank measures its own pieces of a parameter, also where it has all of
// it: two numbers per parameter, gathered and added in rank order, so that the
// ratios have the same bits at every stage.
void Updater::Moments(const StepInput& input) {
  if (updates_.num_tensors == 0) return;  // all of them are frozen
  const int64_t row = 2 * updates_.num_tensors;
  const Tensor totals = tensor_sums_.Slice(0, {row});
  const Tensor ranks = tensor_sums_.Slice(row, {plan_->world * row});
  const Tensor slots =
      tensor_sums_.Slice((1 + plan_->world) * row, {2 * updates_.num_slots});
  ops_->Fill(*compute_, {tensor_sums_.vector(), 0});
  for (int u = 0; u < static_cast<int>(updates_.units.size()); ++u) {
    if (updates_.units[u].ranges.empty()) continue;
    const View view = ViewOf(u, input);
    OptimizerMoments(*ops_, *compute_, options_.optimizer, view.state,
                     view.arrays, OptionsOf(input),
                     {view.parts, slots.As<double>()});
  }
  if (CountsPieces()) {
    AddRows(slots.Slice(0, {updates_.max_ranges * row}),
            ranks.Slice(rank_->rank() * row, {row}));
  }
  numbers_->Gather("tensor norms", {ranks});
  AddRows(ranks, totals);
}

// dst [n] = row 0 + row 1 + ... of rows [k * n], in that order.
void Updater::AddRows(const Tensor& rows, const Tensor& dst) {
  const int64_t n = dst.num_elems();
  std::vector<const void*> src;
  for (int64_t begin = 0; begin < rows.num_elems(); begin += n) {
    src.push_back(rows.Slice(begin, {n}).data());
  }
  ops_->SumRanks(*compute_,
                 {.src = src, .src_dtype = DType::kF64, .dst = dst.vector()});
}

void Updater::Update(int unit, const StepInput& input) {
  if (updates_.units[unit].ranges.empty()) return;
  const View view = ViewOf(unit, input);
  double* const totals =
      tensor_sums_.defined() ? tensor_sums_.As<double>() : nullptr;
  OptimizerStep(*ops_, *compute_, options_.optimizer, view.state, view.arrays,
                OptionsOf(input), {view.parts, totals});
}

}  // namespace zero
