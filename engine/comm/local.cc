#include "engine/comm/local.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "engine/comm/exchange.h"
#include "engine/comm/signature.h"
#include "kernels/check.h"

namespace zero {
namespace {

// Far, and not beyond what the system's clock can count.
constexpr absl::Duration kLongest = absl::Hours(24 * 365);

}  // namespace

// One collective as one rank issued it.
struct LocalGroup::Call {
  Collective collective;
  std::string signature;
  int64_t number;  // of its channel, from 1
  Stream* stream;

  std::string Text() const {
    return absl::StrCat("#", number, ", ", signature);
  }
};

// One rank's end of a channel.
struct LocalGroup::End {
  bool connected = false;
  bool left = false;
  int64_t num_issued = 0;
  int64_t num_finished = 0;
  bool inside = false;                 // one more has begun
  bool working = false;                // and does its share
  std::shared_ptr<const Call> issued;  // the last one
  std::shared_ptr<const Call> begun;   // the last one
};

// All ranks arrive at a collective (num_arrived counts to world), do their
// shares (num_working counts to 0) and only then begin the next: neither count
// can be one collective ahead of a rank that has yet to read it.
struct LocalGroup::Channel {
  std::string name;
  std::vector<End> ends;                // [world]
  std::vector<const Collective*> open;  // [world], what the ranks are in
  int num_arrived = 0;
  int num_working = 0;
  int64_t num_opened = 0;
  std::condition_variable changed;

  std::string Text(const Call& call) const {
    return absl::StrCat("#", call.number, " of channel \"", name, "\", ",
                        call.signature);
  }
};

class LocalCommunicator final : public Communicator {
 public:
  LocalCommunicator(std::shared_ptr<LocalGroup> group,
                    LocalGroup::Channel* channel, int rank)
      : Communicator(rank, group->world()),
        group_(std::move(group)),
        channel_(channel) {}

  ~LocalCommunicator() override { group_->Leave(*channel_, rank()); }

  void Run(Stream& stream, Collective collective) override {
    ZERO_CHECK(stream.device().kind() == DeviceKind::kCpu)
        << "local: a stream of the " << DeviceKindName(stream.device().kind())
        << " device, want the CPU's: these ranks share host memory";
    auto call = group_->Issue(*channel_, rank(), stream, std::move(collective));
    // The group outlives this end while its work is still queued.
    stream.Enqueue(
        [group = group_, channel = channel_, rank = rank(),
         call = std::move(call)] { group->Perform(*channel, rank, call); });
  }

  void Abort(const absl::Status& status) override {
    group_->Abort(rank(), status);
  }
  absl::Status status() const override { return group_->status(); }

