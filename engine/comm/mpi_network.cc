#include "engine/comm/mpi_network.h"

#include <dlfcn.h>
#include <limits.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "engine/base/status.h"
#include "engine/comm/mpi_table.h"
#include "kernels/check.h"

namespace zero {
namespace {

using Clock = std::chrono::steady_clock;

// The plugin's path, beside the program.
std::string PluginPath() {
  char program[PATH_MAX] = {};
  if (readlink("/proc/self/exe", program, sizeof(program) - 1) <= 0) return "";
  const std::string path = program;
  return path.substr(0, path.rfind('/') + 1) + kMpiPlugin;
}

// Loads the table for good: libmpi cannot be unloaded.
absl::StatusOr<const MpiTable*> LoadTable() {
  ZERO_RETURN_IF_ERROR(CheckMpi());
  // Its symbols are global: libmpi loads parts of its own that use them.
  void* const plugin = dlopen(PluginPath().c_str(), RTLD_NOW | RTLD_GLOBAL);
  void* const symbol =
      plugin == nullptr ? nullptr : dlsym(plugin, kMpiTableSymbol);
  if (symbol == nullptr) {
    return absl::UnavailableError(absl::StrCat(
        "mpi: cannot be loaded: ", dlerror(),
        "; install the MPI that zero was built with, or build zero again"));
  }
  const MpiTable* const table = reinterpret_cast<MpiTableFn>(symbol)();
  if (table->version != kMpiTableVersion) {
    return absl::UnavailableError(absl::StrCat(
        "mpi: ", PluginPath(), " belongs to another build of zero"));
  }
  return table;
}

// How long to sleep after this long a wait: it adds at most a quarter, and
// waiting for a rank that computes for seconds costs almost nothing.
Clock::duration PauseAfter(Clock::duration waited) {
  constexpr Clock::duration kShortest = std::chrono::microseconds(5);
  constexpr Clock::duration kLongest = std::chrono::microseconds(500);
  return std::clamp(waited / 4, kShortest, kLongest);
}

}  // namespace

absl::Status CheckMpi() {
  if (access(PluginPath().c_str(), R_OK) == 0) return absl::OkStatus();
  return absl::UnimplementedError(absl::StrCat(
      "MPI is not built into this program (there is no ", PluginPath(),
      "): install openmpi-bin and libopenmpi-dev and build again, or start the "
      "ranks as threads of one process by --ranks N"));
}

// The thread, and its shared state with the waiting ranks.
class MpiNetwork::Courier : public std::enable_shared_from_this<Courier> {
 public:
  // Messages of one exchange. Guarded by the mutex.
  struct Load {
    std::vector<PeerMessages> messages;
    uint32_t tag = 0;
    int pending = 0;
    absl::Status error;
    bool ended() const { return pending == 0 || !error.ok(); }
  };

  // Other tasks of the thread, once each.
  absl::Status Start(const Patience& patience) {
    std::thread([self = shared_from_this()] { self->Run(); }).detach();
    const absl::Time tell_at = absl::Now() + patience.tell_after;
    bool told = patience.tell == nullptr;
    std::unique_lock<std::mutex> lock(mutex_);
    while (!changed_.wait_for(lock, std::chrono::milliseconds(100),
                              [&] { return is_open_ || is_gone_; })) {
      if (patience.ends()) {
        return absl::CancelledError(
            "mpi: stopped by a signal while MPI waited for other processes");
      }
      if (told || absl::Now() < tell_at) continue;
      told = true;
      patience.tell("MPI waits for other processes");
    }
    return failure_;
  }

  absl::Status BroadcastText(std::string* text) {
    return Do([this, text]() -> absl::Status {
      int size = static_cast<int>(text->size());
      ZERO_RETURN_IF_ERROR(
          ToStatus(table_->broadcast(&size, sizeof(size), /*root=*/0)));
      text->resize(size);
      return ToStatus(table_->broadcast(text->data(), size, /*root=*/0));
    });
  }

  void Begin(const std::shared_ptr<Load>& load) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (halted_) load->error = absl::CancelledError("mpi: stopped");
    for (const PeerMessages& peer : load->messages) {
      load->pending +=
          (peer.send.empty() ? 0 : 1) + (peer.receive.empty() ? 0 : 1);
    }
    if (load->ended()) return;
    begun_.push_back(load);
    wake_.notify_one();
  }

