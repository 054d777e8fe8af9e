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
#include "engine/comm/rounds.h"
#include "kernels/check.h"

namespace zero {
namespace {

using Clock = std::chrono::steady_clock;

}  // namespace

// The progress of one rank's stream in a collective: events for the streams of
// the others. Recorded again only in the next collective, which opens when all
// of them have enqueued their waits.
struct LocalGroup::Marks {
  Marks(Device& device, int world) : met(std::max(world - 2, 0)) {
    arrived = device.MakeEvent();
    done = device.MakeEvent();
    for (std::unique_ptr<Event>& event : met) event = device.MakeEvent();
  }
  std::unique_ptr<Event> arrived;           // its send data is ready
  std::unique_ptr<Event> done;              // it has read the others' memory
  std::vector<std::unique_ptr<Event>> met;  // in the middle of its share
};

// One collective as one rank issued it.
struct LocalGroup::Call {
  Collective collective;
  CollectiveMark mark;
  Stream* stream;
  // Null if a stream's work is done when the call returns (CPU).
  std::shared_ptr<Marks> marks;
};

// One rank's end of a channel.
struct LocalGroup::End {
  bool connected = false;
  bool left = false;
  int64_t received_bytes = 0;
  Clock::duration busy = {};     // with its shares,
  Clock::duration waiting = {};  // and for others meanwhile
  ChannelProgress progress;
  std::shared_ptr<const Call> begun;  // the last one
};

// The members of this process arrive at a collective (num_arrived counts to
// all of them), do their shares (num_working counts to 0) and only then begin
// the next: neither count can be one collective ahead of a rank that has not
// read it.
struct LocalGroup::Channel {
  std::string name;
  std::vector<int> members;    // the ranks, by index
  std::vector<int> processes;  // theirs; empty: all are of this one
  int first_here = 0;          // places of this process
  int num_here = 0;
  std::vector<End> ends;                // by place
  std::vector<const Collective*> open;  // by index: the ranks' current ones
  std::vector<int> hosts;               // theirs, for kHierarchical
  // Memory of two rounds, which take turns; see Rounds.
  std::vector<char> staging[2], outgoing[2];
  int num_arrived = 0;
  int num_working = 0;
  int num_meeting = 0;
  int64_t num_meetings = 0;
  int64_t num_opened = 0;
  bool broken = false;  // by a device or the network: the group has failed
  std::condition_variable changed;

  int size() const { return static_cast<int>(members.size()); }
  bool IsHere(int place) const {
    return place >= first_here && place < first_here + num_here;
  }
  // The marks of the other ranks, on asynchronous devices.
  std::vector<std::shared_ptr<Marks>> MarksBeside(int place) const {
    std::vector<std::shared_ptr<Marks>> marks;
    for (int other = 0; other < size(); ++other) {
      if (other == place || !IsHere(other)) continue;
      if (ends[other].begun->marks == nullptr) continue;
      marks.push_back(ends[other].begun->marks);
    }
    return marks;
  }
};

namespace {

// Waits for the work of a stream, or before an event. After a device fault
// nothing runs there any more, so there is nothing to wait for.
template <class StreamOrEvent>
void Drain(StreamOrEvent& work) {
  try {
    work.Synchronize();
  } catch (const std::exception&) {
  }
}

}  // namespace

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
  double busy_ms() const override {
    LocalGroup::Lock lock(group_->mutex_);
    return std::chrono::duration<double, std::milli>(
               channel_->ends[rank()].busy)
        .count();
  }

 private:
  const std::shared_ptr<LocalGroup> group_;
  LocalGroup::Channel* const channel_;
  std::shared_ptr<LocalGroup::Marks> marks_;
};

