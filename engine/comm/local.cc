#include "engine/comm/local.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <numeric>
#include <set>
#include <stdexcept>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "engine/base/status.h"
#include "engine/comm/exchange.h"
#include "engine/comm/peer_memory.h"
#include "engine/comm/signature.h"
#include "kernels/check.h"

namespace zero {

// Where the stream of one rank is in a collective: events for the streams of
// the others. Recorded again only in the next collective, which opens when all
// of them have been told to wait.
struct LocalGroup::Marks {
  Marks(Device& device, int world) : met(std::max(world - 2, 0)) {
    arrived = device.MakeEvent();
    done = device.MakeEvent();
    for (std::unique_ptr<Event>& event : met) event = device.MakeEvent();
  }
  std::unique_ptr<Event> arrived;           // what it sends is there
  std::unique_ptr<Event> done;              // it has read the others' memory
  std::vector<std::unique_ptr<Event>> met;  // in the middle of its share
};

// One collective as one rank issued it.
struct LocalGroup::Call {
  Collective collective;
  std::string signature;
  int64_t number;  // of its channel, from 1
  Stream* stream;
  // Null where the work of a stream is done when the call is: the CPU's.
  std::shared_ptr<Marks> marks;

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
  int64_t received_bytes = 0;
  bool inside = false;                 // one more has begun
  bool working = false;                // and does its share,
  bool meeting = false;                // or waits in the middle of it
  std::shared_ptr<const Call> issued;  // the last one
  std::shared_ptr<const Call> begun;   // the last one
};

// All members arrive at a collective (num_arrived counts to all), do their
// shares (num_working counts to 0) and only then begin the next: neither count
// can be one collective ahead of a rank that has yet to read it.
struct LocalGroup::Channel {
  std::string name;
  std::vector<int> members;             // the ranks, by their places
  std::vector<End> ends;                // by place
  std::vector<const Collective*> open;  // by place, what the ranks are in
  int num_arrived = 0;
  int num_working = 0;
  int num_meeting = 0;
  int64_t num_meetings = 0;
  int64_t num_opened = 0;
  bool broken = false;  // by a device: the group has failed
  std::condition_variable changed;

  std::string Text(const Call& call) const {
    return absl::StrCat("#", call.number, " of channel \"", name, "\", ",
                        call.signature);
  }
  // Where all have arrived, some are still doing their shares.
  bool HasOpened(const Call& call) const { return num_opened >= call.number; }
  // Places of those for whom `call` waits.
  std::vector<int> Awaited(const Call& call) const {
    std::vector<int> places;
    for (int place = 0; place < size(); ++place) {
      const End& end = ends[place];
      const bool arrived = end.inside && end.begun->number == call.number;
      const bool works = end.working && !end.meeting;
      if (HasOpened(call) ? works : !arrived) places.push_back(place);
    }
    return places;
  }
  // "rank 2 and rank 3".
  std::string RankNames(const std::vector<int>& places) const {
    std::vector<int> ranks;
    for (const int place : places) ranks.push_back(members[place]);
    return zero::RankNames(ranks);
  }
  int size() const { return static_cast<int>(members.size()); }
  // Those of the other ranks, on asynchronous devices.
  std::vector<std::shared_ptr<Marks>> MarksBeside(int place) const {
    std::vector<std::shared_ptr<Marks>> marks;
    for (int other = 0; other < size(); ++other) {
      if (other == place || ends[other].begun->marks == nullptr) continue;
      marks.push_back(ends[other].begun->marks);
    }
    return marks;
  }
  // -1: no member.
  int PlaceOf(int rank) const {
    const auto it = std::find(members.begin(), members.end(), rank);
    return it == members.end() ? -1 : static_cast<int>(it - members.begin());
  }
};

class LocalCommunicator final : public Communicator {
 public:
  LocalCommunicator(std::shared_ptr<LocalGroup> group,
                    LocalGroup::Channel* channel, int place)
      : Communicator(place, channel->size(), group->algorithm_),
        group_(std::move(group)),
        channel_(channel) {}

  ~LocalCommunicator() override { group_->Leave(*channel_, rank()); }

  void Run(Stream& stream, Collective collective) override {
    if (stream.device().asynchronous() && marks_ == nullptr) {
      marks_ = std::make_shared<LocalGroup::Marks>(stream.device(), world());
    }
    auto call =
        group_->Issue(*channel_, rank(), stream, std::move(collective), marks_);
    // The group outlives this end while its work is still queued.
    stream.Enqueue(
        [group = group_, channel = channel_, rank = rank(),
         call = std::move(call)] { group->Perform(*channel, rank, call); });
  }

