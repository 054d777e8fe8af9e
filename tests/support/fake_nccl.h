// Settings and counters of the fake NCCL (fake_nccl.cc) for tests. It has the C
// functions that engine/comm/nccl calls, over the fake CUDA runtime: ranks are
// threads, collectives run on their streams when all ranks' streams have
// reached them with matching calls; else they wait, like NCCL, until they are
// aborted. With FAKE_NCCL_FOLDER in the environment each rank is a process:
// they exchange their calls and data as files of that folder, which must be
// new.
#ifndef ZERO_TESTS_SUPPORT_FAKE_NCCL_H_
#define ZERO_TESTS_SUPPORT_FAKE_NCCL_H_

#include <nccl.h>

namespace zero {

// Resets the library. REQUIRES: no communicator is left.
void ResetFakeNccl();

// Communicators that are neither destroyed nor aborted.
int NumFakeNcclComms();
// Communicators that were aborted, and registrations that are in force.
int NumFakeNcclAborts();
int NumFakeNcclRegistrations();
// Groups with several calls of one communicator in them.
int NumFakeNcclFusedGroups();

// Rank `rank` of the first communicator gets this error on all of its
// communicators; its peers notice nothing.
void SetFakeNcclAsyncError(int rank, ncclResult_t error);
// The initialization of that rank's communicators never ends.
void HangFakeNcclInit(int rank);
// From now on communicators connect as NCCL's do: their first collective is in
// progress until all ranks have issued it.
void ConnectFakeNcclLate();
// The result of ncclGetVersion.
void SetFakeNcclVersion(int version);

}  // namespace zero

#endif  // ZERO_TESTS_SUPPORT_FAKE_NCCL_H_