LocalGroup::LocalGroup(int world, LocalOptions options)
    : world_(world),
      timeout_(options.timeout),
      algorithm_(options.algorithm),
      ranks_per_host_(options.ranks_per_host > 0 ? options.ranks_per_host
                                                 : world),
      others_(std::move(options.others)) {
  const int processes =
      others_.network == nullptr ? 1 : others_.network->num_processes();
  ZERO_CHECK(world % processes == 0)
      << "local: " << world << " ranks on " << processes << " processes";
  ZERO_CHECK(processes == 1 || algorithm_ != BulkAlgorithm::kRing)
      << "local: a ring has one process";
  ZERO_CHECK(world % ranks_per_host_ == 0)
      << "local: " << world << " ranks on hosts of " << ranks_per_host_;
  ZERO_CHECK_GE(world, 1) << "local: world";
  ZERO_CHECK(timeout_ > absl::ZeroDuration())
      << "local: timeout " << absl::FormatDuration(timeout_);
}

LocalGroup::~LocalGroup() = default;

std::shared_ptr<LocalGroup> LocalGroup::Make(int world, LocalOptions options) {
  return std::shared_ptr<LocalGroup>(new LocalGroup(world, std::move(options)));
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
    slot->num_here = static_cast<int>(members.size());
    if (algorithm_ == BulkAlgorithm::kHierarchical) {
      for (const int member : members) {
        slot->hosts.push_back(member / ranks_per_host_);
      }
    }
    if (const Network* network = others_.network.get(); network != nullptr) {
      for (const int member : members) {
        slot->processes.push_back(network->ProcessOf(member, world_));
      }
      const auto here = std::equal_range(
          slot->processes.begin(), slot->processes.end(), network->process());
      slot->first_here = static_cast<int>(here.first - slot->processes.begin());
      slot->num_here = static_cast<int>(here.second - here.first);
      if (slot->num_here == slot->size()) slot->processes.clear();
    }
    slot->members = std::move(members);
  }
  const auto found =
      std::find(slot->members.begin(), slot->members.end(), rank);
  ZERO_CHECK(found != slot->members.end())
      << "local: rank " << rank << " is not a member of channel \"" << name
      << "\"";
  const int place = static_cast<int>(found - slot->members.begin());
  ZERO_CHECK(slot->IsHere(place))
      << "local: rank " << rank << " is of another process";
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
  const Clock::time_point begin = Clock::now();
  try {
    for (const auto& other : others) stream.Wait(*other->arrived);
    read_bytes =
        channel.processes.empty()
            ? Exchange(stream, place, channel.open, channel.hosts, meet)
            : Cross(channel, place, stream);
    if (marks != nullptr) stream.Record(*marks->done);
  } catch (const std::exception& error) {
    Break(channel, place, error.what());
    // The caller frees memory while it unwinds. Before that, this rank's queued
    // work must have read the others' memory, and the others this rank's.
    if (marks != nullptr) Drain(stream);
    Close(channel, place, 0, {});
    for (const auto& other : others) Drain(*other->done);
    throw std::runtime_error(std::string(status().message()));
  }
  // If a device does the share, this thread has only launched it.
  Close(channel, place, read_bytes,
        marks == nullptr ? Clock::now() - begin : Clock::duration());
  // The wait comes after a failure as well: this rank frees what the others
  // still read.
  for (const auto& other : others) stream.Wait(*other->done);
}

void LocalGroup::Break(Channel& channel, int place, const std::string& reason) {
  Lock lock(mutex_);
  channel.broken = true;
  Latch(absl::InternalError(absl::StrCat(
      name(), ": rank ", channel.members[place], " failed in ",
      channel.ends[place].begun->mark.TextIn(channel.name), ": ", reason)));
  channel.changed.notify_all();
}

