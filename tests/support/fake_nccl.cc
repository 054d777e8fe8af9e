#include "tests/support/fake_nccl.h"

#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "kernels/dtype.h"
#include "tests/support/cuda_emulator/fake_streams.h"

namespace zero {
namespace {

enum class Op {
  kAllGather,
  kReduceScatter,
  kAllReduce,
  kReduce,
  kBroadcast,
  kSend,
  kRecv,
};

struct Call {
  Op op;
  const void* send = nullptr;
  void* recv = nullptr;
  size_t count = 0;
  ncclDataType_t type = ncclUint8;
  ncclRedOp_t red_op = ncclSum;
  int peer = 0;  // of kSend and kRecv; the root of the others

  bool IsPointToPoint() const { return op == Op::kSend || op == Op::kRecv; }
  bool Fits(const Call& other) const {
    return op == other.op && count == other.count && type == other.type &&
           red_op == other.red_op && peer == other.peer;
  }
};

using Bytes = std::vector<char>;

// What rank `rank` of another process can read: a file that appears whole, at
// `path` with the rank at its end. Nobody waits for a file: streams and the
// engine's watch look again while they sleep.
std::string FileOf(const std::string& path, size_t rank) {
  return path + "." + std::to_string(rank);
}
bool IsPublished(const std::string& path, size_t rank) {
  return !path.empty() && access(FileOf(path, rank).c_str(), F_OK) == 0;
}
void Publish(const std::string& path, size_t rank, const Bytes& bytes);
Bytes Published(const std::string& path, size_t rank);

// Concurrent work of a clique's ranks: one group of calls of each.
struct Launch {
  std::string path;  // of its files; empty: all ranks are of this process
  std::vector<std::vector<Call>> calls;  // by rank
  std::vector<bool> issued, arrived;
  std::vector<Bytes> loaded;  // by rank: what calls of other processes point to
  bool done = false;
};

// The ranks of one communicator.
struct Clique {
  int size = 0;
  std::string path;              // of its files; empty: as above
  std::vector<ncclComm*> comms;  // by rank; null: not yet created, or elsewhere
  std::map<int64_t, std::shared_ptr<Launch>> launches;
  // For the nth split: color and new communicator of every rank so far.
  struct Entry {
    int color, key, world_rank;
    ncclComm* comm;
  };
  std::map<int, std::vector<Entry>> splits;

  void Join(int rank, ncclComm* comm) {
    comms[rank] = comm;
    if (!path.empty()) Publish(path, rank, {});
  }
  bool complete() const {
    for (size_t rank = 0; rank < comms.size(); ++rank) {
      if (comms[rank] == nullptr && !IsPublished(path, rank)) return false;
    }
    return static_cast<int>(comms.size()) == size;
  }
};

}  // namespace
}  // namespace zero

struct ncclComm {
  std::shared_ptr<zero::Clique> clique;  // null: a split not yet complete
  int rank = 0;
  int world_rank = 0;  // of the first communicator
  int64_t num_launched = 0;
  int num_splits = 0;
  // Of a split not yet complete whose ranks are processes.
  std::shared_ptr<zero::Clique> parent;
  std::string split_path;
  int busy_polls = 0;  // how often the next polls say "in progress"
  bool init_hangs = false;
  bool aborted = false;
  bool finalized = false;
  std::set<cudaStream_t> streams;
};

namespace zero {
namespace {

struct Fake {
  std::mutex mutex;
  std::map<std::string, std::shared_ptr<Clique>> cliques;  // by id
  std::set<ncclComm*> live;
  // Aborted ones stay: work on streams still reads them.
  std::vector<std::unique_ptr<ncclComm>> all;
  std::map<int, ncclResult_t> async_errors;
  std::set<int> hanging_inits;
  std::set<void*> registered;
  uintptr_t num_handles = 0;
  // Where ranks are processes: the folder in which they meet.
  const char* const folder = std::getenv("FAKE_NCCL_FOLDER");
  int num_ids = 0, num_aborts = 0, num_fused = 0;
  bool connects_late = false;
  int version = NCCL_VERSION_CODE;
};

Fake& Get() {
  static Fake* const fake = new Fake;
  return *fake;
}

// Anything that NCCL may crash on is our bug.
void Require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "fake NCCL: %s\n", what);
  std::abort();
}

