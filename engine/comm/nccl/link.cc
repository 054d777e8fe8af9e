#include "engine/comm/nccl/link.h"

#include <algorithm>
#include <cstring>
#include <set>
#include <thread>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "engine/base/exceptions.h"
#include "engine/base/status.h"
#include "engine/comm/channel.h"
#include "engine/comm/launch.h"
#include "engine/comm/nccl/transfers.h"
#include "kernels/check.h"
#include "kernels/cuda/check.h"

namespace zero {
namespace {

// How often the watch looks: often enough to notice a timeout in time.
absl::Duration WatchPeriod(absl::Duration timeout) {
  return std::min(std::max(timeout / 10, absl::Milliseconds(1)),
                  absl::Milliseconds(100));
}

// The wait between two looks at NCCL's background work. Mostly that is done at
// once, and a sleep, to which Linux adds 50 us, would delay the launching
// thread: the first waits only yield. The first collective of a communicator
// takes a second.
class Pause {
 public:
  void Wait() {
    if (absl::Now() - start_ < absl::Microseconds(30)) {
      return std::this_thread::yield();
    }
    absl::SleepFor(pause_);
    pause_ = std::min(2 * pause_, absl::Milliseconds(5));
  }

 private:
  const absl::Time start_ = absl::Now();
  absl::Duration pause_ = absl::Microseconds(5);
};

std::string ProgressKey(int rank) { return absl::StrCat("progress/", rank); }

// "unhandled system error: ...", with NCCL's details and the remedy.
std::string ErrorText(ncclResult_t result) {
  const char* const last = ncclGetLastError(nullptr);  // of the process
  const bool says = last != nullptr && last[0] != '\0';
  return absl::StrCat(ncclGetErrorString(result), says ? ": " : "",
                      says ? last : "", "; NCCL_DEBUG=INFO says more");
}

// The state of NCCL's background work on a communicator, once there is one.
ncclResult_t StateOf(ncclComm_t comm) {
  if (comm == nullptr) return ncclInProgress;
  ncclResult_t state = ncclSuccess;
  const ncclResult_t asked = ncclCommGetAsyncError(comm, &state);
  return IsNcclError(asked) ? asked : state;
}

}  // namespace

const CollectiveMark* NcclChannel::Current() const {
  if (!flying.empty()) return &flying.front().mark;
  return launching.number > 0 ? &launching : nullptr;
}

// ---- Start-up -------------------------------------------------------------

NcclLink::NcclLink(std::shared_ptr<Store> store, cuda::CudaDevice& device,
                   const NcclOptions& options)
    : store_(std::move(store)),
      device_(device),
      rank_(options.rank),
      world_(options.world),
      shards_(options.shards == 0 ? options.world : options.shards),
      timeout_(options.timeout) {
  ZERO_CHECK(rank_ >= 0 && rank_ < world_)
      << "nccl: rank " << rank_ << " of " << world_;
  ZERO_CHECK(world_ % shards_ == 0)
      << "nccl: " << shards_ << " shards do not divide " << world_ << " ranks";
}

absl::StatusOr<std::shared_ptr<NcclLink>> NcclLink::Open(
    std::shared_ptr<Store> store, cuda::CudaDevice& device,
    const NcclOptions& options) {
  std::shared_ptr<NcclLink> link(
      new NcclLink(std::move(store), device, options));
  device.MakeCurrent();
  const absl::Status opened = [&]() -> absl::Status {
    ZERO_ASSIGN_OR_RETURN(link->scratch_,
                          device.Allocate(1, MemoryKind::kDevice));
    ZERO_RETURN_IF_ERROR(link->MeetOthers());
    ZERO_RETURN_IF_ERROR(link->InitWorld());
    for (const Channel channel :
         {Channel::kGather, Channel::kReduce, Channel::kAcross}) {
      ZERO_RETURN_IF_ERROR(link->AddChannel(
          channel, [&](NcclChannel& added, ncclConfig_t* config) {
            return ncclCommSplit(link->channels_.front()->comm,
                                 /*color=*/added.members.front(), link->rank_,
                                 &added.comm, config);
          }));
    }
    return absl::OkStatus();
  }();
  if (!opened.ok()) {
    link->Fail(opened);
    return link->status();
  }
  link->watch_ = std::thread([raw = link.get()] { raw->Watch(); });
  return link;
}

// Meets the other ranks in the store first, so that a missing one is named,
// which NCCL would not do, and learns which GPU each rank has.
absl::Status NcclLink::MeetOthers() {
  char bus_id[64] = "";
  ZERO_CUDA_CHECK(
      cudaDeviceGetPCIBusId(bus_id, sizeof(bus_id), device_.index()));
  const std::string gpu = absl::StrCat(HostName(), "/", bus_id);
  const absl::StatusOr<std::vector<std::string>> gpus =
      ExchangeInStore(*store_, kNcclStartUp, rank_, world_, gpu, timeout_);
  if (absl::IsDeadlineExceeded(gpus.status())) {
    return absl::DeadlineExceededError(
        absl::StrCat("nccl: ", gpus.status().message(),
                     "; if a rank was only slow, raise "
                     "communication.timeout_seconds"));
  }
  ZERO_RETURN_IF_ERROR(gpus.status());
  std::vector<int> sharers;
  for (int rank = 0; rank < world_; ++rank) {
    if ((*gpus)[rank] == gpu) sharers.push_back(rank);
  }
  num_sharers_ = static_cast<int>(sharers.size());
  num_host_sharers_ = static_cast<int>(
      std::count_if(gpus->begin(), gpus->end(), [](const std::string& other) {
        return absl::StartsWith(other, absl::StrCat(HostName(), "/"));
      }));
  num_gpus_ = static_cast<int>(
      std::set<std::string>(gpus->begin(), gpus->end()).size());
  if (num_sharers_ == 1 || CheckRanksOfGpus(2, 1).ok()) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "nccl: ", RankNames(sharers), num_sharers_ == 2 ? " both" : " all",
      " have GPU ", bus_id, " of ", HostName(),
      "; check LOCAL_RANK and CUDA_VISIBLE_DEVICES, or let the ranks be "
      "threads that share a GPU: --ranks N with communication.backend "
      "\"local\""));
}