bool LocalGroup::Open(Channel& channel, int place,
                      const std::shared_ptr<const Call>& call) {
  Lock lock(mutex_);
  if (!failure_.ok()) return false;
  ChannelProgress& own = channel.ends[place].progress;
  if (own.inside.number > 0 || own.finished.number + 1 != call->mark.number) {
    Latch(absl::FailedPreconditionError(absl::StrCat(
        name(), ": rank ", channel.members[place], " performs ",
        call->mark.TextIn(channel.name), ", but #", own.finished.number + 1,
        " has not finished: order the streams of one channel by events")));
    return false;
  }
  own.inside = call->mark;
  channel.ends[place].begun = call;
  channel.open[place] = &call->collective;
  if (++channel.num_arrived == channel.num_here) {
    channel.num_arrived = 0;
    for (int other = 0; other < channel.size(); ++other) {
      const CollectiveMark& its = channel.ends[other].progress.inside;
      if (!channel.IsHere(other) || its.signature == own.inside.signature) {
        continue;
      }
      FailLate(lock, channel, place);
      return false;
    }
    if (channel.num_opened == 0) Latch(Unreachable(channel));
    if (!failure_.ok()) return false;
    for (End& one : channel.ends) one.progress.works = true;
    channel.num_working = channel.num_here;
    ++channel.num_opened;
    channel.changed.notify_all();
    return true;
  }
  FailIfGone(channel);
  const auto opened = [&] { return channel.num_opened >= call->mark.number; };
  Await(lock, channel, place, [&] { return opened() || !failure_.ok(); });
  // Once open, other ranks may be reading this one's memory: it must stay until
  // the end, whatever has failed meanwhile.
  return opened();
}

// No rank leaves on a failure: others read its data.
bool LocalGroup::Meet(Channel& channel, int place) {
  Lock lock(mutex_);
  if (++channel.num_meeting == channel.num_here) {
    channel.num_meeting = 0;
    ++channel.num_meetings;
    for (End& one : channel.ends) one.progress.works = true;
    channel.changed.notify_all();
    return !channel.broken;
  }
  channel.ends[place].progress.works = false;
  const Clock::time_point begin = Clock::now();
  const auto met = [&, before = channel.num_meetings] {
    return channel.num_meetings > before || channel.broken;
  };
  // The leader, which waits for other processes, represents the ranks that wait
  // for it.
  if (channel.processes.empty() || place == channel.first_here) {
    Await(lock, channel, place, met);
  } else {
    channel.changed.wait(lock, met);
  }
  channel.ends[place].waiting += Clock::now() - begin;
  return !channel.broken;
}

// The leader's messages with other processes in one collective.
class LocalGroup::Crossing {
 public:
  Crossing(LocalGroup& group, Channel& channel, const Rounds& rounds)
      : group_(group), channel_(channel), rounds_(rounds) {
    // All processes exchange signatures, so none takes one collective's data
    // for another's.
    const CollectiveMark& mark = channel.ends[rounds.leader()].begun->mark;
    told_ = std::hash<std::string>()(mark.TextIn(channel.name));
    std::vector<int> others = channel.processes;
    others.erase(std::unique(others.begin(), others.end()), others.end());
    others.erase(std::find(others.begin(), others.end(), process()));
    heard_.resize(others.size());
    std::vector<PeerMessages> marks;
    for (size_t i = 0; i < others.size(); ++i) {
      marks.push_back({others[i], {Bytes(&told_)}, {Bytes(&heard_[i])}});
    }
    marks_ = network().Begin(channel.name, std::move(marks));
  }

  void Begin(int round) {
    if (round >= rounds_.size()) return;
    std::vector<char>& staging = channel_.staging[round % 2];
    if (static_cast<int64_t>(staging.size()) < rounds_.staging_bytes()) {
      staging.resize(rounds_.staging_bytes());
    }
    std::vector<PeerMessages> messages =
        rounds_.Messages(round, channel_.open, staging.data(),
                         channel_.outgoing[round % 2].data());
    int64_t bytes = 0;
    for (const PeerMessages& peer : messages) {
      for (const MemoryRun& run : peer.send) bytes += run.bytes;
    }
    {
      Lock lock(group_.mutex_);
      group_.sent_bytes_ += bytes;
    }
    data_ = network().Begin(channel_.name, std::move(messages));
  }

  // Returns false if the group has failed.
  bool Await() {
    const int place = rounds_.leader();
    if (marks_ != nullptr) {
      if (!group_.AwaitNetwork(channel_, place, *marks_)) return false;
      marks_ = nullptr;
      for (const uint64_t one : heard_) {
        if (one != told_) return group_.FailAcross(channel_, place);
      }
    }
    return data_ == nullptr || group_.AwaitNetwork(channel_, place, *data_);
  }

