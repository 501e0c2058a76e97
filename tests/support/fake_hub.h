#pragma once
// A hub on this machine that can misbehave: the API and `resolve` on one port, the files on another (the "CDN").
#include <gtest/gtest.h>
#include <httplib.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/rsa.h>
#include <openssl/x509v3.h>

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "hub/pull.h"
#include "support/paths.h"

namespace hearth::test {

inline const std::string kCommit(40, 'a');
inline const std::string kRepository = "owner/model-GGUF";

inline std::string hexadecimal_digest(const std::string& bytes, const EVP_MD* method) {
  unsigned char out[EVP_MAX_MD_SIZE];
  unsigned n = 0;
  EVP_Digest(bytes.data(), bytes.size(), out, &n, method, nullptr);
  std::string text;
  for (unsigned i = 0; i < n; ++i) {
    char digits[3];
    std::snprintf(digits, sizeof digits, "%02x", out[i]);
    text += digits;
  }
  return text;
}
inline std::string sha256(const std::string& bytes) {
  return hexadecimal_digest(bytes, EVP_sha256());
}
inline std::string git_sha1(const std::string& bytes) {
  return hexadecimal_digest("blob " + std::to_string(bytes.size()) + std::string(1, '\0') + bytes, EVP_sha1());
}
inline std::string random_bytes(size_t n, uint32_t seed) {
  std::mt19937 rng(seed);
  std::string bytes(n, '\0');
  for (char& c : bytes) c = static_cast<char>(rng());
  return bytes;
}

struct FakeFile {
  std::string bytes;         // what the CDN sends
  std::string etag;          // SHA-256 by default
  uint64_t listed_size = 0;  // by default that of `bytes`
  bool lfs = true;           // else the hub sends it itself
};

// A key and a certificate of it for 127.0.0.1, signed by itself.
class Certificate {
 public:
  Certificate() : key_(EVP_RSA_gen(2048)), certificate_(X509_new()) {
    X509_set_version(certificate_, 2);
    ASN1_INTEGER_set(X509_get_serialNumber(certificate_), 1);
    X509_gmtime_adj(X509_getm_notBefore(certificate_), -60);
    X509_gmtime_adj(X509_getm_notAfter(certificate_), 3600);
    X509_set_pubkey(certificate_, key_);
    X509_NAME* name = X509_get_subject_name(certificate_);
    X509_NAME_add_entry_by_txt(name, "CN", MBSTRING_ASC, reinterpret_cast<const unsigned char*>("test"), -1, -1, 0);
    X509_set_issuer_name(certificate_, name);
    X509_EXTENSION* address = X509V3_EXT_conf_nid(nullptr, nullptr, NID_subject_alt_name, "IP:127.0.0.1");
    X509_add_ext(certificate_, address, -1);
    X509_EXTENSION_free(address);
    X509_sign(certificate_, key_, EVP_sha256());
  }
  ~Certificate() { X509_free(certificate_), EVP_PKEY_free(key_); }
  Certificate(const Certificate&) = delete;
  Certificate& operator=(const Certificate&) = delete;

  EVP_PKEY* key() const { return key_; }
  X509* get() const { return certificate_; }
  void save(const std::filesystem::path& path) const {
    FILE* file = std::fopen(path.c_str(), "w");
    PEM_write_X509(file, certificate_);
    std::fclose(file);
  }