absl::Status NcclLink::InitWorld() {
  ncclUniqueId id;
  if (rank_ == 0) {
    const ncclResult_t result = ncclGetUniqueId(&id);
    if (IsNcclError(result)) {
      return absl::UnavailableError(
          absl::StrCat("nccl: rank 0 got no id: ", ErrorText(result)));
    }
    ZERO_RETURN_IF_ERROR(
        store_->Put("nccl id", std::string(id.internal, sizeof(id.internal))));
  } else {
    ZERO_ASSIGN_OR_RETURN(
        const std::string bytes,
        Await(*store_, "nccl id", "nccl: the id of rank 0", timeout_));
    ZERO_CHECK_EQ(bytes.size(), sizeof(id.internal));
    std::memcpy(id.internal, bytes.data(), bytes.size());
  }
  return AddChannel(
      Channel::kScalar, [&](NcclChannel& added, ncclConfig_t* config) {
        return ncclCommInitRankConfig(&added.comm, world_, id, rank_, config);
      });
}

absl::Status NcclLink::AddChannel(Channel channel, const InitFn& init) {
  channels_.push_back(std::make_unique<NcclChannel>());
  NcclChannel& added = *channels_.back();
  added.channel = channel;
  added.members = MembersOf(channel, rank_, world_, shards_);
  added.name = ChannelText(ChannelName(channel), added.members, world_);
  added.place = static_cast<int>(
      std::find(added.members.begin(), added.members.end(), rank_) -
      added.members.begin());
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  // The communicator stays non-blocking after it is connected: NCCL connects
  // what an algorithm or a peer needs when a collective first uses it, in any
  // step, and a call that blocked there could only be ended by an abort that
  // frees what the call still uses. The price is a thread of NCCL's for every
  // launch.
  config.blocking = 0;
  config.commName = ChannelName(channel);  // in NCCL's own log
  const auto failed = [&](const std::string& reason) {
    return absl::UnavailableError(absl::StrCat("nccl: rank ", rank_,
                                               " could not connect channel \"",
                                               added.name, "\": ", reason));
  };
  ncclResult_t result = init(added, &config);
  if (IsNcclError(result)) return failed(ErrorText(result));
  result = AwaitNccl(added, absl::Now() + timeout_);
  if (result == ncclSuccess) return absl::OkStatus();
  if (IsNcclError(result)) return AwaitCause(failed(ErrorText(result)));
  ZERO_RETURN_IF_ERROR(StoredFailure(*store_));
  return failed(absl::StrCat("NCCL was not ready within ",
                             absl::FormatDuration(timeout_),
                             "; NCCL_DEBUG=INFO says what it waits for"));
}

