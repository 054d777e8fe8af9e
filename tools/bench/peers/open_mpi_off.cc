// Stands in for open_mpi.cc where Open MPI is not found.
#include <iostream>

int main() {
  std::cout << R"({"error": "Open MPI was not there when this was built: )"
            << R"(apt-get install libopenmpi-dev openmpi-bin, then )"
            << R"(tools/configure"})" << std::endl;
  return 1;
}
