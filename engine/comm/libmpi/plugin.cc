// libmpi behind a table of functions. Not linked into zero: see mpi_table.h.
#include <mpi.h>

#include <algorithm>
#include <string>
#include <vector>

#include "engine/comm/mpi_table.h"

namespace zero {
namespace {

MPI_Comm world = MPI_COMM_NULL;
uint32_t largest_tag = 0;
std::vector<MPI_Request> active;
std::vector<void*> owners;         // of each of them
std::vector<int64_t> expected;     // bytes; < 0: a sent message
std::vector<int> ended;            // indices
std::vector<MPI_Status> statuses;  // likewise
std::string text;                  // of the last error
std::string library;
std::vector<std::string> error_texts;  // of the last poll

const char* Text(int code) {
  if (code == MPI_SUCCESS) return nullptr;
  char words[MPI_MAX_ERROR_STRING] = "";
  int size = 0;
  MPI_Error_string(code, words, &size);
  text.assign(words, size);
  return text.c_str();
}

const char* Init(int* process, int* num_processes, const char** name) {
  int level = 0;
  int code = MPI_Init_thread(nullptr, nullptr, MPI_THREAD_SERIALIZED, &level);
  if (code != MPI_SUCCESS) return Text(code);
  // Messages of another library in this program are not ours.
  code = MPI_Comm_dup(MPI_COMM_WORLD, &world);
  if (code != MPI_SUCCESS) return Text(code);
  MPI_Comm_set_errhandler(world, MPI_ERRORS_RETURN);
  MPI_Comm_rank(world, process);
  MPI_Comm_size(world, num_processes);
  int* tag = nullptr;
  int has_tag = 0;
  MPI_Comm_get_attr(world, MPI_TAG_UB, &tag, &has_tag);
  largest_tag = has_tag != 0 ? static_cast<uint32_t>(*tag) : 32767;
  char words[MPI_MAX_LIBRARY_VERSION_STRING] = "";
  int size = 0;
  MPI_Get_library_version(words, &size);
  library.assign(words, size);
  // "Open MPI v4.1.4, package: ..."; MPICH writes lines and tabs.
  library.erase(std::min(library.find_first_of(",\n"), library.size()));
  for (char& c : library) {
    if (c == '\t') c = ' ';
  }
  *name = library.c_str();
  return nullptr;
}

const char* Broadcast(void* data, int bytes, int root) {
  return Text(MPI_Bcast(data, bytes, MPI_BYTE, root, world));
}

const char* Start(bool sends, const MemoryRun* runs, int num_runs, int peer,
                  uint32_t tag, void* owner) {
  void* data = runs[0].data;
  int count = static_cast<int>(runs[0].bytes);
  MPI_Datatype type = MPI_BYTE;
  int64_t bytes = 0;
  for (int i = 0; i < num_runs; ++i) bytes += runs[i].bytes;
  if (num_runs > 1) {
    // MPI itself gathers from and scatters to the runs.
    std::vector<int> sizes(num_runs);
    std::vector<MPI_Aint> places(num_runs);
    for (int i = 0; i < num_runs; ++i) {
      sizes[i] = static_cast<int>(runs[i].bytes);
      MPI_Get_address(runs[i].data, &places[i]);
    }
    int code = MPI_Type_create_hindexed(num_runs, sizes.data(), places.data(),
                                        MPI_BYTE, &type);
    if (code == MPI_SUCCESS) code = MPI_Type_commit(&type);
    if (code != MPI_SUCCESS) return Text(code);
    data = MPI_BOTTOM;
    count = 1;
  }
  const int limited = static_cast<int>(tag % largest_tag);
  MPI_Request request = MPI_REQUEST_NULL;
  const int code =
      sends ? MPI_Isend(data, count, type, peer, limited, world, &request)
            : MPI_Irecv(data, count, type, peer, limited, world, &request);
  if (num_runs > 1) MPI_Type_free(&type);  // once the message is sent
  if (code != MPI_SUCCESS) return Text(code);
  active.push_back(request);
  owners.push_back(owner);
  expected.push_back(sends ? -1 : bytes);
  return nullptr;
}

// The error's text; null if the message ended as it should.
const char* ErrorOf(int code, const MPI_Status& status, int64_t bytes) {
  if (code != MPI_SUCCESS) return Text(code);
  int received = 0;
  if (bytes >= 0) MPI_Get_count(&status, MPI_BYTE, &received);
  if (bytes < 0 || received == bytes) return nullptr;
  text = "a message of " + std::to_string(received) + " bytes, want " +
         std::to_string(bytes);
  return text.c_str();
}

int Poll(void** ended_owners, const char** errors) {
  ended.resize(active.size());
  statuses.resize(active.size());
  int num_ended = 0;
  if (active.empty()) {
    // Sent messages may still be in the library.
    int flag = 0;
    MPI_Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, world, &flag, MPI_STATUS_IGNORE);
    return 0;
  }
  const int code = MPI_Testsome(static_cast<int>(active.size()), active.data(),
                                &num_ended, ended.data(), statuses.data());
  if (code != MPI_SUCCESS && code != MPI_ERR_IN_STATUS) {
    errors[0] = Text(code);
    return -1;
  }
  if (num_ended == MPI_UNDEFINED) num_ended = 0;
  error_texts.resize(num_ended);
  for (int i = 0; i < num_ended; ++i) {
    const int at = ended[i];
    // MPI sets the error of a status only if one of them has one.
    const char* const error =
        ErrorOf(code == MPI_SUCCESS ? MPI_SUCCESS : statuses[i].MPI_ERROR,
                statuses[i], expected[at]);
    ended_owners[i] = owners[at];
    errors[i] = nullptr;
    if (error != nullptr) {
      error_texts[i] = error;
      errors[i] = error_texts[i].c_str();
    }
    owners[at] = nullptr;
  }
  size_t kept = 0;
  for (size_t i = 0; i < active.size(); ++i) {
    if (owners[i] == nullptr) continue;
    active[kept] = active[i];
    owners[kept] = owners[i];
    expected[kept] = expected[i];
    ++kept;
  }
  active.resize(kept);
  owners.resize(kept);
  expected.resize(kept);
  return num_ended;
}

const char* Finalize() {
  MPI_Comm_free(&world);
  return Text(MPI_Finalize());
}

void Abort(int code) { MPI_Abort(MPI_COMM_WORLD, code); }

constexpr MpiTable kTable = {kMpiTableVersion, Init, Broadcast, Start, Poll,
                             Finalize,         Abort};

}  // namespace
}  // namespace zero

extern "C" const zero::MpiTable* ZeroMpiTable() { return &zero::kTable; }