// Waits for NCCL's background work on a communicator: ncclSuccess when it is
// done, its error, or ncclInProgress after the deadline or a failure.
ncclResult_t NcclLink::AwaitNccl(const NcclChannel& channel,
                                 absl::Time deadline) {
  absl::Time look = absl::Now() + WatchPeriod(timeout_);
  for (Pause pause;; pause.Wait()) {
    {
      std::lock_guard<std::mutex> lock(calls_);
      if (!status().ok()) return ncclInProgress;
      ncclResult_t state = ncclSuccess;
      // A split is first background work of the world's communicator.
      if (!watch_.joinable()) state = StateOf(channels_.front()->comm);
      if (state == ncclSuccess) state = StateOf(channel.comm);
      if (state != ncclInProgress) return state;
    }
    const absl::Time now = absl::Now();
    if (now >= deadline) return ncclInProgress;
    if (now < look) continue;
    if (!StoredFailure(*store_).ok()) return ncclInProgress;
    look = now + WatchPeriod(timeout_);
  }
}

// ---- Collectives ----------------------------------------------------------

void NcclLink::Run(NcclChannel& channel, Stream& stream,
                   const Collective& collective) {
  if (!status().ok()) return;
  NcclCall call;
  call.begin = TakeEvent();
  call.end = TakeEvent();
  {
    std::lock_guard<std::mutex> lock(state_);
    call.mark = {channel.progress.issued.number + 1, Signature(collective)};
    channel.progress.issued = channel.launching = call.mark;
  }
  stream.Record(*call.begin);
  if (!Launch(channel, stream, collective, call)) return;
  stream.Record(*call.end);
  std::lock_guard<std::mutex> lock(state_);
  channel.launching = {};
  channel.flying.push_back(std::move(call));
}

bool NcclLink::Launch(NcclChannel& channel, Stream& stream,
                      const Collective& collective, const NcclCall& call) {
  NcclPlace place{channel.place,   static_cast<int>(channel.members.size()),
                  nullptr,         cuda::HandleOf(stream),
                  scratch_.data(), &channel.received_bytes};
  ncclResult_t result;
  {
    std::lock_guard<std::mutex> lock(calls_);
    if (!status().ok()) return false;
    place.comm = channel.comm;  // an abort takes it
    result = ncclGroupStart();
    if (!IsNcclError(result)) result = EnqueueTransfers(place, collective);
    const ncclResult_t ended = ncclGroupEnd();
    if (!IsNcclError(result)) result = ended;
  }
  const bool begun = !IsNcclError(result);
  // The kernels are on the stream, and an event behind them, only when NCCL's
  // background work is done. In the first collective of a communicator NCCL
  // connects, which waits for peers.
  if (begun) result = AwaitNccl(channel, absl::Now() + timeout_);
  if (IsNcclError(result)) {
    Fail(AwaitCause(absl::UnavailableError(absl::StrCat(
        "nccl: rank ", rank_, begun ? " failed at " : " could not begin ",
        call.mark.TextIn(channel.name), ": ", ErrorText(result)))));
  } else if (result == ncclInProgress) {
    FailLate(channel, call.mark);
  }
  if (result != ncclSuccess) return false;
  EnqueueSums(place, stream, collective);
  return true;
}

std::unique_ptr<Event> NcclLink::TakeEvent() {
  {
    std::lock_guard<std::mutex> lock(state_);
    if (!idle_.empty()) {
      std::unique_ptr<Event> event = std::move(idle_.back());
      idle_.pop_back();
      return event;
    }
  }
  return device_.MakeEvent();
}

std::shared_ptr<void> NcclLink::Register(NcclChannel& channel, void* data,
                                         size_t bytes) {
  void* handle = nullptr;
  std::lock_guard<std::mutex> lock(calls_);
  if (!status().ok()) return nullptr;
  const ncclResult_t result =
      ncclCommRegister(channel.comm, data, bytes, &handle);
  // Some memory cannot be mapped; NCCL then copies, as without registration.
  // Memory of cudaMalloc serves the network. Between GPUs of a machine NCCL
  // maps such memory only where NCCL_LEGACY_CUDA_REGISTER says so, and switches
  // that add up (NVLS) want ncclMemAlloc's, at equal offsets on all ranks.
  // Either is mapped by the first collective that uses it: in the middle of a
  // step.
  if (result != ncclSuccess || handle == nullptr) return nullptr;
  return std::shared_ptr<void>(
      handle, [link = shared_from_this(), &channel](void* registered) {
        std::lock_guard<std::mutex> lock(link->calls_);
        if (channel.comm == nullptr) return;
        ncclCommDeregister(channel.comm, registered);
      });
}

// ---- Failures -------------------------------------------------------------

