#pragma once
// Where models come from and where they are kept: the environment of huggingface_hub, and the limits of a transfer.
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>

namespace hearth::hub {

struct Settings {
  std::string endpoint = "https://huggingface.co";  // without a slash at its end
  std::string token;                                // empty: none; sent to the endpoint's host alone
  std::filesystem::path cache;                      // the folder of models--OWNER--NAME
  std::string certificates;                         // a file of certificates to trust; empty: the system's
  bool offline = false;                             // ask nobody

  std::chrono::milliseconds connect_timeout{10'000};
  // A transfer below stall_rate bytes/s for so long is cut and goes on with a new connection.
  std::chrono::seconds stall_time{30};
  int64_t stall_rate = 1024;
  // After so many failures in a row without one new byte, the last one is told. Pauses double, up to the longest.
  int attempts = 6;
  std::chrono::milliseconds first_pause{1'000}, longest_pause{30'000};
  // A server that asks for a longer pause (Retry-After) is told to the user instead.
  std::chrono::seconds longest_retry_after{300};
  std::function<bool()> cancelled = [] { return false; };
  // What a user who waits should know. Default: log::info.
  std::function<void(const std::string&)> notice;
  void tell(const std::string& text) const;

  // HF_ENDPOINT; HF_TOKEN, or the file HF_TOKEN_PATH (HF_HOME/token); HF_HUB_CACHE (HF_HOME/hub); HF_HUB_OFFLINE;
  // SSL_CERT_FILE. HF_HOME is XDG_CACHE_HOME/huggingface, or ~/.cache/huggingface. Throws Error when the endpoint is
  // no http(s) address or no folder can be named.
  static Settings from_environment();
};

// "https://huggingface.co" of "https://huggingface.co/a/b"; with its port where one is written. Empty for anything
// but http and https.
std::string origin_of(const std::string& url);

}  // namespace hearth::hub