void Publish(const std::string& path, size_t rank, const Bytes& bytes) {
  const std::string file = FileOf(path, rank), part = file + ".part";
  std::ofstream out(part, std::ios::binary);
  out.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  out.close();
  Require(out.good() && std::rename(part.c_str(), file.c_str()) == 0,
          "cannot write to FAKE_NCCL_FOLDER");
}

Bytes Published(const std::string& path, size_t rank) {
  std::ifstream in(FileOf(path, rank), std::ios::binary);
  return Bytes(std::istreambuf_iterator<char>(in), {});
}

struct Group {
  int depth = 0;
  // In the order of first use.
  std::vector<std::pair<ncclComm*, cudaStream_t>> users;
  std::map<ncclComm*, std::vector<Call>> calls;
};
thread_local Group group;

size_t SizeOf(ncclDataType_t type) {
  switch (type) {
    case ncclInt64:
    case ncclUint64:
    case ncclFloat64:
      return 8;
    case ncclInt32:
    case ncclUint32:
    case ncclFloat32:
      return 4;
    case ncclFloat16:
    case ncclBfloat16:
      return 2;
    default:
      return 1;
  }
}

template <class T>
T Combine(ncclRedOp_t op, T a, T b) {
  return op == ncclMax ? std::max(a, b) : static_cast<T>(a + b);
}

template <class T>
void Fold(ncclRedOp_t op, void* into, const void* from, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    T a, b;
    std::memcpy(&a, static_cast<const char*>(into) + i * sizeof(T), sizeof(T));
    std::memcpy(&b, static_cast<const char*>(from) + i * sizeof(T), sizeof(T));
    a = Combine(op, a, b);
    std::memcpy(static_cast<char*>(into) + i * sizeof(T), &a, sizeof(T));
  }
}

// into = into (op) from.
void FoldTyped(const Call& call, void* into, const void* from, size_t count) {
  switch (call.type) {
    case ncclFloat32:
      return Fold<float>(call.red_op, into, from, count);
    case ncclFloat64:
      return Fold<double>(call.red_op, into, from, count);
    case ncclInt32:
      return Fold<int32_t>(call.red_op, into, from, count);
    case ncclInt64:
      return Fold<int64_t>(call.red_op, into, from, count);
    case ncclUint8:
      return Fold<uint8_t>(call.red_op, into, from, count);
    default:
      Require(false, "a reduction of a type that the engine must not ask for");
  }
}

Bytes Copied(const void* data, size_t bytes) {
  const char* const begin = static_cast<const char*>(data);
  return Bytes(begin, begin + bytes);
}

// The reduction of all ranks' `send`, from the last rank to the first: not the
// engine's order.
Bytes Reduced(const Launch& launch, size_t index, size_t count) {
  const Call& first = launch.calls.back()[index];
  Bytes sum = Copied(first.send, count * SizeOf(first.type));
  for (size_t r = launch.calls.size() - 1; r-- > 0;) {
    FoldTyped(first, sum.data(), launch.calls[r][index].send, count);
  }
  return sum;
}

// Bytes that rank `rank` of `world` gives to others.
size_t SendBytes(const Call& call, int rank, size_t world) {
  const size_t bytes = call.count * SizeOf(call.type);
  if (call.op == Op::kRecv) return 0;
  if (call.op == Op::kBroadcast && rank != call.peer) return 0;
  return call.op == Op::kReduceScatter ? bytes * world : bytes;
}

// A rank's calls and their data, for other processes.
Bytes Packed(const Launch& launch, int rank) {
  Bytes packed;
  const auto add = [&](const void* data, size_t bytes) {
    const Bytes piece = Copied(data, bytes);
    packed.insert(packed.end(), piece.begin(), piece.end());
  };
  for (const Call& call : launch.calls[rank]) add(&call, sizeof(call));
  for (const Call& call : launch.calls[rank]) {
    add(call.send, SendBytes(call, rank, launch.calls.size()));
  }
  const size_t num_calls = launch.calls[rank].size();
  add(&num_calls, sizeof(num_calls));
  return packed;
}

