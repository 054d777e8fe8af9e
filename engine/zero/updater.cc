#include "engine/zero/updater.h"

#include <utility>

#include "optim/optimizer.h"

namespace zero {
namespace {

OptimizerStepOptions OptionsOf(const StepInput& input) {
  return {.lr = input.lr, .beta1 = input.beta1, .step = input.optimizer_step};
}

}  // namespace

// A UnitUpdate in the optimizer's form.
struct Updater::View {
  UpdateState state;
  std::vector<float*> arrays;
  absl::Span<const TensorPart> parts;
};

Updater::Updater(const Rank& rank, const Plan& plan, const ModelStates& states,
                 RankNumbers& numbers, Stream& compute, Stream* host,
                 const ExecutorOptions& options)
    : rank_(&rank),
      ops_(&rank.device->ops()),
      plan_(&plan),
      states_(&states),
      numbers_(&numbers),
      compute_(&compute),
      host_(host),
      options_(options),
      updates_(MakeUpdatePlan(
          plan, rank.rank(),
          {.weight_decay = static_cast<float>(options.optimizer.weight_decay),
           .decay_all = options.decay_all,
           .tensor_norms = options.optimizer.needs_tensor_norms()})),
      pieces_(plan.units.size()) {
  const auto local = [&](int64_t elems) {
    return plan.StateElems(elems, plan.placement.optimizer, rank.rank());
  };
  for (int u = 0; u < static_cast<int>(plan.units.size()); ++u) {
    const PlannedUnit& unit = plan.units[u];
    std::vector<Segment> pieces = unit.phases;
    if (plan.UpdatesFromDisk(u)) {
      pieces.assign(unit.segments.begin(),
                    unit.segments.begin() + unit.num_trained_segments);
    } else if (plan.UpdatesOnHost(u)) {
      pieces = {{0, unit.trained_elems}};
    }
    for (const Segment& piece : pieces) {
      const int64_t begin = local(piece.begin), end = local(piece.end());
      pieces_[u].push_back(
          {{begin, end - begin}, UpdateWithin(updates_.units[u], begin, end)});
    }
  }
}

void Updater::Take(const HomeArenas& arenas) {
  const auto take = [&](Home home, int64_t elems, DType dtype = DType::kF64) {
    return Tensor::Empty(*arenas[static_cast<int>(home)], {elems}, dtype,
                         MemoryCategory::kInputs);
  };
  const auto take_numbers = [&](Home home, Numbers* numbers) {
    numbers->squares = take(home, plan_->num_trained_segments);
    if (updates_.num_slots == 0) return;
    numbers->totals = take(home, 2 * updates_.num_tensors);
    numbers->slots = take(home, 2 * updates_.num_slots);
  };
  take_numbers(Home::kDevice, &on_device_);
  rank_squares_ = take(Home::kDevice, plan_->world);
  rank_losses_ = take(Home::kDevice, plan_->world);
  if (updates_.num_slots > 0) {
    rank_totals_ = take(Home::kDevice, plan_->world * 2 * updates_.num_tensors);
  }
  if (host_ == nullptr) return;
  take_numbers(Home::kHost, &on_host_);
  host_scalars_ = take(Home::kHost, sizeof(StepScalars), DType::kU8);
  on_host_.scalars = reinterpret_cast<StepScalars*>(host_scalars_.data());
  if (updates_.num_slots == 0) return;
  host_slots_ =
      take(Home::kDevice, updates_.max_ranges * 2 * updates_.num_tensors);
}

template <typename Work>
void Updater::Run(bool on_host, Work work) {
  if (!on_host) return work(*ops_, *compute_);
  EnqueueOnHost(*rank_->device, *host_, std::move(work));
}

// ---- The norm ---------------------------------------------------------------

std::vector<SquaredSpan> Updater::SpansOf(int unit) const {
  const PlannedUnit& planned = plan_->units[unit];
  double* const squares = NumbersOf(unit).squares.As<double>();
  std::vector<SquaredSpan> spans;
  for (int s = 0; s < planned.num_trained_segments; ++s) {
    spans.push_back(
        {.src = states_->reduced_grads(unit).Shard({unit, s}).vector(),
         .out = squares + planned.first_trained_segment + s});
  }
  return spans;
}

void Updater::SumSquares(int unit) {
  Run(plan_->UpdatesOnHost(unit),
      [spans = SpansOf(unit)](Ops& ops, Stream& stream) {
        ops.SumSquares(stream, {.spans = spans});
      });
}

// Every rank sums the squares of its own shards in segment order into one
// number, even if it has all of them. The numbers are gathered and added in
// rank order: the same bits at every stage, and 16 bytes per rank. Other groups
// have the same shards: only the first group's count.
//
// The squares take a pass of their own over the shards. In fp32 with AdamW it
// reads 4 of the 32 bytes per parameter that the end of a step moves: 0.4 to
// 1.6 % of a step of GPT-2 124M on 2 cores, less with more ranks or tokens. The
// last sum over ranks could compute them, but a single rank has no such sum,
// and NCCL's cannot be extended.
void Updater::Norm(const StepInput& input, StepScalars* scalars) {
  on_device_.scalars = scalars;
  const int64_t world = plan_->world, rank = rank_->rank();
  Device& device = *rank_->device;
  const Tensor& of_shards = on_device_.squares;
  if (any_on_host()) {
    device.Copy(*compute_, of_shards.data(), on_host_.squares.data(),
                of_shards.bytes());
  }
  std::vector<SquaredSpan> spans;
  for (int u = 0; u < static_cast<int>(plan_->units.size()); ++u) {
    if (plan_->UpdatesOnHost(u)) continue;
    for (const SquaredSpan& span : SpansOf(u)) spans.push_back(span);
  }
  if (!spans.empty()) ops_->SumSquares(*compute_, {.spans = spans});
  double* const squares = rank_squares_.As<double>();
  double* const losses = rank_losses_.As<double>();
  ops_->Sum(*compute_,
            {.src = of_shards.As<double>(),
             .size = CountsShards() ? plan_->num_trained_segments : 0,
             .out = squares + rank});
  device.Copy(*compute_, losses + rank, &scalars->loss_sum, sizeof(double));
  numbers_->Gather(kStepCollective, {rank_squares_, rank_losses_});
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
  if (any_on_host()) {
    device.Copy(*compute_, on_host_.scalars, scalars, sizeof(StepScalars));
  }
  if (updates_.num_slots == 0) return;
  // Sums of the first pass begin as zeros.
  for (const Numbers* numbers : {&on_device_, &on_host_}) {
    if (!numbers->slots.defined()) continue;
    Run(numbers == &on_host_,
        [slots = numbers->slots.vector()](Ops& ops, Stream& stream) {
          ops.Fill(stream, {slots, 0});
        });
  }
}

// ---- The optimizer ----------------------------------------------------------

std::vector<const Updater::Piece*> Updater::PiecesOf(int unit,
                                                     int segment) const {
  const bool by_segment = plan_->UpdatesFromDisk(unit);
  std::vector<const Piece*> pieces;
  for (int p = 0; p < static_cast<int>(pieces_[unit].size()); ++p) {
    const Piece& piece = pieces_[unit][p];
    if (by_segment && p != segment) continue;
    if (!piece.update.ranges.empty()) pieces.push_back(&piece);
  }
  return pieces;
}

Updater::View Updater::ViewOf(int unit, int segment, const Piece& piece,
                              const StepInput& input) const {
  const bool by_segment = plan_->UpdatesFromDisk(unit);
  const UnitUpdate& update = piece.update;
  const FlatState& params = states_->updated_params(unit);
  const FlatState& grads = states_->reduced_grads(unit);
  const FlatState& master = states_->master();
  // Before the norm, gradients are taken as they are.
  const bool has_norm =
      !options_.update_before_norm || !plan_->UpdatesOnHost(unit);
  const StepScalars* const scalars =
      has_norm ? NumbersOf(unit).scalars : nullptr;
  const auto part = [&](const FlatState& state) {
    if (by_segment) return state.Shard({unit, segment});
    return state.sharded() ? state.Local(unit, piece.local) : state.Local(unit);
  };
  View view;
  view.state = {
      .param = part(params).vector(),
      .master = master.defined() ? part(master).vector() : Vector(),
      .grad = part(grads).vector(),
      .grad_scale = has_norm ? &scalars->grad_scale : nullptr,
      .found_non_finite = has_norm ? &scalars->found_non_finite : nullptr,
      .ranges = update.ranges,
      .whole_param = !by_segment && !params.sharded(),
      .whole_grad = !by_segment && !grads.sharded(),
      .stochastic_rounding = options_.stochastic_rounding,
      .rounding_key = input.rounding_key,
      .first_element = update.first_element};
  for (const FlatState& array : states_->optimizer()) {
    view.arrays.push_back(part(array).As<float>());
  }
  view.parts = update.norms;
  return view;
}

void Updater::Moments(int unit, int segment, const StepInput& input) {
  for (const Piece* piece : PiecesOf(unit, segment)) {
    Run(plan_->UpdatesOnHost(unit),
        [view = ViewOf(unit, segment, *piece, input),
         options = OptionsOf(input), spec = &options_.optimizer,
         slots = NumbersOf(unit).slots.As<double>()](Ops& ops, Stream& stream) {
          OptimizerMoments(ops, stream, *spec, view.state, view.arrays, options,
                           {view.parts, slots});
        });
  }
}

// Every rank measures its own shards of a parameter, even if it has all of it:
// two numbers per parameter, gathered and added in rank order, so that the
// ratios have the same bits at every stage.
void Updater::TensorNorms() {
  if (updates_.num_tensors == 0) return;  // all of them are frozen
  Device& device = *rank_->device;
  const int64_t row = 2 * updates_.num_tensors;
  const Tensor own = rank_totals_.Slice(rank_->rank() * row, {row});
  ops_->Fill(*compute_, {own.vector(), 0});
  if (CountsShards()) {
    // Each tensor is measured in one memory; its sums in the other are zero.
    std::vector<Tensor> slots = {
        on_device_.slots.Slice(0, {updates_.max_ranges * row})};
    if (any_on_host()) {
      device.Copy(*compute_, host_slots_.data(), on_host_.slots.data(),
                  host_slots_.bytes());
      slots.push_back(host_slots_);
    }
    AddRows(slots, own);
  }
  numbers_->Gather("tensor norms", {rank_totals_});
  AddRows({rank_totals_}, on_device_.totals);
  if (!any_on_host()) return;
  device.Copy(*compute_, on_host_.totals.data(), on_device_.totals.data(),
              on_host_.totals.bytes());
}

// dst [n] = row 0 + row 1 + ... of rows [k * n], of one tensor after the other.
void Updater::AddRows(const std::vector<Tensor>& rows, const Tensor& dst) {
  const int64_t n = dst.num_elems();
  std::vector<const void*> src;
  for (const Tensor& some : rows) {
    for (int64_t begin = 0; begin < some.num_elems(); begin += n) {
      src.push_back(some.Slice(begin, {n}).data());
    }
  }
  ops_->SumRanks(*compute_,
                 {.src = src, .src_dtype = DType::kF64, .dst = dst.vector()});
}

void Updater::Update(int unit, int segment, const StepInput& input) {
  const Tensor& totals = NumbersOf(unit).totals;
  for (const Piece* piece : PiecesOf(unit, segment)) {
    Run(plan_->UpdatesOnHost(unit),
        [view = ViewOf(unit, segment, *piece, input),
         options = OptionsOf(input), spec = &options_.optimizer,
         totals = totals.defined() ? totals.As<double>() : nullptr](
            Ops& ops, Stream& stream) {
          OptimizerStep(ops, stream, *spec, view.state, view.arrays, options,
                        {view.parts, totals});
        });
  }
}

}  // namespace zero
