// The contract that models sign: parameters, units, and nothing else.
//
// A model is an ordered list of units (embedding, blocks, head). A unit is
// `Forward(ctx, in) -> out`; only that tensor passes from unit to unit. Models
// are single-device code: engine/zero decides who owns a parameter, when it is
// gathered and where its gradient goes. Start reading at Unit;
// models/gpt/gpt.cc is an example.
#ifndef ZERO_ENGINE_NN_MODULE_H_
#define ZERO_ENGINE_NN_MODULE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "engine/autograd/context.h"
#include "engine/autograd/tape.h"

namespace zero {

// How a parameter starts: normal with `std` around 0, or a constant.
struct Init {
  float std = 0;    // 0: constant
  float value = 0;  // the constant
};

struct Parameter {
  std::string name;    // unique in the model, stable in checkpoints
  Shape shape;         // logical: in files and counts
  Shape stored_shape;  // `shape` plus rows that stay zero
  Init init;
  bool decay = false;   // weight decay applies (matrices, embeddings)
  bool frozen = false;  // no gradient, no optimizer state
  // A vocabulary table [V, C]. Units read it only by the ops of tables.
  bool vocabulary = false;
  // Its unit reads rows of it, by the batch's tokens. Others may borrow it.
  bool looked_up = false;
  int phase = 0;  // of its unit, see Unit::BeginPhase

  // Bound by the executor: the gathered value and where the gradient goes. For
  // a vocabulary, `part_rows` rows are one part (0: all). If `parts` are bound
  // instead of `weight`, units run once for each, with that part in place:
  // Context::part.
  Weight weight;
  int64_t part_rows = 0;
  std::vector<Weight> parts;
};

class Unit {
 public:
  explicit Unit(std::string name) : name_(std::move(name)) {}
  virtual ~Unit() = default;

  // The last unit (head) computes the loss of ctx.batch into
  // *batch.loss_sum and returns an undefined Var; the first ignores `in`.
  virtual Var Forward(Context& ctx, const Var& in) = 0;

  // False if backward reads no parameter of the unit (an embedding's): it is
  // then not gathered for backward.
  virtual bool BackwardReadsParameters() const { return true; }

  // Returns the logits [M, V] of the rows of `in` [M, C]; only the last unit
  // has them. In parts, returns `in` for the next part's call, and from the
  // last part the logits; M is then 1.
  virtual Var Logits(Context& ctx, const Var& in);

  const std::string& name() const { return name_; }
  // Parameters that live in this unit's flat buffer, in order.
  const std::vector<std::unique_ptr<Parameter>>& parameters() const {
    return parameters_;
  }
  // Parameters of other units that this one reads (tied weights).
  const std::vector<Parameter*>& borrowed() const { return borrowed_; }

 protected:
  // Adds a parameter; its name is "<unit>.<name>".
  Parameter* AddParameter(const std::string& name, const Shape& shape,
                          Init init, bool decay);
  // Adds a table with a row for each token. It is stored in whole tiles of
  // rows: products over 50,257 rows are slower than over 50,304.
  Parameter* AddVocabulary(const std::string& name, const Shape& shape,
                           Init init);
  void Borrow(Parameter* parameter) { borrowed_.push_back(parameter); }
  // Forward reads parameters added from here on after earlier ones. So backward
  // writes these gradients first; they are reduced and their memory is reused
  // before the unit's other gradients exist.
  void BeginPhase() { ++phase_; }

 private:
  std::string name_;
  int phase_ = 0;
  std::vector<std::unique_ptr<Parameter>> parameters_;
  std::vector<Parameter*> borrowed_;
};

// A tensor of a Hugging Face checkpoint: rows [row_begin, row_begin + rows) of
// a parameter, transposed if `transpose` is set (GPT-2's Conv1D).
struct PortableTensor {
  std::string name;
  Parameter* parameter = nullptr;
  int64_t row_begin = 0;
  Shape shape;  // as in the file
  bool transpose = false;
};

class Model {
 public:
  virtual ~Model() = default;

  const std::vector<std::unique_ptr<Unit>>& units() const { return units_; }
  std::vector<Parameter*> AllParameters() const;
  int64_t NumParameters() const;

  // Builds the tables that units read (rotary) in `arena`, once, before the
  // first forward. Positions 0 .. num_positions - 1 may occur.
  virtual void Prepare(Arena& arena, Stream& stream, int64_t num_positions) = 0;
  // Frees these tables, before their arena.
  virtual void DropTables() = 0;
  // The arena bytes that Prepare takes.
  virtual int64_t TableBytes(int64_t num_positions) const = 0;

  // Columns of Unit::Logits.
  virtual int64_t vocab_size() const = 0;

  // Names and layout of the family's Hugging Face checkpoint.
  virtual std::vector<PortableTensor> PortableTensors() const = 0;

  // Keys and values for `batch` sequences of up to `capacity` tokens.
  virtual KvCache MakeKvCache(Context& ctx, int64_t batch, int64_t capacity,
                              DType dtype) const = 0;

 protected:
  template <typename U, typename... Args>
  U* AddUnit(Args&&... args) {
    auto unit = std::make_unique<U>(std::forward<Args>(args)...);
    U* raw = unit.get();
    units_.push_back(std::move(unit));
    return raw;
  }

 private:
  std::vector<std::unique_ptr<Unit>> units_;
};

// Fills `out` with elements [begin, begin + count) of a parameter's initial
// value: a pure function of (seed, parameter name, element index), so it is the
// same for any world size and stage. Normal values by Box-Muller from Philox.
void InitialValues(const Parameter& parameter, uint64_t seed, int64_t begin,
                   int64_t count, float* out);

}  // namespace zero

#endif  // ZERO_ENGINE_NN_MODULE_H_
