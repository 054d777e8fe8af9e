#include "engine/comm/launch.h"

#include <map>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace zero {
namespace {

using testing::HasSubstr;
using Variables = std::map<std::string, std::string>;

absl::StatusOr<absl::optional<Launch>> Read(const Variables& variables) {
  return ReadLaunch([&](const std::string& name) {
    const auto it = variables.find(name);
    return it == variables.end() ? absl::optional<std::string>()
                                 : absl::optional<std::string>(it->second);
  });
}

std::string ErrorOf(const Variables& variables) {
  const auto launch = Read(variables);
  EXPECT_FALSE(launch.ok());
  EXPECT_TRUE(launch.ok() || absl::IsInvalidArgument(launch.status()));
  return std::string(launch.status().message());
}

Variables With(Variables variables, const std::string& name,
               const std::string& value) {
  variables[name] = value;
  return variables;
}

Variables Without(Variables variables, const std::string& name) {
  variables.erase(name);
  return variables;
}

const Variables kTorch = {{"RANK", "5"},           {"WORLD_SIZE", "8"},
                          {"LOCAL_RANK", "1"},     {"LOCAL_WORLD_SIZE", "4"},
                          {"MASTER_ADDR", "node"}, {"MASTER_PORT", "29500"}};

const Variables kSlurm = {{"SLURM_PROCID", "5"},
                          {"SLURM_STEP_ID", "2"},
                          {"SLURM_STEP_NUM_TASKS", "8"},
                          {"SLURM_NTASKS", "64"},
                          {"SLURM_LOCALID", "1"},
                          {"SLURM_STEP_NUM_NODES", "2"},
                          {"SLURM_NTASKS_PER_NODE", "4"},
                          {"SLURM_JOB_ID", "4711"},
                          {"SLURM_STEP_NODELIST", "gpu[07-08]"}};

TEST(LaunchTest, NoLauncherIsNoLaunch) {
  const auto launch = Read({});
  ASSERT_TRUE(launch.ok());
  EXPECT_FALSE(launch->has_value());
}

TEST(LaunchTest, AWorldOfOneProcessIsNoLaunch) {
  const auto launch = Read({{"RANK", "0"}, {"WORLD_SIZE", "1"}});
  ASSERT_TRUE(launch.ok()) << launch.status();
  EXPECT_FALSE(launch->has_value());
}

TEST(LaunchTest, ReadsTorchrunsVariables) {
  const auto launch = Read(kTorch);
  ASSERT_TRUE(launch.ok()) << launch.status();
  const Launch& it = **launch;
  EXPECT_EQ(it.rank, 5);
  EXPECT_EQ(it.world, 8);
  EXPECT_EQ(it.local_rank, 1);
  EXPECT_EQ(it.local_world, 4);
  EXPECT_EQ(it.store->host, "node");
  EXPECT_EQ(it.store->port, 29500);
  EXPECT_EQ(it.world_name, "WORLD_SIZE");
  EXPECT_FALSE(it.has_mpi);
}

TEST(LaunchTest, TorchrunsOwnStoreKeepsItsPort) {
  const auto launch =
      Read(With(kTorch, "TORCHELASTIC_USE_AGENT_STORE", "True"));
  ASSERT_TRUE(launch.ok()) << launch.status();
  EXPECT_EQ((*launch)->store->port, 29501);
}

TEST(LaunchTest, OnOneMachineLocalRanksAreRanks) {
  const auto launch = Read({{"RANK", "1"},
                            {"WORLD_SIZE", "2"},
                            {"MASTER_ADDR", "127.0.0.1"},
                            {"MASTER_PORT", "1234"}});
  ASSERT_TRUE(launch.ok()) << launch.status();
  EXPECT_EQ((*launch)->local_rank, 1);
  EXPECT_EQ((*launch)->local_world, 2);
}

TEST(LaunchTest, EveryMissingVariableIsNamed) {
  for (const auto& [name, value] : kTorch) {
    const std::string error = ErrorOf(Without(kTorch, name));
    EXPECT_THAT(error, HasSubstr(name + " is not set, but ")) << name;
    EXPECT_THAT(error, HasSubstr("torchrun"));
  }
  EXPECT_EQ(ErrorOf(Without(kTorch, "MASTER_PORT")),
            "MASTER_PORT is not set, but WORLD_SIZE is 8; start the ranks by "
            "torchrun or srun, which set it, or as threads by --ranks N");
}

TEST(LaunchTest, EveryContradictionIsNamed) {
  EXPECT_EQ(ErrorOf(With(kTorch, "RANK", "8")),
            "RANK is 8, but WORLD_SIZE is 8: want RANK in [0, 8)");
  EXPECT_EQ(ErrorOf(With(kTorch, "LOCAL_RANK", "4")),
            "LOCAL_RANK is 4, but LOCAL_WORLD_SIZE is 4: want LOCAL_RANK in "
            "[0, 4)");
  EXPECT_EQ(ErrorOf(With(kTorch, "LOCAL_WORLD_SIZE", "9")),
            "LOCAL_WORLD_SIZE is 9, more than the 8 of WORLD_SIZE");
  EXPECT_EQ(ErrorOf(With(kTorch, "WORLD_SIZE", "many")),
            "WORLD_SIZE \"many\" is not a number >= 1");
  EXPECT_EQ(ErrorOf(With(kTorch, "RANK", "-1")),
            "RANK \"-1\" is not a number >= 0");
  EXPECT_EQ(ErrorOf(With(kTorch, "MASTER_PORT", "70000")),
            "MASTER_PORT \"70000\" is not a number in [1, 65535]");
}

TEST(LaunchTest, ReadsTheVariablesOfASlurmStep) {
  const auto launch = Read(kSlurm);
  ASSERT_TRUE(launch.ok()) << launch.status();
  const Launch& it = **launch;
  EXPECT_EQ(it.rank, 5);
  EXPECT_EQ(it.world, 8);
  EXPECT_EQ(it.local_rank, 1);
  EXPECT_EQ(it.local_world, 4);
  EXPECT_EQ(it.store->host, "gpu07");
  EXPECT_EQ(it.store->port, 16000 + (4711 * 16 + 2) % 16000);
  EXPECT_EQ(it.world_name, "SLURM_STEP_NUM_TASKS");
}

TEST(LaunchTest, TheStoreIsOnTheFirstNodeOfAList) {
  const auto host = [](const std::string& list) {
    return (**Read(With(kSlurm, "SLURM_STEP_NODELIST", list))).store->host;
  };
  EXPECT_EQ(host("alpha"), "alpha");
  EXPECT_EQ(host("alpha,beta[1-3]"), "alpha");
  EXPECT_EQ(host("gpu[007,012-015]"), "gpu007");
  EXPECT_EQ(host("gpu[3]"), "gpu3");
}

TEST(LaunchTest, TorchsNamesGoBeforeSlurms) {
  Variables both = kSlurm;
  both.insert(kTorch.begin(), kTorch.end());
  EXPECT_EQ((**Read(both)).world_name, "WORLD_SIZE");
}

const Variables kOpenMpi = {{"OMPI_COMM_WORLD_RANK", "5"},
                            {"OMPI_COMM_WORLD_SIZE", "8"},
                            {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                            {"OMPI_COMM_WORLD_LOCAL_SIZE", "4"}};

TEST(LaunchTest, OpenMpisNamesHaveMpiAndMayHaveAnAddress) {
  const auto bare = Read(kOpenMpi);
  ASSERT_TRUE(bare.ok()) << bare.status();
  EXPECT_TRUE((*bare)->has_mpi);
  EXPECT_THAT(
      std::string((*bare)->store.status().message()),
      HasSubstr("MASTER_ADDR is not set, but OMPI_COMM_WORLD_SIZE is 8 (mpirun "
                "-x MASTER_ADDR=HOST -x MASTER_PORT=N)"));
  const auto launch =
      Read(With(With(kOpenMpi, "MASTER_ADDR", "there"), "MASTER_PORT", "4000"));
  ASSERT_TRUE(launch.ok()) << launch.status();
  EXPECT_EQ((*launch)->rank, 5);
  EXPECT_EQ((*launch)->world, 8);
  EXPECT_EQ((*launch)->local_rank, 1);
  EXPECT_EQ((*launch)->local_world, 4);
  EXPECT_EQ((*launch)->store->host, "there");
  EXPECT_EQ((*launch)->store->port, 4000);
  EXPECT_FALSE(Read(With(kOpenMpi, "OMPI_COMM_WORLD_SIZE", "1"))->has_value());
}

// There SLURM_PROCID is that of mpirun's helper on each host.
TEST(LaunchTest, MpirunInASlurmJobCountsByItself) {
  Variables both = kSlurm;
  both.insert(kOpenMpi.begin(), kOpenMpi.end());
  both["SLURM_PROCID"] = "0";
  const auto launch = Read(both);
  ASSERT_TRUE(launch.ok()) << launch.status();
  EXPECT_EQ((*launch)->world_name, "OMPI_COMM_WORLD_SIZE");
  EXPECT_EQ((*launch)->rank, 5);
}

TEST(LaunchTest, ReadsMpichsVariables) {
  const auto launch = Read({{"PMI_RANK", "5"},
                            {"PMI_SIZE", "8"},
                            {"MPI_LOCALRANKID", "1"},
                            {"MPI_LOCALNRANKS", "4"}});
  ASSERT_TRUE(launch.ok()) << launch.status();
  EXPECT_TRUE((*launch)->has_mpi);
  EXPECT_EQ((*launch)->rank, 5);
  EXPECT_EQ((*launch)->world, 8);
  EXPECT_EQ((*launch)->local_rank, 1);
  EXPECT_EQ((*launch)->local_world, 4);
}

TEST(LaunchTest, AnAddressMayBeGivenInASlurmStep) {
  const auto launch =
      Read(With(With(kSlurm, "MASTER_ADDR", "there"), "MASTER_PORT", "4000"));
  ASSERT_TRUE(launch.ok()) << launch.status();
  EXPECT_EQ((*launch)->store->host, "there");
  EXPECT_THAT(
      ErrorOf(With(kSlurm, "MASTER_ADDR", "there")),
      HasSubstr("MASTER_PORT is not set, but SLURM_STEP_NUM_TASKS is 8"));
}

TEST(LaunchTest, AShellInASlurmJobIsNoStep) {
  const auto launch = Read({{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "8"}});
  ASSERT_TRUE(launch.ok()) << launch.status();
  EXPECT_FALSE(launch->has_value());
}

TEST(LaunchTest, WithoutItsVariablesAProcessIsAlone) {
  for (Variables variables : {kTorch, kSlurm, kOpenMpi}) {
    ASSERT_TRUE((*Read(variables)).has_value());
    std::erase_if(variables,
                  [](const auto& it) { return IsLaunchVariable(it.first); });
    EXPECT_FALSE((*Read(variables)).has_value());
  }
  EXPECT_FALSE(IsLaunchVariable("PATH"));
}

TEST(LaunchTest, SeveralNodesWantTasksPerNode) {
  EXPECT_THAT(ErrorOf(Without(kSlurm, "SLURM_NTASKS_PER_NODE")),
              HasSubstr("SLURM_NTASKS_PER_NODE is not set, but "
                        "SLURM_STEP_NUM_NODES is 2 (srun "
                        "--ntasks-per-node)"));
}

TEST(LaunchTest, ASlurmStepSaysItsTasksOfEachNode) {
  Variables variables = Without(kSlurm, "SLURM_NTASKS_PER_NODE");
  variables["SLURM_STEP_TASKS_PER_NODE"] = "4(x2)";
  const auto launch = Read(variables);
  ASSERT_TRUE(launch.ok()) << launch.status();
  EXPECT_EQ((*launch)->local_world, 4);
  variables["SLURM_STEP_TASKS_PER_NODE"] = "5,3";
  EXPECT_THAT(
      ErrorOf(variables),
      HasSubstr("SLURM_STEP_TASKS_PER_NODE is \"5,3\": every node needs "
                "the same number of tasks"));
}

}  // namespace
}  // namespace zero
