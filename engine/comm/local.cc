#include "engine/comm/local.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <numeric>
#include <stdexcept>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "engine/comm/channel.h"
#include "engine/comm/exchange.h"
#include "engine/comm/progress.h"
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
  CollectiveMark mark;
  Stream* stream;
  // Null where the work of a stream is done when the call is: the CPU's.
  std::shared_ptr<Marks> marks;
};

// One rank's end of a channel.
struct LocalGroup::End {
  bool connected = false;
  bool left = false;
  int64_t received_bytes = 0;
  ChannelProgress progress;
  std::shared_ptr<const Call> begun;  // the last one
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
    LocalGroup::Lock lock(group_->mutex_);
    return channel_->ends[rank()].received_bytes;
  }

 private:
  const std::shared_ptr<LocalGroup> group_;
  LocalGroup::Channel* const channel_;
  std::shared_ptr<LocalGroup::Marks> marks_;
};

LocalGroup::LocalGroup(int world, LocalOptions options)
    : world_(world), timeout_(options.timeout), algorithm_(options.algorithm) {
  ZERO_CHECK_GE(world, 1) << "local: world";
  ZERO_CHECK(timeout_ > absl::ZeroDuration())
      << "local: timeout " << absl::FormatDuration(timeout_);
}

LocalGroup::~LocalGroup() = default;

std::shared_ptr<LocalGroup> LocalGroup::Make(int world, LocalOptions options) {
  return std::shared_ptr<LocalGroup>(new LocalGroup(world, options));
}

std::unique_ptr<Communicator> LocalGroup::Connect(int rank,
                                                  const std::string& channel,
                                                  std::vector<int> members) {
  if (members.empty()) {
    members.resize(world_);
    std::iota(members.begin(), members.end(), 0);
  }
  const std::string name = ChannelText(channel, members, world_);
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
    for (End& end : slot->ends) end.progress.channel = name;
    slot->open.resize(members.size());
    slot->members = std::move(members);
  }
  const auto found =
      std::find(slot->members.begin(), slot->members.end(), rank);
  ZERO_CHECK(found != slot->members.end())
      << "local: rank " << rank << " is no member of channel \"" << name
      << "\"";
  const int place = static_cast<int>(found - slot->members.begin());
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
  call->mark.signature = Signature(collective);
  call->collective = std::move(collective);
  call->stream = &stream;
  call->marks = std::move(marks);
  Lock lock(mutex_);
  CollectiveMark& issued = channel.ends[place].progress.issued;
  call->mark.number = issued.number + 1;
  issued = call->mark;
  return call;
}

void LocalGroup::Perform(Channel& channel, int place,
                         const std::shared_ptr<const Call>& call) {
  Stream& stream = *call->stream;
  Marks* const marks = call->marks.get();
  if (marks != nullptr) stream.Record(*marks->arrived);
  if (!Open(channel, place, call)) return;
  const auto others = channel.MarksBeside(place);
  size_t meeting = 0;
  const auto meet = [&] {
    if (marks != nullptr) stream.Record(*marks->met[meeting]);
    Meet(channel, place);
    for (const auto& other : others) stream.Wait(*other->met[meeting]);
    ++meeting;
  };
  int64_t read_bytes = 0;
  try {
    for (const auto& other : others) stream.Wait(*other->arrived);
    read_bytes = Exchange(stream, place, channel.open, meet);
    if (marks != nullptr) stream.Record(*marks->done);
  } catch (const std::exception& error) {
    Break(channel, place, error.what());
    Close(channel, place, 0);
    throw std::runtime_error(std::string(status().message()));
  }
  Close(channel, place, read_bytes);
  // Also after a failure: this rank frees what the others still read.
  for (const auto& other : others) stream.Wait(*other->done);
}

void LocalGroup::Break(Channel& channel, int place, const std::string& reason) {
  Lock lock(mutex_);
  channel.broken = true;
  Fail(absl::InternalError(absl::StrCat(
      "local: rank ", channel.members[place], " failed in ",
      channel.ends[place].begun->mark.TextIn(channel.name), ": ", reason)));
  channel.changed.notify_all();
}