 private:
  static MemoryRun Bytes(uint64_t* value) {
    return {reinterpret_cast<char*>(value), sizeof(*value)};
  }
  Network& network() const { return *group_.others_.network; }
  int process() const { return network().process(); }

  LocalGroup& group_;
  Channel& channel_;
  const Rounds& rounds_;
  uint64_t told_ = 0;
  std::vector<uint64_t> heard_;
  std::unique_ptr<Network::Exchange> marks_,
      data_;  // destroyed before the memory they move
};

int64_t LocalGroup::Cross(Channel& channel, int place, Stream& stream) {
  const Collective& own = *channel.open[place];
  const Rounds rounds(own, channel.processes, others_.network->process(),
                      channel.hosts);
  int round = 0;
  PeerMemory peers(stream, place, channel.open, channel.hosts,
                   [&](int rank, int64_t piece, const Window& window) {
                     return rounds.Received(round,
                                            *channel.open[rounds.leader()],
                                            channel.staging[round % 2].data(),
                                            rank, piece, window);
                   });
  const bool sums = rounds.outgoing_bytes() > 0;
  if (sums) {
    SumForOthers(channel, place, peers, stream, rounds, 0);
    if (!Meet(channel, place)) return peers.read_bytes();
  }
  std::unique_ptr<Crossing> crossing;
  if (place == rounds.leader()) {
    crossing = std::make_unique<Crossing>(*this, channel, rounds);
    crossing->Begin(0);
  }
  // All processes come here, even with nothing to move.
  do {
    // The sums are made while a round is in flight.
    if (sums) SumForOthers(channel, place, peers, stream, rounds, round + 1);
    const bool arrived = crossing == nullptr || crossing->Await();
    if (!Meet(channel, place) || !arrived) break;
    if (round >= rounds.size()) break;
    // All shares of the previous round are done: its staging is free.
    if (crossing != nullptr) crossing->Begin(round + 1);
    DoShare(peers, rounds.windows(round));
  } while (++round < rounds.size());
  return peers.read_bytes();
}

void LocalGroup::SumForOthers(Channel& channel, int place, PeerMemory& peers,
                              Stream& stream, const Rounds& rounds, int round) {
  std::vector<char>& outgoing = channel.outgoing[round % 2];
  {
    // The first rank here allocates, before any rank writes.
    Lock lock(mutex_);
    if (static_cast<int64_t>(outgoing.size()) < rounds.outgoing_bytes()) {
      outgoing.resize(rounds.outgoing_bytes());
    }
  }
  const DType dtype = peers.own().dtype;
  rounds.ForEachSum(
      round, place, outgoing.data(),
      [&](int begin, int end, int64_t piece, const Window& window, char* to) {
        std::vector<const void*> parts;
        for (int rank = begin; rank < end; ++rank) {
          parts.push_back(peers.Sent(rank, piece, window).data);
        }
        if (window.elems == 0) return;
        stream.device().ops().SumRanks(
            stream, {parts, dtype, {to, dtype, window.elems}, false});
      });
}

bool LocalGroup::AwaitNetwork(Channel& channel, int place,
                              Network::Exchange& exchange) {
  {
    Lock lock(mutex_);
    channel.ends[place].progress.works = false;
  }
  const Clock::time_point begin = Clock::now();
  absl::Status status = exchange.Await(timeout_);
  if (status.ok()) {
    Lock lock(mutex_);
    channel.ends[place].waiting += Clock::now() - begin;
    channel.ends[place].progress.works = true;
    return true;
  }
  if (absl::IsDeadlineExceeded(status)) {
    Lock lock(mutex_);
    FailLate(lock, channel, place);
  } else if (!absl::IsCancelled(status)) {
    status = absl::Status(
        status.code(),
        absl::StrCat(name(), ": rank ", channel.members[place], " failed in ",
                     channel.ends[place].begun->mark.TextIn(channel.name), ": ",
                     status.message()));
    Fail(others_.find_cause ? others_.find_cause(status) : status);
  }
  BreakOff(channel);
  return false;
}