// Takes what ranks of other processes have published since.
void Load(Launch& launch) {
  for (size_t r = 0; r < launch.calls.size(); ++r) {
    if (launch.arrived[r] || !IsPublished(launch.path, r)) continue;
    const Bytes& packed = launch.loaded[r] = Published(launch.path, r);
    size_t num_calls = 0;
    std::memcpy(&num_calls, packed.data() + packed.size() - sizeof(num_calls),
                sizeof(num_calls));
    launch.calls[r].resize(num_calls);
    const char* data = packed.data() + num_calls * sizeof(Call);
    for (size_t i = 0; i < num_calls; ++i) {
      Call& call = launch.calls[r][i];
      std::memcpy(&call, packed.data() + i * sizeof(Call), sizeof(Call));
      call.send = data;
      data += SendBytes(call, static_cast<int>(r), launch.calls.size());
    }
    launch.issued[r] = launch.arrived[r] = true;
  }
}

struct Write {
  size_t rank;
  void* to;
  Bytes bytes;
};

void AddCollective(const Launch& launch, size_t index,
                   std::vector<Write>* writes) {
  const size_t world = launch.calls.size();
  const Call& first = launch.calls[0][index];
  const size_t bytes = first.count * SizeOf(first.type);
  Bytes result;
  switch (first.op) {
    case Op::kAllGather:
      for (const auto& calls : launch.calls) {
        const Bytes piece = Copied(calls[index].send, bytes);
        result.insert(result.end(), piece.begin(), piece.end());
      }
      break;
    case Op::kReduceScatter:
      result = Reduced(launch, index, first.count * world);
      break;
    case Op::kBroadcast:
      result = Copied(launch.calls[first.peer][index].send, bytes);
      break;
    default:
      result = Reduced(launch, index, first.count);
  }
  for (size_t r = 0; r < world; ++r) {
    if (first.op == Op::kReduce && static_cast<int>(r) != first.peer) continue;
    const size_t offset = first.op == Op::kReduceScatter ? r * bytes : 0;
    const size_t size = first.op == Op::kReduceScatter ? bytes : result.size();
    writes->push_back(
        {r, launch.calls[r][index].recv, Copied(result.data() + offset, size)});
  }
}

// The nth receive from a peer gets the nth send of that peer.
void AddPointToPoint(const Launch& launch, std::vector<Write>* writes) {
  for (size_t r = 0; r < launch.calls.size(); ++r) {
    std::map<int, int> num_received;
    for (const Call& call : launch.calls[r]) {
      if (call.op != Op::kRecv) continue;
      int skip = num_received[call.peer]++;
      for (const Call& other : launch.calls[call.peer]) {
        if (other.op != Op::kSend || other.peer != static_cast<int>(r)) {
          continue;
        }
        if (skip-- > 0) continue;
        writes->push_back(
            {r, call.recv, Copied(other.send, call.count * SizeOf(call.type))});
        break;
      }
    }
  }
}

// Whether all ranks' calls match. Sends and receives: for every receive there
// is a send of its size.
bool Fits(const Launch& launch) {
  std::map<std::pair<int, int>, std::vector<size_t>> sent, received;
  for (size_t r = 0; r < launch.calls.size(); ++r) {
    const int rank = static_cast<int>(r);
    if (launch.calls[r].size() != launch.calls[0].size()) return false;
    for (size_t i = 0; i < launch.calls[r].size(); ++i) {
      const Call& call = launch.calls[r][i];
      if (!call.IsPointToPoint()) {
        if (!call.Fits(launch.calls[0][i])) return false;
      } else if (call.op == Op::kSend) {
        sent[{rank, call.peer}].push_back(call.count);
      } else {
        received[{call.peer, rank}].push_back(call.count);
      }
    }
  }
  return sent == received;
}

