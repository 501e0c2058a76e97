#include "hub/http.h"

#include <curl/curl.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <exception>
#include <mutex>

#include "core/log.h"
#include "hub/choose.h"

namespace hearth::hub {
namespace {

constexpr int kRedirects = 10;
constexpr size_t kLongestBody = size_t{64} << 20;  // of an answer that is kept in memory
constexpr size_t kMostHeaders = 256;

// curl's callbacks fill this. They may not throw through C: `thrown` waits for the request's end.
struct Exchange {
  Reply reply;
  const Http::Sink* sink = nullptr;
  const std::function<bool()>* cancelled = nullptr;
  std::exception_ptr thrown;
};

size_t on_header(char* data, size_t, size_t n, void* exchange) {
  Reply& reply = static_cast<Exchange*>(exchange)->reply;
  std::string line(data, n);
  line.erase(line.find_last_not_of("\r\n") + 1);
  if (line.rfind("HTTP/", 0) == 0) {  // the head of the reply, perhaps after one of a proxy
    const size_t space = line.find(' ');
    reply.headers.clear();
    reply.status = space == std::string::npos ? 0 : std::atoi(line.c_str() + space);
  } else if (const size_t colon = line.find(':'); colon != std::string::npos && reply.headers.size() < kMostHeaders) {
    std::string name = line.substr(0, colon);
    std::transform(name.begin(), name.end(), name.begin(), [](unsigned char c) { return std::tolower(c); });
    const size_t begin = line.find_first_not_of(" \t", colon + 1);
    reply.headers[name] = begin == std::string::npos ? "" : line.substr(begin);
  }
  return n;
}

size_t on_body(char* data, size_t, size_t n, void* context) {
  Exchange& exchange = *static_cast<Exchange*>(context);
  try {
    if (exchange.sink != nullptr && (exchange.reply.status == 200 || exchange.reply.status == 206)) {
      (*exchange.sink)(exchange.reply, {data, n});
    } else {
      if (exchange.reply.body.size() + n > kLongestBody) fail("the answer is longer than {} MiB", kLongestBody >> 20);
      exchange.reply.body.append(data, n);
    }
    return n;
  } catch (...) {
    exchange.thrown = std::current_exception();
    return CURL_WRITEFUNC_ERROR;
  }
}

int on_progress(void* exchange, curl_off_t, curl_off_t, curl_off_t, curl_off_t) {
  return (*static_cast<Exchange*>(exchange)->cancelled)() ? 1 : 0;
}

// Without the query, which may be a signature that opens the file to everybody.
std::string shown(const std::string& url) {
  return printable(url.substr(0, url.find('?')));
}

bool is_redirect(int status) {
  return status == 301 || status == 302 || status == 303 || status == 307 || status == 308;
}

}  // namespace

struct Http::Request {
  std::string url;
  bool head = false;
  uint64_t offset = 0;
  const Sink* sink = nullptr;
};

std::string Reply::header(const std::string& name) const {
  const auto found = headers.find(name);
  return found == headers.end() ? std::string() : found->second;
}

Http::Http(const Settings& settings)
    : settings_(settings), origin_(origin_of(settings.endpoint)), curl_(nullptr, curl_easy_cleanup) {
  static std::once_flag once;
  std::call_once(once, [] { curl_global_init(CURL_GLOBAL_DEFAULT); });
  curl_.reset(curl_easy_init());
  HEARTH_CHECK(curl_ != nullptr);
}
Http::~Http() = default;

Reply Http::get(const std::string& url) {
  return follow({url});
}
Reply Http::get(const std::string& url, uint64_t offset, const Sink& sink) {
  return follow({url, false, offset, &sink});
}
Reply Http::head(const std::string& url) {
  return follow({url, true});
}

Reply Http::follow(Request request) {
  for (int hop = 0; hop <= kRedirects; ++hop) {
    Reply reply = perform(request);
    if (!is_redirect(reply.status)) return reply;
    char* next = nullptr;
    curl_easy_getinfo(curl_.get(), CURLINFO_REDIRECT_URL, &next);  // absolute
    const std::string target = next == nullptr ? "" : next, origin = origin_of(target);
    if (origin.empty())
      fail("'{}' leads to '{}', an http or https address was expected", shown(request.url), shown(target));
    if (origin_.rfind("https:", 0) == 0 && origin.rfind("https:", 0) != 0)
      fail("'{}' leads to '{}', which is not encrypted; nothing is downloaded that way", shown(request.url),
           shown(target));
    if (request.head && origin != origin_ && !reply.header("x-linked-etag").empty()) return reply;
    request.url = target;
  }
  fail("'{}': more than {} redirects", shown(request.url), kRedirects);
}

void Http::set_options(const Request& request) {
  CURL* c = curl_.get();
  curl_easy_reset(c);  // connections stay
  curl_easy_setopt(c, CURLOPT_URL, request.url.c_str());
  curl_easy_setopt(c, CURLOPT_PROTOCOLS_STR, "http,https");
  curl_easy_setopt(c, CURLOPT_NOSIGNAL, 1L);
  curl_easy_setopt(c, CURLOPT_USERAGENT, "hearth");
  curl_easy_setopt(c, CURLOPT_BUFFERSIZE, 256L << 10);
  curl_easy_setopt(c, CURLOPT_CONNECTTIMEOUT_MS, static_cast<long>(settings_.connect_timeout.count()));
  curl_easy_setopt(c, CURLOPT_LOW_SPEED_LIMIT, static_cast<long>(settings_.stall_rate));
  curl_easy_setopt(c, CURLOPT_LOW_SPEED_TIME, static_cast<long>(settings_.stall_time.count()));
  if (request.head) curl_easy_setopt(c, CURLOPT_NOBODY, 1L);
  if (!settings_.certificates.empty()) curl_easy_setopt(c, CURLOPT_CAINFO, settings_.certificates.c_str());
}

Reply Http::perform(const Request& request) {
  set_options(request);
  CURL* c = curl_.get();
  Exchange exchange;
  exchange.sink = request.sink, exchange.cancelled = &settings_.cancelled;
  std::array<char, CURL_ERROR_SIZE> reason{};
  curl_easy_setopt(c, CURLOPT_ERRORBUFFER, reason.data());
  curl_easy_setopt(c, CURLOPT_HEADERFUNCTION, on_header);
  curl_easy_setopt(c, CURLOPT_HEADERDATA, &exchange);
  curl_easy_setopt(c, CURLOPT_WRITEFUNCTION, on_body);
  curl_easy_setopt(c, CURLOPT_WRITEDATA, &exchange);
  curl_easy_setopt(c, CURLOPT_NOPROGRESS, 0L);
  curl_easy_setopt(c, CURLOPT_XFERINFOFUNCTION, on_progress);
  curl_easy_setopt(c, CURLOPT_XFERINFODATA, &exchange);
  std::unique_ptr<curl_slist, void (*)(curl_slist*)> headers(nullptr, curl_slist_free_all);
  const auto add_header = [&](const std::string& line) {
    headers.reset(curl_slist_append(headers.release(), line.c_str()));
  };
  if (!settings_.token.empty() && origin_of(request.url) == origin_)
    add_header("Authorization: Bearer " + settings_.token);
  if (request.offset > 0) add_header(fmt::format("Range: bytes={}-", request.offset));
  curl_easy_setopt(c, CURLOPT_HTTPHEADER, headers.get());
  log::debug("{} {}", request.head ? "HEAD" : "GET", shown(request.url));
  const CURLcode code = curl_easy_perform(c);
  curl_easy_setopt(c, CURLOPT_ERRORBUFFER, nullptr);
  curl_easy_setopt(c, CURLOPT_HTTPHEADER, nullptr);
  if (exchange.thrown) std::rethrow_exception(exchange.thrown);
  error_ = reason.front() != '\0' ? reason.data() : curl_easy_strerror(code);
  if (code != CURLE_OK) failed(code, request.url);
  reached_ = true;
  exchange.reply.url = request.url;
  return std::move(exchange.reply);
}

void Http::failed(int code, const std::string& url) const {
  const std::string host = origin_of(url);
  switch (code) {
    case CURLE_ABORTED_BY_CALLBACK:
      throw Cancelled();
    case CURLE_COULDNT_RESOLVE_HOST:
    case CURLE_COULDNT_RESOLVE_PROXY:
    case CURLE_COULDNT_CONNECT:
      throw Unreachable(
          fmt::format("no connection to {}: {}; is there a network, a proxy to name (https_proxy)?", host, error_),
          reached_);
    case CURLE_OPERATION_TIMEDOUT:
      throw Unreachable(fmt::format("{} stalls: {}", host, error_), true);
    case CURLE_SSL_CONNECT_ERROR:
    case CURLE_PEER_FAILED_VERIFICATION:
    case CURLE_SSL_CACERT_BADFILE:
    case CURLE_SSL_CERTPROBLEM:
    case CURLE_SSL_CIPHER:
    case CURLE_SSL_ISSUER_ERROR:
      fail(
          "no trusted connection to {}: {}; check the clock, the package ca-certificates, and whether a proxy reads "
          "along "
          "(SSL_CERT_FILE names its certificate)",
          host, error_);
    case CURLE_URL_MALFORMAT:
    case CURLE_UNSUPPORTED_PROTOCOL:
    case CURLE_OUT_OF_MEMORY:
      fail("'{}' cannot be asked for: {}", shown(url), error_);
    default:
      throw Unreachable(fmt::format("the connection to {} broke off: {}", host, error_), true);
  }
}

}  // namespace hearth::hub