bool LocalGroup::FailAcross(Channel& channel, int place) {
  {
    Lock lock(mutex_);
    FailLate(lock, channel, place);
  }
  BreakOff(channel);
  return false;
}

void LocalGroup::BreakOff(Channel& channel) {
  Lock lock(mutex_);
  channel.broken = true;
  channel.changed.notify_all();
}

void LocalGroup::Close(Channel& channel, int place, int64_t read_bytes,
                       std::chrono::nanoseconds share) {
  Lock lock(mutex_);
  End& end = channel.ends[place];
  end.received_bytes += read_bytes;
  end.busy += share - std::exchange(end.waiting, {});
  end.progress.works = false;
  if (--channel.num_working == 0) channel.changed.notify_all();
  // Even after a failure no rank leaves while its memory is read.
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
  FailLate(lock, channel, place);
  channel.changed.wait(lock, condition);
}

void LocalGroup::Latch(const absl::Status& status) {
  if (!failure_.ok() || status.ok()) return;
  failure_ = status;
  if (others_.network != nullptr) others_.network->Stop();
  for (auto& [name, channel] : channels_) channel->changed.notify_all();
}

void LocalGroup::Fail(const absl::Status& status) {
  Lock lock(mutex_);
  Latch(status);
}

void LocalGroup::Abort(int rank, const absl::Status& status) {
  ZERO_CHECK(!status.ok()) << "local: Abort with a status that is OK";
  Fail(absl::Status(status.code(),
                    absl::StrCat(name(), ": rank ", rank,
                                 " aborted the run: ", status.message())));
}

int64_t LocalGroup::sent_bytes() const {
  Lock lock(mutex_);
  return sent_bytes_;
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
      return Latch(absl::UnavailableError(absl::StrCat(
          name(), ": rank ", channel.members[place], " left before ",
          inside.TextIn(channel.name), ", having issued ",
          end.progress.issued.number, " collectives there")));
    }
  }
}

absl::Status LocalGroup::Unreachable(const Channel& channel) const {
  for (int place = 0; place < channel.size(); ++place) {
    for (int other = 0; other < channel.size(); ++other) {
      if (!channel.IsHere(place) || !channel.IsHere(other)) continue;
      const Device& own = channel.ends[place].begun->stream->device();
      if (own.Reaches(channel.ends[other].begun->stream->device())) continue;
      return absl::FailedPreconditionError(absl::StrCat(
          "local: the device of rank ", channel.members[place],
          " cannot read the memory of rank ", channel.members[other],
          "'s (no peer access); set communication.backend to \"nccl\", or use "
          "GPUs that are connected"));
    }
  }
  return absl::OkStatus();
}

RanksProgress LocalGroup::Told() const {
  RanksProgress told;
  for (const auto& [name, channel] : channels_) {
    for (int place = 0; place < channel->size(); ++place) {
      if (!channel->IsHere(place)) continue;
      told[name][channel->members[place]] = channel->ends[place].progress;
    }
  }
  return told;
}

RanksProgress LocalGroup::progress() const {
  Lock lock(mutex_);
  return Told();
}

void LocalGroup::FailLate(Lock& lock, const Channel& channel, int place) {
  if (!failure_.ok()) return;
  const LateCollective late{.backend = name(),
                            .rank = channel.members[place],
                            .channel = channel.name,
                            .members = channel.members,
                            .call = channel.ends[place].progress.inside,
                            .timeout = timeout_};
  RanksProgress told;
  if (others_.ask) {
    lock.unlock();
    told = others_.ask();
    lock.lock();
  }
  for (auto& [name, ranks] : Told()) {
    for (auto& [rank, one] : ranks) told[name][rank] = one;
  }
  Diagnosis found = Diagnose(late, told);
  if (failure_.ok()) missing_ = std::move(found.missing);
  Latch(found.status);
}

}  // namespace zero