  void Abort(const absl::Status& status) override {
    group_->Abort(channel_->members[rank()], status);
  }
  absl::Status status() const override { return group_->status(); }
  int64_t received_bytes() const override {
    return group_->ReceivedBytesOf(*channel_, rank());
  }

 private:
  const std::shared_ptr<LocalGroup> group_;
  LocalGroup::Channel* const channel_;
  std::shared_ptr<LocalGroup::Marks> marks_;
};

LocalGroup::LocalGroup(int world, LocalOptions options)
    : world_(world),
      timeout_(Countable(options.timeout)),
      algorithm_(options.algorithm) {
  ZERO_CHECK_GE(world, 1) << "local: world";
  ZERO_CHECK(timeout_ > absl::ZeroDuration())
      << "local: timeout " << absl::FormatDuration(timeout_);
}

LocalGroup::~LocalGroup() = default;

absl::Duration Countable(absl::Duration timeout) {
  return std::min(timeout, absl::Hours(24 * 365));
}

std::string RankNames(const std::vector<int>& ranks) {
  std::string text;
  for (size_t i = 0; i < ranks.size(); ++i) {
    const char* before = i == 0 ? "" : i + 1 < ranks.size() ? ", " : " and ";
    absl::StrAppend(&text, before, "rank ", ranks[i]);
  }
  return text;
}

std::shared_ptr<LocalGroup> LocalGroup::Make(int world, LocalOptions options) {
  return std::shared_ptr<LocalGroup>(new LocalGroup(world, options));
}

std::unique_ptr<Communicator> LocalGroup::Connect(int rank,
                                                  const std::string& channel,
                                                  std::vector<int> members) {
  std::vector<int> all(world_);
  std::iota(all.begin(), all.end(), 0);
  if (members.empty()) members = all;
  const std::string name =
      members == all
          ? channel
          : absl::StrCat(channel, " of ranks ", absl::StrJoin(members, ", "));
  Lock lock(mutex_);
  std::unique_ptr<Channel>& slot = channels_[name];
  if (slot == nullptr) {
    for (const int member : members) {
      ZERO_CHECK(member >= 0 && member < world_)
          << "local: rank " << member << " is not in [0, " << world_ << ")";
    }
    slot = std::make_unique<Channel>();
    slot->name = name;
    slot->ends.resize(members.size());
    slot->open.resize(members.size());
    slot->members = std::move(members);
  }
  const int place = slot->PlaceOf(rank);
  ZERO_CHECK_GE(place, 0) << "local: rank " << rank
                          << " is no member of channel \"" << name << "\"";
  End& end = slot->ends[place];
  ZERO_CHECK(!end.connected) << "local: rank " << rank
                             << " connects to channel \"" << name << "\" twice";
  end.connected = true;
  return std::make_unique<LocalCommunicator>(shared_from_this(), slot.get(),
                                             place);
}

std::shared_ptr<const LocalGroup::Call> LocalGroup::Issue(
    Channel& channel, int place, Stream& stream, Collective collective,
    std::shared_ptr<Marks> marks) {
  auto call = std::make_shared<Call>();
  call->signature = Signature(collective);
  call->collective = std::move(collective);
  call->stream = &stream;
  call->marks = std::move(marks);
  Lock lock(mutex_);
  End& end = channel.ends[place];
  call->number = ++end.num_issued;
  end.issued = call;
  return call;
}

void LocalGroup::Perform(Channel& channel, int place,
                         const std::shared_ptr<const Call>& call) {
  Stream& stream = *call->stream;
  if (call->marks != nullptr) stream.Record(*call->marks->arrived);
  if (!Open(channel, place, call)) return;
  const auto others = channel.MarksBeside(place);
  int64_t read_bytes = 0;
  try {
    read_bytes = Share(channel, place, *call, others);
  } catch (const std::exception& error) {
    const absl::Status failure = Break(channel, place, error.what());
    Close(channel, place, 0);
    throw std::runtime_error(std::string(failure.message()));
  }
  Close(channel, place, read_bytes);
  // Also after a failure: this rank frees what the others still read.
  for (const auto& other : others) stream.Wait(*other->done);
}

int64_t LocalGroup::Share(Channel& channel, int place, const Call& call,
                          const std::vector<std::shared_ptr<Marks>>& others) {
  Stream& stream = *call.stream;
  for (const auto& other : others) stream.Wait(*other->arrived);
  size_t meeting = 0;
  const auto meet = [&] {
    if (call.marks != nullptr) stream.Record(*call.marks->met[meeting]);
    Meet(channel, place);
    for (const auto& other : others) stream.Wait(*other->met[meeting]);
    ++meeting;
  };
  const int64_t read_bytes = Exchange(stream, place, channel.open, meet);
  if (call.marks != nullptr) stream.Record(*call.marks->done);
  return read_bytes;
}

absl::Status LocalGroup::Break(Channel& channel, int place,
                               const std::string& reason) {
  Lock lock(mutex_);
  channel.broken = true;
  Fail(absl::InternalError(
      absl::StrCat("local: rank ", channel.members[place], " failed in ",
                   channel.Text(*channel.ends[place].begun), ": ", reason)));
  channel.changed.notify_all();
  return failure_;
}

bool LocalGroup::Open(Channel& channel, int place,
                      const std::shared_ptr<const Call>& call) {
  Lock lock(mutex_);
  if (!failure_.ok()) return false;
  End& end = channel.ends[place];
  if (end.inside || end.num_finished + 1 != call->number) {
    Fail(absl::FailedPreconditionError(absl::StrCat(
        "local: rank ", channel.members[place], " performs ",
        channel.Text(*call), ", but #", end.num_finished + 1,
        " is not finished: order the streams of one channel by events")));
    return false;
  }
  end.inside = true;
  end.begun = call;
  channel.open[place] = &call->collective;
  if (++channel.num_arrived == channel.size()) {
    channel.num_arrived = 0;
    absl::Status status = Mismatch(channel);
    if (channel.num_opened == 0) status.Update(Unreachable(channel));
    if (!status.ok()) {
      Fail(status);
      return false;
    }
    for (End& one : channel.ends) one.working = true;
    channel.num_working = channel.size();
    ++channel.num_opened;
    channel.changed.notify_all();
    return true;
  }
  for (int other = 0; other < channel.size(); ++other) {
    FailIfGone(channel, other);
  }
  const auto opened = [&] { return channel.num_opened >= call->number; };
  if (!WaitUntil(lock, channel, [&] { return opened() || !failure_.ok(); })) {
    FailMissing(channel, *call);
  }
  // Opened, other ranks may be reading this one's memory: it must see the
  // collective to its end, whatever has failed meanwhile.
  return opened();
}

// Nobody leaves by a failure: others read what it has written so far.
void LocalGroup::Meet(Channel& channel, int place) {
  Lock lock(mutex_);
  if (++channel.num_meeting == channel.size()) {
    channel.num_meeting = 0;
    ++channel.num_meetings;
    for (End& one : channel.ends) one.meeting = false;
    channel.changed.notify_all();
    return;
  }
  channel.ends[place].meeting = true;
  const auto met = [&, before = channel.num_meetings] {
    return channel.num_meetings > before || channel.broken;
  };
  if (!WaitUntil(lock, channel, met)) {
    FailMissing(channel, *channel.ends[place].begun);
    channel.changed.wait(lock, met);
  }
}

void LocalGroup::Close(Channel& channel, int place, int64_t read_bytes) {
  Lock lock(mutex_);
  channel.ends[place].received_bytes += read_bytes;
  channel.ends[place].working = false;
  if (--channel.num_working == 0) channel.changed.notify_all();
  // Even a failure lets nobody go while its memory is read.
  const auto closed = [&] { return channel.num_working == 0; };
  if (!WaitUntil(lock, channel, closed)) {
    FailMissing(channel, *channel.ends[place].begun);
    channel.changed.wait(lock, closed);
  }
  End& end = channel.ends[place];
  end.inside = false;
  ++end.num_finished;
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

int64_t LocalGroup::ReceivedBytesOf(const Channel& channel, int place) const {
  Lock lock(mutex_);
  return channel.ends[place].received_bytes;
}

std::vector<int> LocalGroup::missing() const {
  Lock lock(mutex_);
  return missing_;
}

void LocalGroup::Leave(Channel& channel, int place) {
  Lock lock(mutex_);
  channel.ends[place].left = true;
  if (channel.num_arrived > 0) FailIfGone(channel, place);
}

// The ranks that have arrived wait for #num_opened + 1.
void LocalGroup::FailIfGone(const Channel& channel, int place) {
  const End& end = channel.ends[place];
  if (!end.left || end.num_issued > channel.num_opened) return;
  for (const End& one : channel.ends) {
    if (!one.inside || one.begun->number != channel.num_opened + 1) continue;
    return Fail(absl::UnavailableError(absl::StrCat(
        "local: rank ", channel.members[place], " left before ",
        channel.Text(*one.begun), "; ", LastSeen(channel, place))));
  }
}

absl::Status LocalGroup::Mismatch(const Channel& channel) const {
  const Call& first = *channel.ends[0].begun;
  const int first_rank = channel.members[0];
  for (int place = 1; place < channel.size(); ++place) {
    const Call& other = *channel.ends[place].begun;
    if (other.signature == first.signature) continue;
    const int rank = channel.members[place];
    return absl::FailedPreconditionError(
        absl::StrCat("local: rank ", rank, " differs from rank ", first_rank,
                     " at #", first.number, " of channel \"", channel.name,
                     "\": rank ", rank, " is in ", other.signature, ", rank ",
                     first_rank, " in ", first.signature));
  }
  return absl::OkStatus();
}

absl::Status LocalGroup::Unreachable(const Channel& channel) const {
  for (int place = 0; place < channel.size(); ++place) {
    for (int other = 0; other < channel.size(); ++other) {
      const Device& own = channel.ends[place].begun->stream->device();
      if (own.Reaches(channel.ends[other].begun->stream->device())) continue;
      return absl::FailedPreconditionError(absl::StrCat(
          "local: the device of rank ", channel.members[place],
          " can not read the memory of rank ", channel.members[other],
          "'s (no peer access); set communication.backend to \"nccl\", or use "
          "GPUs that are connected"));
    }
  }
  return absl::OkStatus();
}

void LocalGroup::FailMissing(const Channel& channel, const Call& call) {
  if (!failure_.ok()) return;
  std::string last_seen;
  std::vector<int> awaited;
  const std::vector<int> missing = channel.Awaited(call);
  for (const int place : missing) {
    awaited.push_back(channel.members[place]);
    absl::StrAppend(&last_seen, "; ", LastSeen(channel, place));
  }
  missing_ = Culprits(awaited);
  Fail(absl::DeadlineExceededError(absl::StrCat(
      "local: ", channel.RankNames(missing), " did not ",
      !channel.HasOpened(call) ? "arrive at "
      : missing.size() == 1    ? "finish its share of "
                               : "finish their shares of ",
      channel.Text(call), " within ", absl::FormatDuration(timeout_), last_seen,
      "; if a rank was only slow, raise communication.timeout_seconds")));
}

// The ranks for whom the streams of `rank` wait.
std::vector<int> LocalGroup::AwaitedBy(int rank) const {
  std::vector<int> ranks;
  for (const auto& [name, channel] : channels_) {
    const int place = channel->PlaceOf(rank);
    if (place < 0 || !channel->ends[place].inside) continue;
    for (const int other : channel->Awaited(*channel->ends[place].begun)) {
      if (other != place) ranks.push_back(channel->members[other]);
    }
  }
  return ranks;
}

// Behind `awaited`, who waits for nobody; `awaited` where all wait in a circle.
std::vector<int> LocalGroup::Culprits(const std::vector<int>& awaited) const {
  std::set<int> seen(awaited.begin(), awaited.end()), culprits;
  for (std::vector<int> next = awaited; !next.empty();) {
    const int rank = next.back();
    next.pop_back();
    const std::vector<int> behind = AwaitedBy(rank);
    if (behind.empty()) culprits.insert(rank);
    for (const int other : behind) {
      if (seen.insert(other).second) next.push_back(other);
    }
  }
  if (culprits.empty()) culprits.insert(awaited.begin(), awaited.end());
  return {culprits.begin(), culprits.end()};
}

std::string LocalGroup::LastSeen(const Channel& channel, int place) const {
  const End& end = channel.ends[place];
  const int rank = channel.members[place];
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
    const int there = other->PlaceOf(rank);
    if (other.get() == &channel || there < 0) continue;
    const End& its = other->ends[there];
    if (!its.inside) continue;
    absl::StrAppend(&text, "; it is in ", other->Text(*its.begun));
    const std::vector<int> awaited = other->Awaited(*its.begun);
    if (awaited.empty()) continue;
    absl::StrAppend(&text, ", and waits for ", other->RankNames(awaited));
  }
  return text;
}

}  // namespace zero
