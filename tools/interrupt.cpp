#include "tools/interrupt.h"

#include <csignal>

namespace hearth::tools {
namespace {

volatile std::sig_atomic_t g_requested = 0;  // a signal handler can reach nothing else
void on_interrupt(int) {
  g_requested = 1;
}

}  // namespace

InterruptGuard::InterruptGuard() {
  g_requested = 0;
  struct sigaction action {};
  action.sa_handler = on_interrupt;
  action.sa_flags = static_cast<int>(SA_RESETHAND);  // the second Ctrl-C meets the default action
  sigaction(SIGINT, &action, nullptr);
}

InterruptGuard::~InterruptGuard() {
  std::signal(SIGINT, SIG_DFL);
}

bool InterruptGuard::requested() const {
  return g_requested != 0;
}

}  // namespace hearth::tools