bool LocalGroup::Open(Channel& channel, int place,
                      const std::shared_ptr<const Call>& call) {
  Lock lock(mutex_);
  if (!failure_.ok()) return false;
  ChannelProgress& own = channel.ends[place].progress;
  if (own.inside.number > 0 || own.finished.number + 1 != call->mark.number) {
    Fail(absl::FailedPreconditionError(absl::StrCat(
        "local: rank ", channel.members[place], " performs ",
        call->mark.TextIn(channel.name), ", but #", own.finished.number + 1,
        " is not finished: order the streams of one channel by events")));
    return false;
  }
  own.inside = call->mark;
  channel.ends[place].begun = call;
  channel.open[place] = &call->collective;
  if (++channel.num_arrived == channel.size()) {
    channel.num_arrived = 0;
    for (const End& one : channel.ends) {
      if (one.progress.inside.signature == own.inside.signature) continue;
      FailLate(channel, place);
      return false;
    }
    if (channel.num_opened == 0) Fail(Unreachable(channel));
    if (!failure_.ok()) return false;
    for (End& one : channel.ends) one.progress.works = true;
    channel.num_working = channel.size();
    ++channel.num_opened;
    channel.changed.notify_all();
    return true;
  }
  FailIfGone(channel);
  const auto opened = [&] { return channel.num_opened >= call->mark.number; };
  Await(lock, channel, place, [&] { return opened() || !failure_.ok(); });
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
    for (End& one : channel.ends) one.progress.works = true;
    channel.changed.notify_all();
    return;
  }
  channel.ends[place].progress.works = false;
  Await(lock, channel, place, [&, before = channel.num_meetings] {
    return channel.num_meetings > before || channel.broken;
  });
}

void LocalGroup::Close(Channel& channel, int place, int64_t read_bytes) {
  Lock lock(mutex_);
  End& end = channel.ends[place];
  end.received_bytes += read_bytes;
  end.progress.works = false;
  if (--channel.num_working == 0) channel.changed.notify_all();
  // Even a failure lets nobody go while its memory is read.
  Await(lock, channel, place, [&] { return channel.num_working == 0; });
  end.progress.finished = std::exchange(end.progress.inside, {});
}

template <class Condition>
void LocalGroup::Await(Lock& lock, Channel& channel, int place,
                       const Condition& condition) {
  if (channel.changed.wait_for(lock, absl::ToChronoNanoseconds(timeout_),
                               condition)) {
    return;
  }
  FailLate(channel, place);
  channel.changed.wait(lock, condition);
}

void LocalGroup::Fail(const absl::Status& status) {
  if (!failure_.ok() || status.ok()) return;
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

std::vector<int> LocalGroup::missing() const {
  Lock lock(mutex_);
  return missing_;
}

void LocalGroup::Leave(Channel& channel, int place) {
  Lock lock(mutex_);
  channel.ends[place].left = true;
  FailIfGone(channel);
}

// The ranks that have arrived wait for #num_opened + 1.
void LocalGroup::FailIfGone(const Channel& channel) {
  for (int place = 0; channel.num_arrived > 0 && place < channel.size();
       ++place) {
    const End& end = channel.ends[place];
    if (!end.left || end.progress.issued.number > channel.num_opened) continue;
    for (const End& one : channel.ends) {
      const CollectiveMark& inside = one.progress.inside;
      if (inside.number <= channel.num_opened) continue;
      return Fail(absl::UnavailableError(
          absl::StrCat("local: rank ", channel.members[place], " left before ",
                       inside.TextIn(channel.name), ", having issued ",
                       end.progress.issued.number, " collectives there")));
    }
  }
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

void LocalGroup::FailLate(const Channel& channel, int place) {
  if (!failure_.ok()) return;
  RanksProgress told;
  for (const auto& [name, one] : channels_) {
    for (int there = 0; there < one->size(); ++there) {
      told[name][one->members[there]] = one->ends[there].progress;
    }
  }
  Diagnosis found = Diagnose({.backend = "local",
                              .rank = channel.members[place],
                              .channel = channel.name,
                              .members = channel.members,
                              .call = channel.ends[place].progress.inside,
                              .timeout = timeout_},
                             told);
  missing_ = std::move(found.missing);
  Fail(found.status);
}

}  // namespace zero