// All of it at once, for all ranks of this process: reads everything before it
// writes.
void Execute(Launch& launch) {
  if (launch.done) return;
  launch.done = true;
  std::vector<Write> writes;
  for (size_t i = 0; i < launch.calls[0].size(); ++i) {
    if (!launch.calls[0][i].IsPointToPoint()) {
      AddCollective(launch, i, &writes);
    }
  }
  AddPointToPoint(launch, &writes);
  for (const Write& write : writes) {
    if (write.bytes.empty() || !launch.loaded[write.rank].empty()) continue;
    std::memcpy(write.to, write.bytes.data(), write.bytes.size());
  }
  launch.loaded.clear();
}

bool CanRun(Launch& launch) {
  if (!launch.done && !launch.path.empty()) Load(launch);
  return launch.done || (std::find(launch.arrived.begin(), launch.arrived.end(),
                                   false) == launch.arrived.end() &&
                         Fits(launch));
}

ncclResult_t Enqueue(ncclComm* comm, std::vector<Call> calls,
                     cudaStream_t stream) {
  std::shared_ptr<Launch> launch;
  std::string last;  // the path of the clique's last one
  {
    std::lock_guard<std::mutex> lock(Get().mutex);
    Require(comm->clique != nullptr && comm->clique->complete(),
            "a collective before the communicator is ready");
    Require(!comm->finalized, "a collective after ncclCommFinalize");
    Clique& clique = *comm->clique;
    const auto path = [&](int64_t number) {
      return clique.path.empty() || number < 0
                 ? ""
                 : clique.path + "-launch" + std::to_string(number);
    };
    last = path(comm->num_launched - 1);
    auto& slot = clique.launches[comm->num_launched];
    if (slot == nullptr) {
      slot = std::make_shared<Launch>();
      slot->path = path(comm->num_launched);
      slot->calls.resize(clique.size);
      slot->loaded.resize(clique.size);
      slot->issued.resize(clique.size);
      slot->arrived.resize(clique.size);
    }
    launch = slot;
    ++comm->num_launched;
    if (calls.size() > 1) ++Get().num_fused;
    launch->calls[comm->rank] = std::move(calls);
    launch->issued[comm->rank] = true;
    comm->busy_polls = 2;
    comm->streams.insert(stream);
  }
  // Both under the lock of the fake GPU.
  cudaError_t error = emulator::Enqueue(stream, [launch, rank = comm->rank] {
    std::lock_guard<std::mutex> lock(Get().mutex);
    launch->arrived[rank] = true;
    if (!launch->path.empty()) {
      Publish(launch->path, rank, Packed(*launch, rank));
    }
  });
  if (error != cudaSuccess) return ncclUnhandledCudaError;
  error = emulator::EnqueueWhen(
      stream,
      [launch, comm] {
        std::lock_guard<std::mutex> lock(Get().mutex);
        return comm->aborted || CanRun(*launch);
      },
      [launch, comm, last] {
        std::lock_guard<std::mutex> lock(Get().mutex);
        if (comm->aborted) return;
        Execute(*launch);
        // All ranks are here, so all have read the last one.
        if (!last.empty()) std::remove(FileOf(last, comm->rank).c_str());
      });
  return error == cudaSuccess ? ncclInProgress : ncclUnhandledCudaError;
}

ncclResult_t Add(ncclComm* comm, cudaStream_t stream, const Call& call) {
  {
    std::lock_guard<std::mutex> lock(Get().mutex);
    Require(Get().live.count(comm) == 1,
            "a collective on a communicator that is gone");
  }
  if (emulator::Called("ncclCall") != cudaSuccess) return ncclInternalError;
  if (group.depth == 0) return Enqueue(comm, {call}, stream);
  if (group.calls[comm].empty()) group.users.push_back({comm, stream});
  group.calls[comm].push_back(call);
  // A non-blocking communicator's legal answers: no error.
  return group.calls[comm].size() % 2 == 1 ? ncclInProgress : ncclSuccess;
}

ncclComm* MakeComm(Fake& fake, int world_rank) {
  fake.all.push_back(std::make_unique<ncclComm>());
  ncclComm* const comm = fake.all.back().get();
  comm->world_rank = world_rank;
  comm->init_hangs = fake.hanging_inits.count(world_rank) > 0;
  comm->busy_polls = 3;
  fake.live.insert(comm);
  return comm;
}

