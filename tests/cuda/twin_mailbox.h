#pragma once
// The CPU's side of a mailbox in tests: a thread that records what it is handed and answers.
#include <functional>
#include <thread>

#include "core/mailbox.h"
#include "twin.h"

namespace hearth::test {

// What one hand-off brought.
struct Received {
  std::vector<float> x;
  std::vector<int32_t> ids;
  std::vector<float> values;
};

// Serves `rounds` hand-offs of n floats, with answer[i] = 2 x[i] + round + (sum of the ids) / 1000.
class Server {
 public:
  Server(Mailbox& mailbox, int64_t n, int rounds)
      : thread_([this, &mailbox, n, rounds] {
          for (int r = 0; r < rounds; ++r) {
            const MailboxRequest request = mailbox.wait_request();
            Received got;
            got.x.assign(request.x, request.x + n);
            got.ids.assign(request.ids, request.ids + *request.n_ids);
            got.values.assign(request.values, request.values + *request.n_ids);
            float extra = static_cast<float>(r);
            for (const int32_t id : got.ids) extra += static_cast<float>(id) / 1000.0f;
            for (int64_t i = 0; i < n; ++i) mailbox.answer_buffer()[i] = 2 * got.x[static_cast<size_t>(i)] + extra;
            received_.push_back(std::move(got));
            mailbox.publish(0, n);
            mailbox.answer();
          }
        }) {}
  ~Server() {
    if (thread_.joinable()) thread_.join();
  }
  // Waits for the last round.
  const std::vector<Received>& received() {
    if (thread_.joinable()) thread_.join();
    return received_;
  }

 private:
  std::vector<Received> received_;
  std::thread thread_;
};

}  // namespace hearth::test