 private:
  EVP_PKEY* key_;
  X509* certificate_;
};

class FakeHub {
 public:
  // With a certificate both speak HTTPS.
  explicit FakeHub(const Certificate* certificate = nullptr)
      : tls_(certificate != nullptr), hub_server_(make_server(certificate)), cdn_server_(make_server(certificate)) {
    hub_.Get("/api/models/owner/model-GGUF/revision/main", [this](const httplib::Request& q, httplib::Response& r) {
      note(q, hub_log_);
      if (answer_first(r)) return;
      r.set_content(listing(), "application/json");
    });
    hub_.Get("/api/models/old/name/revision/main", [](const httplib::Request&, httplib::Response& r) {
      r.set_redirect("/api/models/owner/model-GGUF/revision/main", 307);
    });
    hub_.Get(R"(/old/name/resolve/(.+))", [](const httplib::Request& q, httplib::Response& r) {
      r.set_redirect("/owner/model-GGUF/resolve/" + q.matches[1].str(), 307);
    });
    hub_.Get(R"(/owner/model-GGUF/resolve/([0-9a-f]+)/(.+))", [this](const httplib::Request& q, httplib::Response& r) {
      note(q, hub_log_);
      if (q.method == "GET" && answer_first(r)) return;
      resolve(q, r);
    });
    cdn_.Get(R"(/cdn/(.+))", [this](const httplib::Request& q, httplib::Response& r) {
      note(q, cdn_log_);
      ++n_downloads;
      send(const_cast<httplib::Request&>(q), r, files.at(q.matches[1]).bytes);
    });
    cdn_port_ = cdn_.bind_to_any_port("127.0.0.1");
    hub_port_ = hub_.bind_to_any_port("127.0.0.1");
    threads_.emplace_back([this] { cdn_.listen_after_bind(); });
    threads_.emplace_back([this] { hub_.listen_after_bind(); });
    while (!hub_.is_running() || !cdn_.is_running()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  ~FakeHub() {
    ending_ = true;
    hub_.stop(), cdn_.stop();
    for (std::thread& t : threads_) t.join();
  }
  FakeHub(const FakeHub&) = delete;
  FakeHub& operator=(const FakeHub&) = delete;

  void add(const std::string& path, const std::string& bytes) { files[path] = {bytes, sha256(bytes), bytes.size()}; }
  std::string endpoint() const { return scheme() + "://127.0.0.1:" + std::to_string(hub_port_); }
  std::string cdn() const { return scheme() + "://127.0.0.1:" + std::to_string(cdn_port_); }
  // All requests to either, a line each: method, path, Range, Authorization.
  std::vector<std::string> hub_log() const { return copy(hub_log_); }
  std::vector<std::string> cdn_log() const { return copy(cdn_log_); }

  // How it behaves. Set before it is asked.
  std::map<std::string, FakeFile> files;
  std::string commit = kCommit;
  std::string raw_listing;  // in place of the list of `files`
  std::string redirect_to;  // in place of the CDN's address
  bool ignore_ranges = false;
  std::string content_range;             // in place of the right one
  std::atomic<int64_t> cut_after{-1};    // once: a body ends after so many bytes
  std::atomic<int64_t> stall_after{-1};  // once: nothing more comes after so many bytes
  bool cut_always = false;               // cut_after holds for every body
  std::atomic<int> refusals{0};          // of so many requests, with:
  int refusal = 503;
  std::string retry_after, error_code;
  std::string linked_etag;  // in place of the right X-Linked-Etag
  std::string linked_size;
  std::function<void()> on_body;  // before the first byte of each
  std::atomic<int> n_downloads{0};

 private:
  static std::unique_ptr<httplib::Server> make_server(const Certificate* c) {
    if (c == nullptr) return std::make_unique<httplib::Server>();
    return std::make_unique<httplib::SSLServer>(c->get(), c->key());
  }
  std::string scheme() const { return tls_ ? "https" : "http"; }
  static void note_line(const httplib::Request& q, std::vector<std::string>& log) {
    log.push_back(q.method + " " + q.path + " range=" + q.get_header_value("Range") +
                  " auth=" + q.get_header_value("Authorization"));
  }
  void note(const httplib::Request& q, std::vector<std::string>& log) {
    const std::lock_guard guard(mutex_);
    note_line(q, log);
  }
  std::vector<std::string> copy(const std::vector<std::string>& log) const {
    const std::lock_guard guard(mutex_);
    return log;
  }

  // True when this request is one of those that are refused.
  bool answer_first(httplib::Response& r) {
    if (refusals <= 0) return false;
    --refusals;
    r.status = refusal;
    if (!retry_after.empty()) r.set_header("Retry-After", retry_after);
    if (!error_code.empty()) r.set_header("X-Error-Code", error_code);
    r.set_content("{\"error\":\"no\"}", "application/json");
    return true;
  }

  std::string listing() const {
    if (!raw_listing.empty()) return raw_listing;
    nlohmann::json j = {{"sha", commit}, {"siblings", nlohmann::json::array()}};
    for (const auto& [path, file] : files) {
      nlohmann::json entry = {{"rfilename", path}, {"size", file.listed_size}, {"blobId", std::string(40, 'b')}};
      if (file.lfs) entry["lfs"] = {{"sha256", file.etag}, {"size", file.listed_size}, {"pointerSize", 130}};
      if (!file.lfs) entry["blobId"] = file.etag;
      j["siblings"].push_back(entry);
    }
    return j.dump();
  }

  void resolve(const httplib::Request& q, httplib::Response& r) {
    const auto found = files.find(q.matches[2]);
    r.set_header("X-Repo-Commit", q.matches[1].str());
    if (found == files.end()) {
      r.status = 404;
      r.set_header("X-Error-Code", "EntryNotFound");
      return;
    }
    const FakeFile& file = found->second;
    if (!file.lfs) {
      r.set_header("ETag", '"' + file.etag + '"');
      return send(const_cast<httplib::Request&>(q), r, file.bytes);
    }
    r.set_header("X-Linked-Etag", '"' + (linked_etag.empty() ? file.etag : linked_etag) + '"');
    r.set_header("X-Linked-Size", linked_size.empty() ? std::to_string(file.listed_size) : linked_size);
    r.set_header("ETag", "\"of-the-redirect\"");
    std::string path = found->first;  // an address has no spaces
    for (size_t at = 0; (at = path.find(' ', at)) != std::string::npos;) path.replace(at, 1, "%20");
    r.set_redirect(redirect_to.empty() ? cdn() + "/cdn/" + path : redirect_to, 302);
  }

  // The bytes that the request's range asks for, badly where that is wanted.
  void send(httplib::Request& q, httplib::Response& r, const std::string& bytes) {
    size_t first = 0;
    if (!q.ranges.empty() && !ignore_ranges) first = static_cast<size_t>(q.ranges[0].first);
    const bool partial = !q.ranges.empty() && !ignore_ranges;
    q.ranges.clear();  // the library does nothing more about them
    if (q.method == "HEAD") return r.set_content(bytes, "application/octet-stream");
    if (first >= bytes.size() && partial) {
      r.status = 416;
      return;
    }
    if (partial) {
      r.status = 206;
      r.set_header("Content-Range", content_range.empty()
                                        ? "bytes " + std::to_string(first) + "-" + std::to_string(bytes.size() - 1) +
                                              "/" + std::to_string(bytes.size())
                                        : content_range);
    }
    const int64_t cut = cut_always ? cut_after.load() : cut_after.exchange(-1), stall = stall_after.exchange(-1);
    if (on_body) on_body();
    const std::string rest = bytes.substr(first);
    r.set_content_provider(rest.size(), "application/octet-stream",
                           [this, rest, cut, stall](size_t offset, size_t length, httplib::DataSink& sink) {
                             size_t n = std::min<size_t>(length, 4096);
                             if (cut >= 0 && offset >= static_cast<size_t>(cut)) return false;
                             if (cut >= 0) n = std::min(n, static_cast<size_t>(cut) - offset);
                             if (stall >= 0 && offset >= static_cast<size_t>(stall)) {
                               while (!ending_ && sink.is_writable())
                                 std::this_thread::sleep_for(std::chrono::milliseconds(10));
                               return false;
                             }
                             return sink.write(rest.data() + offset, n);
                           });
  }

  bool tls_;
  std::unique_ptr<httplib::Server> hub_server_, cdn_server_;
  httplib::Server &hub_ = *hub_server_, &cdn_ = *cdn_server_;
  int hub_port_ = 0, cdn_port_ = 0;
  mutable std::mutex mutex_;
  std::vector<std::string> hub_log_, cdn_log_;
  std::atomic<bool> ending_{false};
  std::vector<std::thread> threads_;
};

// A hub with one model of 300,000 bytes, an empty cache, and settings that lose no time.
class HubTest : public ::testing::Test {
 protected:
  HubTest() {
    hub_.add("model-Q4_K_M.gguf", bytes_);
    hub_.add("README.md", "words");
    settings_.endpoint = hub_.endpoint();
    settings_.cache = dir_ / "hub";
    settings_.first_pause = std::chrono::milliseconds(1);
    settings_.longest_pause = std::chrono::milliseconds(4);
    settings_.connect_timeout = std::chrono::milliseconds(5000);
    settings_.stall_time = std::chrono::seconds(1);
    settings_.attempts = 3;
    settings_.notice = [this](const std::string& text) { notices_.push_back(text); };
  }

  hub::Pulled pull(const std::string& name = kRepository) {
    const hub::Watcher watcher{
        [this](const hub::RepositoryFile&, size_t, size_t, uint64_t have) { began_with_.push_back(have); },
        [](uint64_t) {}, [] {}};
    return hub::pull(hub::parse_model_name(name), settings_, watcher);
  }
  // The line of what pull() throws; empty when it does not.
  std::string error_of_pull(const std::string& name = kRepository) {
    try {
      pull(name);
    } catch (const Error& e) {
      EXPECT_EQ(std::string(e.what()).find('\n'), std::string::npos);
      return e.what();
    }
    return {};
  }
  std::filesystem::path folder() const { return settings_.cache / "models--owner--model-GGUF"; }
  std::filesystem::path blob(const std::string& etag) const { return folder() / "blobs" / etag; }
  std::filesystem::path incomplete() const { return blob(sha256(bytes_) + ".incomplete"); }

  TempDir dir_;
  std::string bytes_ = random_bytes(300'000, 1);
  FakeHub hub_;
  hub::Settings settings_;
  std::vector<std::string> notices_;
  std::vector<uint64_t> began_with_;
};

}  // namespace hearth::test
