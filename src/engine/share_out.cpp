#include "engine/share_out.h"

#include "core/error.h"

namespace hearth::engine {

Shares share_out(std::span<const ExpertWork> experts, const ShareRates& rates) {
  std::vector<size_t> order;
  for (size_t i = 0; i < experts.size(); ++i) {
    if (experts[i].tokens > 0) order.push_back(i);
  }
  std::ranges::stable_sort(order, [&](size_t a, size_t b) { return experts[a].tokens > experts[b].tokens; });
  // What the CPU has left when all before the k-th visit.
  std::vector<double> left(order.size() + 1);
  for (size_t k = order.size(); k-- > 0;) {
    const ExpertWork& e = experts[order[k]];
    left[k] = left[k + 1] + std::max(rates.cpu_byte * e.bytes, rates.cpu_product * e.weights * e.tokens);
  }
  Shares s{std::vector<bool>(experts.size()), 0, left[0]};
  for (size_t k = 0; k < order.size(); ++k) {
    const double link = (k == 0 ? rates.first_visit : s.link_seconds) + rates.link_byte * experts[order[k]].bytes;
    if (std::max(link, left[k + 1]) >= s.seconds()) break;
    s.visits[order[k]] = true;
    s.link_seconds = link, s.cpu_seconds = left[k + 1];
  }
  return s;
}

std::vector<bool> visitors(std::span<const Expert> host, std::span<const int32_t> ids, const ShareRates& rates) {
  std::vector<ExpertWork> work(host.size());
  for (const int32_t id : ids) {
    HEARTH_CHECK(id >= 0 && id < std::ssize(host), "expert {} of {}", id, host.size());
    const Expert& e = host[static_cast<size_t>(id)];
    if (!e) continue;
    ExpertWork& w = work[static_cast<size_t>(id)];
    if (w.tokens++ > 0) continue;
    w.bytes = static_cast<double>(e.bytes());
    for (const Matrix* m : {&e.ffn.gate, &e.ffn.up, &e.ffn.down, &e.ffn.down_t}) {
      if (*m) w.weights += static_cast<double>(m->rows * m->cols);
    }
  }
  return share_out(work, rates).visits;
}

}  // namespace hearth::engine
