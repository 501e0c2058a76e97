#include "hub/client.h"

#include <curl/curl.h>

#include <algorithm>
#include <charconv>
#include <ctime>
#include <nlohmann/json.hpp>
#include <thread>

#include "core/log.h"
#include "core/units.h"

namespace hearth::hub {
namespace {

using Json = nlohmann::json;

std::optional<uint64_t> number(std::string_view text) {
  uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size() ? std::optional(value) : std::nullopt;
}

// W/"etag" -> etag
std::string bare_etag(std::string etag) {
  if (etag.rfind("W/", 0) == 0) etag.erase(0, 2);
  etag.erase(std::remove(etag.begin(), etag.end(), '"'), etag.end());
  return etag;
}

// It becomes a file's name.
bool is_plain_etag(const std::string& etag) {
  return !etag.empty() && etag.size() <= 128 && std::all_of(etag.begin(), etag.end(), [](unsigned char c) {
    return std::isalnum(c) != 0 || c == '-' || c == '_';
  });
}

std::string percent_encoded(const std::string& path) {
  std::string out;
  for (const unsigned char c : path) {
    const bool plain =
        std::isalnum(c) != 0 || std::string_view("-._~/").find(static_cast<char>(c)) != std::string_view::npos;
    out += plain ? std::string(1, static_cast<char>(c)) : fmt::format("%{:02X}", c);
  }
  return out;
}

// Seconds, or a date.
std::optional<std::chrono::seconds> retry_after(const Reply& reply) {
  const std::string text = reply.header("retry-after");
  if (text.empty()) return std::nullopt;
  if (const auto seconds = number(text)) return std::chrono::seconds(std::min<uint64_t>(*seconds, 1'000'000'000));
  const time_t date = curl_getdate(text.c_str(), nullptr);
  if (date < 0) return std::nullopt;
  return std::chrono::seconds(std::max<time_t>(0, date - std::time(nullptr)));
}

RepositoryFile listed_file(const Json& entry) {
  RepositoryFile file{entry.at("rfilename").get<std::string>()};
  const bool lfs = entry.contains("lfs") && entry["lfs"].is_object();
  const Json& facts = lfs ? entry["lfs"] : entry;
  if (facts.contains("size") && facts["size"].is_number_unsigned()) file.size = facts["size"].get<uint64_t>();
  const char* etag = lfs ? "sha256" : "blobId";
  if (facts.contains(etag) && facts[etag].is_string()) file.etag = facts[etag].get<std::string>();
  return file;
}

Listing parse_listing(const std::string& body, const std::string& repository) {
  Listing listing;
  try {
    const Json json = Json::parse(body);
    listing.commit = json.at("sha").get<std::string>();
    for (const Json& entry : json.at("siblings")) {
      RepositoryFile file = listed_file(entry);
      if (is_plain_path(file.path) && (file.etag.empty() || is_plain_etag(file.etag))) {
        listing.files.push_back(std::move(file));
      } else {
        log::warn("'{}' lists a file that is left out, as its name cannot be used here: '{}'", repository,
                  printable(file.path));
      }
    }
  } catch (const Json::exception& e) {
    fail("the hub's list of '{}' cannot be read: {}", repository, e.what());
  }
  const bool hexadecimal = listing.commit.find_first_not_of("0123456789abcdef") == std::string::npos;
  if (listing.commit.size() != 40 || !hexadecimal)
    fail("the hub names '{}' as the commit of '{}', 40 hexadecimal digits were expected", printable(listing.commit),
         repository);
  return listing;
}

// The beginning of a reply with the file's bytes, checked before the first one is kept.
void begin_body(const Reply& reply, const RepositoryFile& file, Partial& partial) {
  if (reply.status == 200) {
    const auto length = number(reply.header("content-length"));
    if (length && *length != file.size && reply.header("content-encoding").empty())
      fail("'{}' comes with {} bytes where the hub lists {}; try again later", file.path, *length, file.size);
    if (partial.have() > 0) partial.restart();  // the server does not do ranges
    return;
  }
  // bytes FIRST-LAST/SIZE
  const std::string range = reply.header("content-range");
  const std::string first = fmt::format("bytes {}-", partial.have()), whole = fmt::format("/{}", file.size);
  const size_t slash = range.find('/');
  const bool fits = range.rfind(first, 0) == 0 && slash != std::string::npos &&
                    (range.substr(slash) == whole || range.substr(slash) == "/*");
  if (!fits)
    fail("'{}' goes on with '{}', '{}…{}' was expected; try again later", file.path, printable(range), first, whole);
}

}  // namespace

void Client::pause(std::chrono::milliseconds time) const {
  const auto end = std::chrono::steady_clock::now() + time;
  while (std::chrono::steady_clock::now() < end) {
    if (settings_.cancelled()) throw Cancelled();
    std::this_thread::sleep_for(std::min<std::chrono::milliseconds>(time, std::chrono::milliseconds(50)));
  }
}

// `have` grows with what came in: failures count from the last growth on.
template <typename Attempt>
auto Client::persist(int attempts, const Attempt& attempt, const std::function<uint64_t()>& have) {
  uint64_t most = have();
  for (int failures = 0;;) {
    try {
      return attempt();
    } catch (const Unreachable& e) {
      if (have() > most) most = have(), failures = 0;
      if (!e.again || ++failures >= attempts) throw;
      auto time = settings_.first_pause;
      for (int i = 1; i < failures && time < settings_.longest_pause; ++i) time *= 2;
      time = std::min(time, settings_.longest_pause);
      if (e.after) time = std::max<std::chrono::milliseconds>(*e.after, std::chrono::milliseconds(0));
      settings_.tell(
          fmt::format("{}; trying again in {:.1f} s", e.what(), std::chrono::duration<double>(time).count()));
      pause(time);
    }
  }
}

void Client::check(const Reply& reply, const std::string& repository, const std::string& what) const {
  if (reply.ok()) return;
  const std::string host = origin_of(reply.url);
  const bool hub = host == origin_of(settings_.endpoint);
  const std::string code = reply.header("x-error-code");
  const bool has_token = !settings_.token.empty();
  if (reply.status == 429 || reply.status == 408 || reply.status >= 500) {
    const auto after = retry_after(reply);
    const std::string said = fmt::format("{} answers {} for {}", host, reply.status, what);
    if (after && *after > settings_.longest_retry_after)
      throw Unreachable(fmt::format("{}, and asks to come back in {} s", said, after->count()), false);
    throw Unreachable(said, true, after);
  }
  if (!hub)
    throw Unreachable(fmt::format("{} answers {} for {}", host, reply.status, what), true);  // a link that ran out
  if (code == "GatedRepo")
    throw Refused(fmt::format("'{}' is gated: accept its licence at {}/{}, and {}", repository, settings_.endpoint,
                              repository,
                              has_token ? "check that HF_TOKEN is of the account that did"
                                        : "set HF_TOKEN to a token of your account (or run `hf auth login`)"));
  if (reply.status == 401 || reply.status == 403) {
    throw Refused(fmt::format("{} refuses {} ({}): {}", host, what, reply.status,
                              has_token ? "check its name, and that HF_TOKEN is valid and may read it"
                                        : "check its name; if it is private or gated, set HF_TOKEN"));
  }
  if (reply.status == 404) throw Refused(fmt::format("{} has no {}; check its name", host, what));
  throw Refused(fmt::format("{} answers {} for {}", host, reply.status, what));
}

std::string Client::file_url(const std::string& repository, const std::string& commit, const std::string& path) const {
  return fmt::format("{}/{}/resolve/{}/{}", settings_.endpoint, repository, commit, percent_encoded(path));
}

Listing Client::list(const std::string& repository, bool patient) {
  const std::string url = fmt::format("{}/api/models/{}/revision/main?blobs=true", settings_.endpoint, repository);
  const auto attempt = [&] {
    const Reply reply = http_.get(url);
    check(reply, repository, fmt::format("'{}'", repository));
    return parse_listing(reply.body, repository);
  };
  return persist(patient ? settings_.attempts : 1, attempt, [] { return uint64_t{0}; });
}

RepositoryFile Client::facts(const std::string& repository, const std::string& commit, const RepositoryFile& listed) {
  const auto attempt = [&] {
    Reply reply = http_.head(file_url(repository, commit, listed.path));
    if (reply.status < 300 || reply.status >= 400)
      check(reply, repository, fmt::format("'{}' of '{}'", listed.path, repository));
    return reply;
  };
  const Reply reply = persist(settings_.attempts, attempt, [] { return uint64_t{0}; });
  const std::string linked = bare_etag(reply.header("x-linked-etag"));  // ETag may be that of a CDN
  RepositoryFile file{listed.path, listed.size, !linked.empty() ? linked : listed.etag};
  if (file.etag.empty()) file.etag = bare_etag(reply.header("etag"));
  if (!is_plain_etag(file.etag)) fail("the hub names no usable etag of '{}'; is HF_ENDPOINT a hub?", listed.path);
  if (!listed.etag.empty() && file.etag != listed.etag)
    fail("the hub contradicts itself about '{}': etag {} in its list, {} with the file; try again", listed.path,
         listed.etag, file.etag);
  const bool own_size = reply.ok() && reply.header("content-encoding").empty();
  const auto size = number(reply.header("x-linked-size").empty() && own_size ? reply.header("content-length")
                                                                             : reply.header("x-linked-size"));
  if (size && listed.size != 0 && *size != listed.size)
    fail("the hub contradicts itself about '{}': {} bytes in its list, {} with the file; try again", listed.path,
         listed.size, *size);
  if (size) file.size = *size;
  if (file.size == 0) fail("the hub names no size of '{}'", listed.path);
  return file;
}

void Client::download(const std::string& repository, const std::string& commit, const RepositoryFile& file,
                      Partial& partial, const std::function<void(uint64_t have)>& progress) {
  const auto attempt = [&] {
    if (partial.have() == file.size) return;
    bool begun = false;
    const Http::Sink sink = [&](const Reply& reply, std::span<const char> bytes) {
      if (!begun) begin_body(reply, file, partial);
      begun = true;
      if (bytes.size() > file.size - partial.have()) {
        partial.discard();
        fail("'{}' is longer than the {} bytes that the hub lists; nothing was kept, try again later", file.path,
             file.size);
      }
      partial.append(bytes);
      progress(partial.have());
    };
    const Reply reply = http_.get(file_url(repository, commit, file.path), partial.have(), sink);
    const std::string what = fmt::format("'{}' of '{}'", file.path, repository);
    if (reply.status == 416) {
      partial.restart();
      throw Unreachable(fmt::format("{} cannot go on with {}: it begins anew", origin_of(reply.url), what), true);
    }
    check(reply, repository, what);
    if (partial.have() < file.size)
      throw Unreachable(fmt::format("{} ended after {} of {} bytes", what, partial.have(), file.size), true);
  };
  persist(settings_.attempts, attempt, [&] { return partial.have(); });
}

}  // namespace hearth::hub