// In its first collective, which not all ranks have issued yet.
bool IsConnecting(const Fake& fake, const ncclComm& comm) {
  if (!fake.connects_late || comm.num_launched == 0) return false;
  const std::vector<bool>& issued = comm.clique->launches.at(0)->issued;
  return std::find(issued.begin(), issued.end(), false) != issued.end();
}

// Once all ranks of the parent have called, makes the new cliques.
void FinishSplit(const std::vector<Clique::Entry>& entries,
                 const std::string& path) {
  std::map<int, std::vector<Clique::Entry>> by_color;
  for (const auto& entry : entries) by_color[entry.color].push_back(entry);
  for (auto& [color, members] : by_color) {
    std::sort(members.begin(), members.end(),
              [](const auto& a, const auto& b) { return a.key < b.key; });
    const auto clique = std::make_shared<Clique>();
    clique->size = static_cast<int>(members.size());
    clique->comms.resize(members.size());
    if (!path.empty()) clique->path = path + "-color" + std::to_string(color);
    for (int rank = 0; rank < clique->size; ++rank) {
      ncclComm* const comm = members[rank].comm;
      if (comm == nullptr) continue;  // of another process
      comm->clique = clique;
      comm->rank = rank;
      clique->Join(rank, comm);
    }
  }
}

// The same where they are processes, each of which looks whether all have.
void FinishSplitOfProcesses(ncclComm& comm) {
  std::vector<Clique::Entry> entries;
  for (int rank = 0; rank < comm.parent->size; ++rank) {
    if (!IsPublished(comm.split_path, rank)) return;
    Clique::Entry entry;
    const Bytes bytes = Published(comm.split_path, rank);
    std::memcpy(&entry, bytes.data(), sizeof(entry));
    entry.comm = entry.world_rank == comm.world_rank ? &comm : nullptr;
    entries.push_back(entry);
  }
  FinishSplit(entries, comm.split_path);
}

}  // namespace

void ResetFakeNccl() {
  Fake& fake = Get();
  std::lock_guard<std::mutex> lock(fake.mutex);
  Require(fake.live.empty(), "communicators are left");
  fake.cliques.clear();
  fake.async_errors.clear();
  fake.hanging_inits.clear();
  fake.registered.clear();
  fake.num_aborts = fake.num_fused = 0;
  fake.connects_late = false;
  fake.version = NCCL_VERSION_CODE;
}

int NumFakeNcclComms() {
  std::lock_guard<std::mutex> lock(Get().mutex);
  return static_cast<int>(Get().live.size());
}

int NumFakeNcclAborts() {
  std::lock_guard<std::mutex> lock(Get().mutex);
  return Get().num_aborts;
}

int NumFakeNcclRegistrations() {
  std::lock_guard<std::mutex> lock(Get().mutex);
  return static_cast<int>(Get().registered.size());
}

int NumFakeNcclFusedGroups() {
  std::lock_guard<std::mutex> lock(Get().mutex);
  return Get().num_fused;
}

void SetFakeNcclAsyncError(int rank, ncclResult_t error) {
  std::lock_guard<std::mutex> lock(Get().mutex);
  Get().async_errors[rank] = error;
}

void HangFakeNcclInit(int rank) {
  std::lock_guard<std::mutex> lock(Get().mutex);
  Get().hanging_inits.insert(rank);
}

void ConnectFakeNcclLate() {
  std::lock_guard<std::mutex> lock(Get().mutex);
  Get().connects_late = true;
}

void SetFakeNcclVersion(int version) {
  std::lock_guard<std::mutex> lock(Get().mutex);
  Get().version = version;
}

}  // namespace zero

using zero::Call;
using zero::Get;
using zero::Op;

