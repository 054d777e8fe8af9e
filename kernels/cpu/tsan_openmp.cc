// Tells ThreadSanitizer about OpenMP's fork and join; empty in every other
// build. libgomp is not instrumented, so TSan would see neither and call every
// parallel loop a race. Every parallel region of ours and of oneDNN goes
// through GOMP_parallel; this one precedes libgomp's. (Limiting OpenMP to one
// thread does not help: oneDNN cuts its work for the threads it asked for and
// leaves the rest undone.)
#if defined(__SANITIZE_THREAD__)

#include <dlfcn.h>
#include <sanitizer/tsan_interface.h>

namespace {

struct Team {
  void (*body)(void*);
  void* data;
  char join;  // an address to synchronize on
};

void RunBody(void* argument) {
  Team* team = static_cast<Team*>(argument);
  __tsan_acquire(team);
  team->body(team->data);
  __tsan_release(&team->join);
}

}  // namespace

extern "C" void GOMP_parallel(void (*body)(void*), void* data,
                              unsigned num_threads, unsigned flags) {
  using Function = void(void (*)(void*), void*, unsigned, unsigned);
  static Function* const libgomp =
      reinterpret_cast<Function*>(dlsym(RTLD_NEXT, "GOMP_parallel"));
  Team team{body, data, 0};
  __tsan_release(&team);
  libgomp(RunBody, &team, num_threads, flags);
  __tsan_acquire(&team.join);
}

// oneDNN is not instrumented either. TSan sees its calls of `new` and its
// locks, but not the guards of static variables that order these, so ranks that
// make their first primitives concurrently look like a race.
extern "C" const char* __tsan_default_suppressions() {
  return "race:libdnnl.so\n";
}

#endif  // __SANITIZE_THREAD__