  absl::Status Await(const Load& load, absl::Duration timeout) {
    std::unique_lock<std::mutex> lock(mutex_);
    const auto ended = [&] { return load.ended(); };
    if (timeout == absl::InfiniteDuration()) {
      changed_.wait(lock, ended);
    } else if (!changed_.wait_for(lock, absl::ToChronoNanoseconds(timeout),
                                  ended)) {
      return absl::DeadlineExceededError("mpi: messages are still in flight");
    }
    return load.error;
  }

  void Stop() {
    std::lock_guard<std::mutex> lock(mutex_);
    stops_ = true;
    wake_.notify_one();
  }

  bool Close(bool finalizes, absl::Duration timeout) {
    std::unique_lock<std::mutex> lock(mutex_);
    closes_ = true;
    finalizes_ = finalizes;
    wake_.notify_one();
    return changed_.wait_for(lock, absl::ToChronoNanoseconds(timeout), [&] {
      return is_gone_;
    }) && failure_.ok();
  }

  int process = 0, num_processes = 1;
  std::string library;

 private:
  static absl::Status ToStatus(const char* error) {
    if (error == nullptr) return absl::OkStatus();
    return absl::UnavailableError(absl::StrCat("mpi: ", error));
  }

  // Lets the thread call `work` and waits for it.
  absl::Status Do(const std::function<absl::Status()>& work) {
    std::unique_lock<std::mutex> lock(mutex_);
    absl::Status status;
    bool done = false;
    work_ = [&] {
      const absl::Status result = work();
      std::lock_guard<std::mutex> lock(mutex_);
      status = result;
      done = true;
    };
    wake_.notify_one();
    changed_.wait(lock, [&] { return done || is_gone_; });
    return status;
  }

  void Run() {
    // Sleeps are short, and Linux adds 50 us to each.
    prctl(PR_SET_TIMERSLACK, 1000UL);
    const absl::Status opened = Open();
    std::unique_lock<std::mutex> lock(mutex_);
    failure_ = opened;
    is_open_ = opened.ok();
    changed_.notify_all();
    if (is_open_) Serve(lock);
    if (is_open_ && finalizes_ && !halted_) {
      lock.unlock();
      const absl::Status finalized = ToStatus(table_->finalize());
      lock.lock();
      failure_ = finalized;
    }
    is_gone_ = true;
    changed_.notify_all();
  }

  absl::Status Open() {
    ZERO_ASSIGN_OR_RETURN(table_, LoadTable());
    const char* name = "";
    ZERO_RETURN_IF_ERROR(
        ToStatus(table_->init(&process, &num_processes, &name)));
    library = name;
    return absl::OkStatus();
  }

  // Serves requests until the network closes. REQUIRES: the lock is held.
  void Serve(std::unique_lock<std::mutex>& lock) {
    Clock::time_point last = Clock::now();  // when something happened
    while (!closes_) {
      if (stops_ && !halted_) Halt(absl::CancelledError("mpi: stopped"));
      if (halted_) {
        wake_.wait(lock);
        continue;
      }
      bool moved = false;
      if (work_ != nullptr) {
        const auto work = std::exchange(work_, nullptr);
        lock.unlock();
        work();
        lock.lock();
        changed_.notify_all();
        moved = true;
      }
      while (!begun_.empty()) {
        moved = true;
        const std::shared_ptr<Load> load = begun_.front();
        begun_.pop_front();
        StartMessages(*load);
        if (!load->ended()) flying_.insert(load);
      }
      if (Poll(lock)) moved = true;
      const Clock::time_point now = Clock::now();
      if (moved) last = now;
      const auto wakes = [&] {
        return !begun_.empty() || stops_ || closes_ || work_ != nullptr;
      };
      if (flying_.empty()) {
        // Sent messages may still need progress calls.
        wake_.wait_for(lock, std::chrono::milliseconds(20), wakes);
      } else if (!moved) {
        wake_.wait_for(lock, PauseAfter(now - last), wakes);
      }
    }
  }

  // All receives start first: a message that finds its receive needs no copy.
  void StartMessages(Load& load) {
    for (const bool sends : {false, true}) {
      for (const PeerMessages& peer : load.messages) {
        const auto& runs = sends ? peer.send : peer.receive;
        if (runs.empty()) continue;
        const char* const error =
            table_->start(sends, runs.data(), static_cast<int>(runs.size()),
                          peer.process, load.tag, &load);
        if (error != nullptr) return Halt(ToStatus(error));
        ++num_started_;
      }
    }
  }