extern "C" {

ncclResult_t ncclGetVersion(int* version) {
  std::lock_guard<std::mutex> lock(Get().mutex);
  *version = Get().version;
  return ncclSuccess;
}

const char* ncclGetErrorString(ncclResult_t result) {
  switch (result) {
    case ncclRemoteError:
      return "remote process exited or there was a network error";
    case ncclSystemError:
      return "unhandled system error";
    case ncclInternalError:
      return "internal error";
    default:
      return "some error";
  }
}

const char* ncclGetLastError(ncclComm_t) { return "said by the fake"; }

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  std::lock_guard<std::mutex> lock(Get().mutex);
  std::memset(id->internal, 0, sizeof(id->internal));
  std::snprintf(id->internal, sizeof(id->internal), "id-%d-%d", getpid(),
                Get().num_ids++);
  return ncclSuccess;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* out, int size, ncclUniqueId id,
                                    int rank, ncclConfig_t* config) {
  zero::Require(config != nullptr && config->blocking == 0,
                "a communicator that blocks");
  std::lock_guard<std::mutex> lock(Get().mutex);
  auto& clique = Get().cliques[std::string(id.internal)];
  if (clique == nullptr) {
    clique = std::make_shared<zero::Clique>();
    clique->size = size;
    clique->comms.resize(size);
    if (Get().folder != nullptr) {
      clique->path = std::string(Get().folder) + "/" + id.internal;
    }
  }
  if (clique->size != size || clique->comms[rank] != nullptr) {
    return ncclInvalidArgument;
  }
  ncclComm* const comm = zero::MakeComm(Get(), rank);
  comm->clique = clique;
  comm->rank = rank;
  clique->Join(rank, comm);
  *out = comm;
  return ncclInProgress;
}

ncclResult_t ncclCommSplit(ncclComm_t parent, int color, int key,
                           ncclComm_t* out, ncclConfig_t* config) {
  zero::Require(config != nullptr && config->blocking == 0,
                "a communicator that blocks");
  std::lock_guard<std::mutex> lock(Get().mutex);
  ncclComm* const comm = zero::MakeComm(Get(), parent->world_rank);
  const int number = parent->num_splits++;
  const zero::Clique::Entry entry{color, key, parent->world_rank, comm};
  parent->busy_polls = 1;
  if (parent->clique->path.empty()) {
    auto& entries = parent->clique->splits[number];
    entries.push_back(entry);
    if (static_cast<int>(entries.size()) == parent->clique->size) {
      zero::FinishSplit(entries, /*path=*/"");
    }
  } else {
    comm->parent = parent->clique;
    comm->split_path = parent->clique->path + "-split" + std::to_string(number);
    zero::Publish(comm->split_path, parent->rank,
                  zero::Copied(&entry, sizeof(entry)));
  }
  *out = comm;
  return ncclInProgress;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* result) {
  std::lock_guard<std::mutex> lock(Get().mutex);
  zero::Require(Get().live.count(comm) == 1,
                "a question to a communicator that is gone");
  if (comm->clique == nullptr && comm->parent != nullptr) {
    zero::FinishSplitOfProcesses(*comm);
  }
  const auto error = Get().async_errors.find(comm->world_rank);
  if (error != Get().async_errors.end()) {
    *result = error->second;
  } else if (comm->init_hangs || comm->clique == nullptr ||
             !comm->clique->complete() || comm->busy_polls > 0 ||
             zero::IsConnecting(Get(), *comm)) {
    if (comm->busy_polls > 0) --comm->busy_polls;
    *result = ncclInProgress;
  } else {
    *result = ncclSuccess;
  }
  return ncclSuccess;
}

ncclResult_t ncclCommFinalize(ncclComm_t comm) {
  std::lock_guard<std::mutex> lock(Get().mutex);
  comm->finalized = true;
  comm->busy_polls = 2;
  return ncclInProgress;
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  std::lock_guard<std::mutex> lock(Get().mutex);
  zero::Require(comm->finalized, "ncclCommDestroy without ncclCommFinalize");
  zero::Require(Get().live.erase(comm) == 1,
                "ncclCommDestroy of a communicator that is gone");
  return ncclSuccess;
}

ncclResult_t ncclCommAbort(ncclComm_t comm) {
  std::set<cudaStream_t> streams;
  {
    std::lock_guard<std::mutex> lock(Get().mutex);
    zero::Require(Get().live.erase(comm) == 1,
                  "ncclCommAbort of a communicator that is gone");
    comm->aborted = true;
    ++Get().num_aborts;
    streams = comm->streams;
  }
  // Wakes threads that wait for these streams.
  for (const cudaStream_t stream : streams) {
    (void)zero::emulator::Enqueue(stream, [] {});
  }
  return ncclSuccess;
}

