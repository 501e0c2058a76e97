#include "hub/settings.h"

#include <algorithm>
#include <cctype>
#include <cstdlib>

#include "core/error.h"
#include "core/file.h"
#include "core/log.h"

namespace hearth::hub {
namespace {

namespace fs = std::filesystem;

// The first of these variables that is set and not empty.
std::string variable(std::initializer_list<const char*> names) {
  for (const char* name : names) {
    if (const char* value = std::getenv(name); value != nullptr && *value != '\0') return value;
  }
  return {};
}

fs::path folder(std::initializer_list<const char*> names) {
  const std::string text = variable(names);
  if (text != "~" && text.rfind("~/", 0) != 0) return text;
  const std::string home = variable({"HOME"});
  return home.empty() ? fs::path(text) : fs::path(home + text.substr(1));
}

fs::path home_of_hub() {
  if (const fs::path home = folder({"HF_HOME"}); !home.empty()) return home;
  if (const fs::path cache = folder({"XDG_CACHE_HOME"}); !cache.empty()) return cache / "huggingface";
  if (const fs::path home = folder({"HOME"}); !home.empty()) return home / ".cache" / "huggingface";
  fail("there is no folder for models: none of HF_HOME, XDG_CACHE_HOME and HOME is set; set HF_HOME");
}

bool is_true(std::string word) {
  std::transform(word.begin(), word.end(), word.begin(), [](unsigned char c) { return std::toupper(c); });
  return word == "1" || word == "ON" || word == "YES" || word == "TRUE";
}

// Without white space around it. Throws when it could not be part of a header.
std::string checked_token(const std::string& text, const std::string& source) {
  const auto space = [](unsigned char c) { return std::isspace(c) != 0; };
  const auto begin = std::find_if_not(text.begin(), text.end(), space);
  const auto end = std::find_if_not(text.rbegin(), std::make_reverse_iterator(begin), space).base();
  const std::string token(begin, end);
  if (!std::all_of(token.begin(), token.end(), [](char c) { return c > 0x20 && c < 0x7F; }))
    fail("{} is no token: it holds spaces or control characters", source);
  return token;
}

std::string find_token(const fs::path& home) {
  if (const std::string token = variable({"HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"}); !token.empty())
    return checked_token(token, "HF_TOKEN");
  fs::path path = folder({"HF_TOKEN_PATH"});
  if (path.empty()) path = home / "token";
  std::error_code ignored;
  if (!fs::exists(path, ignored)) return {};
  return checked_token(read_text_file(path, 4096), fmt::format("'{}'", path.string()));
}

// SSL_CERT_FILE. Without it libcurl looks where the system that it was built on keeps them, which an archive that
// brings it along may find nowhere: then the place of another distribution.
std::string find_certificates() {
  const std::string chosen = variable({"SSL_CERT_FILE"});
  std::error_code ignored;
  if (!chosen.empty() || fs::exists("/etc/ssl/certs/ca-certificates.crt", ignored)) return chosen;
  for (const char* path : {"/etc/pki/tls/certs/ca-bundle.crt", "/etc/ssl/ca-bundle.pem", "/etc/ssl/cert.pem"}) {
    if (fs::exists(path, ignored)) return path;
  }
  return {};
}

}  // namespace

std::string origin_of(const std::string& url) {
  const size_t scheme = url.find("://");
  if (scheme == std::string::npos) return {};
  std::string origin = url.substr(0, url.find_first_of("/?#", scheme + 3));
  std::transform(origin.begin(), origin.end(), origin.begin(), [](unsigned char c) { return std::tolower(c); });
  const std::string protocol = origin.substr(0, scheme);
  const bool plain = origin.find_first_of("@\\ ") == std::string::npos && origin.size() > scheme + 3;
  return (protocol == "http" || protocol == "https") && plain ? origin : std::string();
}

void Settings::tell(const std::string& text) const {
  if (notice) return notice(text);
  log::info("{}", text);
}

Settings Settings::from_environment() {
  Settings s;
  if (std::string endpoint = variable({"HF_ENDPOINT"}); !endpoint.empty()) {
    while (endpoint.back() == '/') endpoint.pop_back();
    if (origin_of(endpoint).empty())
      fail("HF_ENDPOINT is '{}', an address as https://huggingface.co was expected", endpoint);
    s.endpoint = endpoint;
  }
  s.cache = folder({"HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"});
  const fs::path home = home_of_hub();
  if (s.cache.empty()) s.cache = home / "hub";
  s.token = find_token(home);
  s.certificates = find_certificates();
  s.offline = is_true(variable({"HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"}));
  return s;
}

}  // namespace hearth::hub