  // Whether anything has ended.
  bool Poll(std::unique_lock<std::mutex>& lock) {
    requests_.resize(num_started_ + 1);
    errors_.resize(num_started_ + 1);
    lock.unlock();
    const int num_ended = table_->poll(requests_.data(), errors_.data());
    lock.lock();
    if (num_ended < 0) Halt(ToStatus(errors_[0]));
    absl::Status failed;
    for (int i = 0; i < num_ended; ++i) {
      Load& load = *static_cast<Load*>(requests_[i]);
      --num_started_;
      if (errors_[i] != nullptr) {
        failed = absl::DataLossError(absl::StrCat("mpi: ", errors_[i]));
        load.error.Update(failed);
      }
      if (--load.pending > 0) continue;
      for (auto it = flying_.begin(); it != flying_.end(); ++it) {
        if (it->get() != &load) continue;
        flying_.erase(it);
        break;
      }
    }
    if (num_ended > 0) changed_.notify_all();
    if (!failed.ok()) Halt(failed);
    return num_ended > 0;
  }

  // Ends all MPI calls: after this none uses memory any more.
  void Halt(const absl::Status& status) {
    halted_ = true;
    for (const auto& load : flying_) load->error.Update(status);
    for (const auto& load : begun_) load->error.Update(status);
    flying_.clear();
    begun_.clear();
    changed_.notify_all();
  }

  const MpiTable* table_ = nullptr;

  std::mutex mutex_;  // guards all below
  std::condition_variable wake_, changed_;
  bool is_open_ = false, is_gone_ = false, finalizes_ = false;
  bool stops_ = false, halted_ = false, closes_ = false;
  absl::Status failure_;
  std::function<void()> work_;
  std::deque<std::shared_ptr<Load>> begun_;
  std::set<std::shared_ptr<Load>> flying_;
  int num_started_ = 0;
  // Used only by the thread.
  std::vector<void*> requests_;
  std::vector<const char*> errors_;
};

class MpiNetwork::MpiExchange final : public Exchange {
 public:
  MpiExchange(std::shared_ptr<Courier> courier,
              std::shared_ptr<Courier::Load> load)
      : courier_(std::move(courier)), load_(std::move(load)) {
    courier_->Begin(load_);
  }
  ~MpiExchange() override {
    courier_->Await(*load_, absl::InfiniteDuration()).IgnoreError();
  }
  absl::Status Await(absl::Duration timeout) override {
    return courier_->Await(*load_, timeout);
  }

 private:
  const std::shared_ptr<Courier> courier_;
  const std::shared_ptr<Courier::Load> load_;
};

MpiNetwork::MpiNetwork(int process, int num_processes,
                       std::shared_ptr<Courier> courier)
    : Network(process, num_processes), courier_(std::move(courier)) {}

absl::StatusOr<std::shared_ptr<MpiNetwork>> MpiNetwork::Open(
    const Patience& patience) {
  auto courier = std::make_shared<Courier>();
  ZERO_RETURN_IF_ERROR(courier->Start(patience));
  const int process = courier->process, processes = courier->num_processes;
  return std::shared_ptr<MpiNetwork>(
      new MpiNetwork(process, processes, std::move(courier)));
}

const std::string& MpiNetwork::library() const { return courier_->library; }

absl::StatusOr<std::string> MpiNetwork::Broadcast(const std::string& text) {
  std::string received = text;
  ZERO_RETURN_IF_ERROR(courier_->BroadcastText(&received));
  return received;
}

std::unique_ptr<Network::Exchange> MpiNetwork::Begin(
    const std::string& channel, std::vector<PeerMessages> messages) {
  auto load = std::make_shared<Courier::Load>();
  load->messages = std::move(messages);
  // Two names may share a tag; LocalGroup would find out.
  load->tag = static_cast<uint32_t>(std::hash<std::string>()(channel));
  return std::make_unique<MpiExchange>(courier_, std::move(load));
}

void MpiNetwork::Stop() { courier_->Stop(); }

bool MpiNetwork::Finish(absl::Duration timeout) {
  return courier_->Close(/*finalizes=*/true, timeout);
}

MpiNetwork::~MpiNetwork() {
  courier_->Close(/*finalizes=*/false, absl::Seconds(1));
}

}  // namespace zero
