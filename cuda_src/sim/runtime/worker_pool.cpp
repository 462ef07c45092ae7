// OS threads that stay alive between launches: a thread's shared-memory window and the pages of its stacks are kept warm, and
// a launch does not pay for creating threads. A worker sleeps on a semaphore of its own until it is handed a task.

#include <cfenv>
#include <memory>
#include <mutex>
#include <pthread.h>
#include <semaphore.h>
#include <thread>
#include <vector>

#include "launch.h"

namespace cki::sim {

namespace {

void sleep_until_posted(sem_t& semaphore) {
  while (sem_wait(&semaphore) != 0) {
  }
}

// A GPU keeps denormal numbers and rounds to nearest, whatever the caller's thread does: TensorFlow runs CPU kernels with
// denormals flushed to zero, and a new thread inherits that.
class DeviceArithmetic {
 public:
  DeviceArithmetic() {
    std::fegetenv(&callers_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~DeviceArithmetic() { std::fesetenv(&callers_); }
  DeviceArithmetic(const DeviceArithmetic&) = delete;
  DeviceArithmetic& operator=(const DeviceArithmetic&) = delete;

 private:
  std::fenv_t callers_;
};

struct Worker {
  sem_t start, done;
  const std::function<void(unsigned)>* work = nullptr;
  unsigned number = 0;

  Worker() {
    sem_init(&start, 0, 0);
    sem_init(&done, 0, 0);
    std::thread([this] {
      const DeviceArithmetic arithmetic;
      for (;;) {
        sleep_until_posted(start);
        (*work)(number);
        sem_post(&done);
      }
    }).detach();
  }
};

struct Pool {
  std::mutex mutex;
  std::vector<Worker*> idle;
};

// Never destroyed: its threads may sleep in it when the process ends. After fork() the child has none of the threads, so it
// gets a new pool; what the parent's held is left alone.
Pool* pool = nullptr;
std::once_flag once;

Pool& the_pool() {
  std::call_once(once, [] {
    pool = new Pool;
    pthread_atfork(nullptr, nullptr, [] { pool = new Pool; });
  });
  return *pool;
}

Worker* take_worker() {
  Pool& p = the_pool();
  const std::lock_guard<std::mutex> lock(p.mutex);
  if (p.idle.empty()) return new Worker;
  Worker* worker = p.idle.back();
  p.idle.pop_back();
  return worker;
}

}  // namespace

void run_on_threads(unsigned count, const std::function<void(unsigned)>& work) {
  std::vector<Worker*> workers;
  for (unsigned i = 1; i < count; ++i) {
    Worker* worker = take_worker();
    worker->work = &work;
    worker->number = i;
    sem_post(&worker->start);
    workers.push_back(worker);
  }
  {
    const DeviceArithmetic arithmetic;
    work(0);
  }
  for (Worker* worker : workers) sleep_until_posted(worker->done);
  if (workers.empty()) return;
  Pool& p = the_pool();
  const std::lock_guard<std::mutex> lock(p.mutex);
  p.idle.insert(p.idle.end(), workers.rbegin(), workers.rend());
}

}  // namespace cki::sim