ncclResult_t ncclCommRegister(const ncclComm_t comm, void* data, size_t,
                              void** handle) {
  if (zero::emulator::Called("ncclCommRegister") != cudaSuccess) {
    return ncclSystemError;
  }
  std::lock_guard<std::mutex> lock(Get().mutex);
  // Allowed: there are no peers to map it for.
  *handle = nullptr;
  if (comm->clique->size == 1) return ncclSuccess;
  // A handle without memory: an abort leaves nothing to free.
  *handle = reinterpret_cast<void*>(++Get().num_handles);
  (void)data;
  Get().registered.insert(*handle);
  return ncclSuccess;
}

ncclResult_t ncclCommDeregister(const ncclComm_t, void* handle) {
  std::lock_guard<std::mutex> lock(Get().mutex);
  zero::Require(Get().registered.erase(handle) == 1,
                "ncclCommDeregister of what is not registered");
  return ncclSuccess;
}

ncclResult_t ncclGroupStart() {
  ++zero::group.depth;
  return ncclSuccess;
}

ncclResult_t ncclGroupEnd() {
  zero::Require(zero::group.depth > 0, "ncclGroupEnd without a start");
  if (--zero::group.depth > 0) return ncclSuccess;
  zero::Group done = std::exchange(zero::group, {});
  ncclResult_t result = ncclSuccess;
  for (const auto& [comm, stream] : done.users) {
    const ncclResult_t one =
        zero::Enqueue(comm, std::move(done.calls[comm]), stream);
    if (one != ncclSuccess) result = one;
  }
  return result;
}

ncclResult_t ncclAllGather(const void* send, void* recv, size_t count,
                           ncclDataType_t type, ncclComm_t comm,
                           cudaStream_t stream) {
  return zero::Add(comm, stream,
                   {.op = Op::kAllGather,
                    .send = send,
                    .recv = recv,
                    .count = count,
                    .type = type});
}

ncclResult_t ncclReduceScatter(const void* send, void* recv, size_t count,
                               ncclDataType_t type, ncclRedOp_t op,
                               ncclComm_t comm, cudaStream_t stream) {
  return zero::Add(comm, stream,
                   {.op = Op::kReduceScatter,
                    .send = send,
                    .recv = recv,
                    .count = count,
                    .type = type,
                    .red_op = op});
}

ncclResult_t ncclAllReduce(const void* send, void* recv, size_t count,
                           ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm,
                           cudaStream_t stream) {
  return zero::Add(comm, stream,
                   {.op = Op::kAllReduce,
                    .send = send,
                    .recv = recv,
                    .count = count,
                    .type = type,
                    .red_op = op});
}

ncclResult_t ncclReduce(const void* send, void* recv, size_t count,
                        ncclDataType_t type, ncclRedOp_t op, int root,
                        ncclComm_t comm, cudaStream_t stream) {
  return zero::Add(comm, stream,
                   {.op = Op::kReduce,
                    .send = send,
                    .recv = recv,
                    .count = count,
                    .type = type,
                    .red_op = op,
                    .peer = root});
}

ncclResult_t ncclBroadcast(const void* send, void* recv, size_t count,
                           ncclDataType_t type, int root, ncclComm_t comm,
                           cudaStream_t stream) {
  return zero::Add(comm, stream,
                   {.op = Op::kBroadcast,
                    .send = send,
                    .recv = recv,
                    .count = count,
                    .type = type,
                    .peer = root});
}

ncclResult_t ncclSend(const void* send, size_t count, ncclDataType_t type,
                      int peer, ncclComm_t comm, cudaStream_t stream) {
  return zero::Add(comm, stream,
                   {.op = Op::kSend,
                    .send = send,
                    .count = count,
                    .type = type,
                    .peer = peer});
}

ncclResult_t ncclRecv(void* recv, size_t count, ncclDataType_t type, int peer,
                      ncclComm_t comm, cudaStream_t stream) {
  return zero::Add(comm, stream,
                   {.op = Op::kRecv,
                    .recv = recv,
                    .count = count,
                    .type = type,
                    .peer = peer});
}

}  // extern "C"