void NcclLink::Fail(const absl::Status& failure,
                    const std::vector<int>& missing) {
  if (!status().ok()) return;
  const absl::Status first = StoreFailure(*store_, failure, missing);
  Latch(first, StoredMissing(*store_));
}

absl::Status NcclLink::status() const {
  std::lock_guard<std::mutex> lock(state_);
  return failure_;
}

std::vector<int> NcclLink::missing() const {
  {
    std::lock_guard<std::mutex> lock(state_);
    if (!failure_.ok()) return missing_;
  }
  return StoredMissing(*store_);  // the watch may not have heard yet
}

void NcclLink::Latch(const absl::Status& failure,
                     const std::vector<int>& missing) {
  {
    std::lock_guard<std::mutex> lock(state_);
    if (!failure_.ok()) return;
    failure_ =
        absl::Status(failure.code(), absl::StrCat(failure.message(), Inside()));
    missing_ = missing;
  }
  AbortAll();
}

// All communicators are aborted at once: one that waits for the device would
// wait for the others.
void NcclLink::AbortAll() {
  std::lock_guard<std::mutex> lock(calls_);
  ncclGroupStart();
  for (const auto& channel : channels_) {
    if (channel->comm != nullptr) ncclCommAbort(channel->comm);
    channel->comm = nullptr;
  }
  ncclGroupEnd();
}

// A message such as "; rank 1 is in #7 of channel ...". REQUIRES: state_ is
// held.
std::string NcclLink::Inside() const {
  std::string text;
  for (const auto& channel : channels_) {
    const CollectiveMark* const current = channel->Current();
    if (current == nullptr) continue;
    absl::StrAppend(&text, text.empty() ? "; rank " : " and ");
    if (text.size() == 7) absl::StrAppend(&text, rank_, " is in ");
    absl::StrAppend(&text, current->TextIn(channel->name));
  }
  return text;
}

// Waits a moment for the failure that another rank publishes: what NCCL reports
// here, `own`, may only be its consequence.
absl::Status NcclLink::AwaitCause(const absl::Status& own) {
  const absl::Time deadline =
      absl::Now() + std::min(timeout_ / 4, absl::Seconds(1));
  while (absl::Now() < deadline) {
    const absl::Status stored = StoredFailure(*store_);
    if (!stored.ok()) return stored;
    absl::SleepFor(WatchPeriod(timeout_));
  }
  return own;
}

void NcclLink::FailLate(const NcclChannel& channel,
                        const CollectiveMark& call) {
  if (!status().ok()) return;
  RanksProgress published;
  for (int rank = 0; rank < world_; ++rank) {
    const auto text = store_->Get(ProgressKey(rank));
    if (!text.ok() || !text->has_value()) continue;
    for (const ChannelProgress& one : ParseProgress(**text)) {
      published[one.channel][rank] = one;
    }
  }
  const Diagnosis found = Diagnose({.backend = "nccl",
                                    .rank = rank_,
                                    .channel = channel.name,
                                    .members = channel.members,
                                    .call = call,
                                    .timeout = timeout_},
                                   published);
  Fail(found.status, found.missing);
}

// ---- The watch ------------------------------------------------------------

// Exists while the watch is in a call of CUDA or NCCL. Such a call may wait for
// a lock of the driver, and its holder for a GPU: in the worst case forever.
class NcclLink::DriverCall {
 public:
  explicit DriverCall(std::atomic<int64_t>& since) : since_(since) {
    since_ = absl::ToUnixNanos(absl::Now());
  }
  ~DriverCall() { since_ = 0; }
  DriverCall(const DriverCall&) = delete;

 private:
  std::atomic<int64_t>& since_;
};

std::function<absl::Duration()> NcclLink::watch_in_driver() const {
  return [in_driver_since = in_driver_since_] {
    const int64_t since = *in_driver_since;
    return since == 0 ? absl::ZeroDuration()
                      : absl::Now() - absl::FromUnixNanos(since);
  };
}

void NcclLink::Watch() {
  device_.MakeCurrent();
  const auto period = absl::ToChronoNanoseconds(WatchPeriod(timeout_));
  std::unique_lock<std::mutex> lock(state_);
  while (!close_.wait_for(lock, period, [this] { return closing_; })) {
    if (!failure_.ok()) return;
    lock.unlock();
    const absl::Status seen = CatchExceptions([this] { return Poll(); });
    if (!seen.ok()) Fail(seen);
    lock.lock();
  }
}

absl::Status NcclLink::Poll() {
  ZERO_RETURN_IF_ERROR(StoredFailure(*store_));
  ZERO_RETURN_IF_ERROR(CheckErrors());
  CheckTimeouts();
  PublishProgress();
  return absl::OkStatus();
}