 private:
  const std::shared_ptr<LocalGroup> group_;
  LocalGroup::Channel* const channel_;
};

LocalGroup::LocalGroup(int world, LocalOptions options)
    : world_(world), timeout_(std::min(options.timeout, kLongest)) {
  ZERO_CHECK_GE(world, 1) << "local: world";
  ZERO_CHECK(timeout_ > absl::ZeroDuration())
      << "local: timeout " << absl::FormatDuration(timeout_);
}

LocalGroup::~LocalGroup() = default;

std::shared_ptr<LocalGroup> LocalGroup::Make(int world, LocalOptions options) {
  return std::shared_ptr<LocalGroup>(new LocalGroup(world, options));
}

std::unique_ptr<Communicator> LocalGroup::Connect(int rank,
                                                  const std::string& name) {
  ZERO_CHECK(rank >= 0 && rank < world_)
      << "local: rank " << rank << " is not in [0, " << world_ << ")";
  Lock lock(mutex_);
  std::unique_ptr<Channel>& channel = channels_[name];
  if (channel == nullptr) {
    channel = std::make_unique<Channel>();
    channel->name = name;
    channel->ends.resize(world_);
    channel->open.resize(world_);
  }
  End& end = channel->ends[rank];
  ZERO_CHECK(!end.connected) << "local: rank " << rank
                             << " connects to channel \"" << name << "\" twice";
  end.connected = true;
  return std::make_unique<LocalCommunicator>(shared_from_this(), channel.get(),
                                             rank);
}

std::shared_ptr<const LocalGroup::Call> LocalGroup::Issue(
    Channel& channel, int rank, Stream& stream, Collective collective) {
  auto call = std::make_shared<Call>();
  call->signature = Signature(collective);
  call->collective = std::move(collective);
  call->stream = &stream;
  Lock lock(mutex_);
  End& end = channel.ends[rank];
  call->number = ++end.num_issued;
  end.issued = call;
  return call;
}

void LocalGroup::Perform(Channel& channel, int rank,
                         const std::shared_ptr<const Call>& call) {
  if (!Open(channel, rank, call)) return;
  const std::vector<char> result = Exchange(*call->stream, rank, channel.open);
  if (!Close(channel, rank) || result.empty()) return;
  std::memcpy(call->collective.segments[0].recv, result.data(), result.size());
}

bool LocalGroup::Open(Channel& channel, int rank,
                      const std::shared_ptr<const Call>& call) {
  Lock lock(mutex_);
  if (!failure_.ok()) return false;
  End& end = channel.ends[rank];
  if (end.inside || end.num_finished + 1 != call->number) {
    Fail(absl::FailedPreconditionError(absl::StrCat(
        "local: rank ", rank, " performs ", channel.Text(*call), ", but #",
        end.num_finished + 1,
        " is not finished: order the streams of one channel by events")));
    return false;
  }
  end.inside = true;
  end.begun = call;
  channel.open[rank] = &call->collective;
  if (++channel.num_arrived == world_) {
    channel.num_arrived = 0;
    if (const absl::Status status = Mismatch(channel); !status.ok()) {
      Fail(status);
      return false;
    }
    for (End& one : channel.ends) one.working = true;
    channel.num_working = world_;
    ++channel.num_opened;
    channel.changed.notify_all();
    return true;
  }
  for (int r = 0; r < world_; ++r) FailIfGone(channel, r);
  const auto opened = [&] { return channel.num_opened >= call->number; };
  if (!WaitUntil(lock, channel, [&] { return opened() || !failure_.ok(); })) {
    Fail(Missing(channel, *call));
  }
  // Opened, other ranks may be reading this one's memory: it must see the
  // collective to its end, whatever has failed meanwhile.
  return opened();
}

bool LocalGroup::Close(Channel& channel, int rank) {
  Lock lock(mutex_);
  channel.ends[rank].working = false;
  if (--channel.num_working == 0) channel.changed.notify_all();
  // Even a failure lets nobody go while its memory is read.
  const auto closed = [&] { return channel.num_working == 0; };
  if (!WaitUntil(lock, channel, closed)) {
    Fail(Missing(channel, *channel.ends[rank].begun));
    channel.changed.wait(lock, closed);
  }
  End& end = channel.ends[rank];
  end.inside = false;
  ++end.num_finished;
  return failure_.ok();
}

template <class Condition>
bool LocalGroup::WaitUntil(Lock& lock, Channel& channel,
                           const Condition& condition) {
  return channel.changed.wait_for(lock, absl::ToChronoNanoseconds(timeout_),
                                  condition);
}

void LocalGroup::Fail(const absl::Status& status) {
  if (!failure_.ok()) return;
  failure_ = status;
  for (auto& [name, channel] : channels_) channel->changed.notify_all();
}

void LocalGroup::Abort(int rank, const absl::Status& status) {
  ZERO_CHECK(!status.ok()) << "local: Abort with a status that is OK";
  Lock lock(mutex_);
  Fail(absl::Status(status.code(),
                    absl::StrCat("local: rank ", rank,
                                 " aborted the run: ", status.message())));
}

absl::Status LocalGroup::status() const {
  Lock lock(mutex_);
  return failure_;
}

void LocalGroup::Leave(Channel& channel, int rank) {
  Lock lock(mutex_);
  channel.ends[rank].left = true;
  if (channel.num_arrived > 0) FailIfGone(channel, rank);
}

// The ranks that have arrived wait for #num_opened + 1.
void LocalGroup::FailIfGone(const Channel& channel, int rank) {
  const End& end = channel.ends[rank];
  if (!end.left || end.num_issued > channel.num_opened) return;
  for (const End& one : channel.ends) {
    if (!one.inside || one.begun->number != channel.num_opened + 1) continue;
    return Fail(absl::UnavailableError(
        absl::StrCat("local: rank ", rank, " left before ",
                     channel.Text(*one.begun), "; ", LastSeen(channel, rank))));
  }
}

absl::Status LocalGroup::Mismatch(const Channel& channel) const {
  const Call& first = *channel.ends[0].begun;
  for (int rank = 1; rank < world_; ++rank) {
    const Call& other = *channel.ends[rank].begun;
    if (other.signature == first.signature) continue;
    return absl::FailedPreconditionError(absl::StrCat(
        "local: rank ", rank, " differs from rank 0 at #", first.number,
        " of channel \"", channel.name, "\": rank ", rank, " is in ",
        other.signature, ", rank 0 in ", first.signature));
  }
  return absl::OkStatus();
}

absl::Status LocalGroup::Missing(const Channel& channel,
                                 const Call& call) const {
  // Opened: then somebody arrived and does not end its share.
  const bool opened = channel.num_opened >= call.number;
  std::vector<int> missing;
  for (int rank = 0; rank < world_; ++rank) {
    const End& end = channel.ends[rank];
    const bool arrived = end.inside && end.begun->number == call.number;
    if (opened ? end.working : !arrived) missing.push_back(rank);
  }
  std::string text = absl::StrCat(
      "local: rank ", absl::StrJoin(missing, " and rank "), " did not ",
      opened ? "finish its share of " : "arrive at ", channel.Text(call),
      " within ", absl::FormatDuration(timeout_));
  for (const int rank : missing) {
    absl::StrAppend(&text, "; ", LastSeen(channel, rank));
  }
  return absl::DeadlineExceededError(text);
}

std::string LocalGroup::LastSeen(const Channel& channel, int rank) const {
  const End& end = channel.ends[rank];
  std::string text = absl::StrCat("rank ", rank);
  if (!end.connected) {
    absl::StrAppend(&text, " never connected to this channel");
  } else if (end.num_issued == 0) {
    absl::StrAppend(&text, " issued nothing here");
  } else {
    absl::StrAppend(&text, " issued ", end.issued->Text(), " last");
    if (end.begun == nullptr) {
      absl::StrAppend(&text, "; its stream has begun nothing here");
    } else {
      absl::StrAppend(&text, "; its stream ",
                      end.inside ? "is in " : "has finished ",
                      end.begun->Text());
    }
  }
  for (const auto& [name, other] : channels_) {
    const End& there = other->ends[rank];
    if (other.get() == &channel || !there.inside) continue;
    absl::StrAppend(&text, "; it is in ", other->Text(*there.begun));
  }
  return text;
}

}  // namespace zero
