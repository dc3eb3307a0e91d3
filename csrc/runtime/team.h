// SPDX-License-Identifier: Apache-2.0
// Threads for a call of a kernel that waits often.
//
// [Note: threads that wait] OpenMP's threads stay at their cores for milliseconds after each
// region, so that the next one begins at once. That is right for a layer of a network, whose
// regions follow each other. A partitioner's kernels alternate: thousands of short regions, and
// between them work that one thread must do alone, in an order that shall not depend on threads.
// There the waiting added up to two fifths to the CPU seconds; and where other processes want the
// cores, too, a thread that waits keeps the one that it waits for from running. So these threads
// wait busily for some ten microseconds only, then sleep. They live as long as a call of a kernel,
// so none is left when a process forks.

#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "runtime/parallel.h"

#if (defined(__x86_64__) || defined(__i386__)) && defined(__GNUC__)
#define GRAPHSHARD_PAUSE() __builtin_ia32_pause()
#elif defined(__aarch64__) && defined(__GNUC__)
#define GRAPHSHARD_PAUSE() __asm__ __volatile__("yield")
#else
#define GRAPHSHARD_PAUSE()
#endif

namespace graphshard {

class Team {
 public:
  // Threads start when the first tasks come.
  explicit Team(int num_threads)
      : num_threads_(static_cast<int>(std::clamp<int64_t>(num_threads, 1, kMostThreads))) {}

  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  ~Team() {
    if (workers_.empty()) return;
    ends_.store(true, std::memory_order_relaxed);  // beginning a round publishes it
    begin_round();
    for (std::thread& worker : workers_) worker.join();
  }

  int num_threads() const { return num_threads_; }

  // Calls task(i) for i in [0, num_tasks), in no particular order; the caller takes tasks, too, and
  // never waits for a thread that has not come. What a task throws is thrown here, after the
  // others.
  template <typename Task>
  void run(int64_t num_tasks, const Task& task) {
    if (num_threads_ == 1 || num_tasks <= 1) {
      for (int64_t i = 0; i < num_tasks; ++i) task(i);
      return;
    }
    start();
    call_ = [](const void* the_task, int64_t i) { (*static_cast<const Task*>(the_task))(i); };
    task_ = &task;
    num_tasks_ = num_tasks;
    next_.store(0, std::memory_order_relaxed);
    state_.store(kOpen, std::memory_order_release);
    begin_round();
    take();
    state_.fetch_and(~kOpen, std::memory_order_acq_rel);
    wait([&] { return state_.load(std::memory_order_acquire) == 0; }, ended_);
    if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
  }

 private:
  // A thread that comes to a round adds 1 as long as the round is open, and takes it away again.
  static constexpr uint32_t kOpen = 1u << 31;
  static constexpr int kBusyWaits = 4000;

  void start() {
    while (static_cast<int>(workers_.size()) + 1 < num_threads_) {
      workers_.emplace_back([this] { work(); });
    }
  }

  void begin_round() {
    {
      const std::lock_guard lock(mutex_);
      round_.fetch_add(1, std::memory_order_release);
    }
    began_.notify_all();
  }

  template <typename Condition>
  void wait(const Condition& is_true, std::condition_variable& notified) {
    for (int i = 0; i < kBusyWaits; ++i) {
      if (is_true()) return;
      GRAPHSHARD_PAUSE();
    }
    std::unique_lock lock(mutex_);
    notified.wait(lock, is_true);
  }

  void work() {
    for (uint32_t seen = 0;;) {
      wait([&] { return round_.load(std::memory_order_acquire) != seen; }, began_);
      seen = round_.load(std::memory_order_acquire);
      if (ends_.load(std::memory_order_relaxed)) return;
      uint32_t state = state_.load(std::memory_order_acquire);
      while ((state & kOpen) &&
             !state_.compare_exchange_weak(state, state + 1, std::memory_order_acq_rel)) {
      }
      if (!(state & kOpen)) continue;
      take();
      if (state_.fetch_sub(1, std::memory_order_acq_rel) == 1) {
        const std::lock_guard lock(mutex_);
        ended_.notify_one();
      }
    }
  }

  void take() {
    for (;;) {
      const int64_t i = next_.fetch_add(1, std::memory_order_relaxed);
      if (i >= num_tasks_) return;
      try {
        call_(task_, i);
      } catch (...) {
        const std::lock_guard lock(mutex_);
        error_ = std::current_exception();
      }
    }
  }

  const int num_threads_;
  std::vector<std::thread> workers_;
  std::mutex mutex_;
  std::condition_variable began_;
  std::condition_variable ended_;
  std::atomic<uint32_t> round_{0};
  std::atomic<uint32_t> state_{0};
  std::atomic<int64_t> next_{0};
  std::atomic<bool> ends_{false};
  int64_t num_tasks_ = 0;
  void (*call_)(const void*, int64_t) = nullptr;
  const void* task_ = nullptr;
  std::exception_ptr error_;
};

// Tasks of a call that has no others.
template <typename Task>
void run_once(int64_t num_tasks, int num_threads, const Task& task) {
  Team(static_cast<int>(std::min<int64_t>(num_threads, num_tasks))).run(num_tasks, task);
}

}  // namespace graphshard