absl::Status NcclLink::CheckErrors() {
  ncclResult_t state = ncclSuccess;
  const NcclChannel* failed = nullptr;
  {
    const DriverCall call(*in_driver_since_);
    std::lock_guard<std::mutex> lock(calls_);
    for (const auto& channel : channels_) {
      if (IsNcclError(state)) break;
      state = StateOf(channel->comm);
      failed = channel.get();
    }
  }
  if (!IsNcclError(state)) return absl::OkStatus();
  std::string where = absl::StrCat("channel \"", failed->name, "\"");
  {
    std::lock_guard<std::mutex> lock(state_);
    const CollectiveMark* const current = failed->Current();
    if (current != nullptr) where = current->TextIn(failed->name);
  }
  return AwaitCause(absl::UnavailableError(absl::StrCat(
      "nccl: rank ", rank_, " failed in ", where, ": ", ErrorText(state))));
}

void NcclLink::CheckTimeouts() {
  const NcclChannel* late_channel = nullptr;
  CollectiveMark late;
  for (const auto& channel : channels_) {
    NcclCall* const first = FirstInFlight(*channel);
    if (first == nullptr) continue;
    if (first->begun == absl::InfiniteFuture() && HasPassed(*first->begin)) {
      first->begun = absl::Now();
      std::lock_guard<std::mutex> lock(state_);
      channel->progress.inside = first->mark;
    }
    if (absl::Now() - first->begun < timeout_ || late_channel != nullptr) {
      continue;
    }
    late_channel = channel.get();
    late = first->mark;
  }
  if (late_channel == nullptr) return;
  published_at_ = absl::InfinitePast();
  PublishProgress();
  // The timeouts of other ranks end now too: let them publish where they are.
  absl::SleepFor(WatchPeriod(timeout_));
  FailLate(*late_channel, late);
}

// REQUIRES: state_ is not held: the call may block, and launches take state_.
bool NcclLink::HasPassed(const Event& event) {
  const DriverCall call(*in_driver_since_);
  return event.IsDone();
}

// The oldest call that has not ended, or null; removes those that have. The
// call stays where it is until the watch removes it: adding to a deque moves
// nothing.
NcclCall* NcclLink::FirstInFlight(NcclChannel& channel) {
  while (true) {
    NcclCall* first = nullptr;
    {
      std::lock_guard<std::mutex> lock(state_);
      if (channel.flying.empty()) return nullptr;
      first = &channel.flying.front();
    }
    if (!HasPassed(*first->end)) return first;
    std::lock_guard<std::mutex> lock(state_);
    channel.progress.finished = first->mark;
    channel.progress.inside = {};
    idle_.push_back(std::move(first->begin));
    idle_.push_back(std::move(first->end));
    channel.flying.pop_front();
  }
}

// Publishes this rank's position for the messages of others that wait for it.
void NcclLink::PublishProgress() {
  if (absl::Now() - published_at_ < std::min(timeout_ / 4, absl::Seconds(1))) {
    return;
  }
  std::string text;
  {
    std::lock_guard<std::mutex> lock(state_);
    std::vector<ChannelProgress> all;
    for (const auto& channel : channels_) {
      all.push_back(channel->progress);
      all.back().channel = channel->name;
      // A host that waits for its peers counts as inside, as a stream does.
      if (all.back().inside.number == 0) {
        all.back().inside = channel->launching;
      }
    }
    text = ProgressText(all);
  }
  published_at_ = absl::Now();
  if (text == published_) return;
  published_ = text;
  store_->Put(ProgressKey(rank_), text).IgnoreError();
}

// ---- The end --------------------------------------------------------------

NcclLink::~NcclLink() {
  {
    std::lock_guard<std::mutex> lock(state_);
    closing_ = true;
  }
  close_.notify_all();
  if (watch_.joinable()) watch_.join();
  (void)cudaSetDevice(device_.index());  // this may be another thread
  if (!Finalize()) AbortAll();
}

// Returns false if other ranks are gone or do not take part.
bool NcclLink::Finalize() {
  if (!status().ok()) return false;
  for (const auto& channel : channels_) {
    if (IsNcclError(ncclCommFinalize(channel->comm))) return false;
  }
  const absl::Time deadline = absl::Now() + timeout_;
  for (const auto& channel : channels_) {
    if (AwaitNccl(*channel, deadline) != ncclSuccess) return false;
  }
  for (const auto& channel : channels_) {
    ncclCommDestroy(std::exchange(channel->comm, nullptr));
  }
  return true;
}

}  // namespace zero
