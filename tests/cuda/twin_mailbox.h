#pragma once
// The CPU's side of a mailbox in tests: a thread that records what it is handed and answers.
#include <functional>
#include <thread>

#include "core/mailbox.h"
#include "twin.h"

namespace hearth::test {

// What one hand-off brought of one token.
struct Received {
  std::vector<float> x;
  std::vector<int32_t> ids;
};

// What the CPU answers: 2 x[i] + (sum of the ids) / 1000.
inline std::vector<float> answer_to(const Received& got) {
  float extra = 0.0f;
  for (const int32_t id : got.ids) extra += static_cast<float>(id) / 1000.0f;
  std::vector<float> y;
  for (const float v : got.x) y.push_back(2 * v + extra);
  return y;
}

// Serves `rounds` hand-offs of T rows of n floats, with or without neurons.
class Server {
 public:
  enum class Brings { x, neurons };
  Server(Mailbox& mailbox, int64_t n, int rounds, int64_t T = 1, Brings brings = Brings::neurons)
      : thread_([this, &mailbox, n, rounds, T, brings] {
          for (int r = 0; r < rounds; ++r) {
            const float* x = mailbox.wait_input();
            const NeuronLists lists = brings == Brings::neurons ? mailbox.wait_neurons(T) : NeuronLists{};
            for (int64_t t = 0; t < T; ++t) {
              Received got;
              got.x.assign(x + t * n, x + (t + 1) * n);
              if (lists.ids != nullptr)
                got.ids.assign(lists.ids + t * lists.stride, lists.ids + t * lists.stride + lists.count[t]);
              const std::vector<float> y = answer_to(got);
              std::copy(y.begin(), y.end(), mailbox.answer_buffer() + t * n);
              received_.push_back(std::move(got));
            }
            mailbox.publish(0, T * n);
            mailbox.answer();
          }
        }) {}
  ~Server() {
    if (thread_.joinable()) thread_.join();
  }
  // Waits for the last round. Token by token, round by round.
  const std::vector<Received>& received() {
    if (thread_.joinable()) thread_.join();
    return received_;
  }

 private:
  std::vector<Received> received_;
  std::thread thread_;
};

}  // namespace hearth::test
