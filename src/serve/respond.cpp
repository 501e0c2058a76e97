// Answers: at once or as they come, until the client goes away.
#include "core/log.h"
#include "serve/api.h"

namespace hearth::serve {
namespace {

using namespace std::chrono_literals;
constexpr auto kLook = 50ms;  // how often a client that gets nothing is looked after

void cancel_all(const std::vector<JobPtr>& jobs) {
  for (const JobPtr& job : jobs) job->cancel();
}

// Calls on_piece and on_end for what comes, until every text has ended. False: the client is gone, or a callback says so.
template <typename OnPiece, typename OnEnd>
bool follow(const std::vector<JobPtr>& jobs, httplib::DataSink& sink, OnPiece on_piece, OnEnd on_end) {
  std::vector<bool> ended(jobs.size());
  for (size_t n_ended = 0; n_ended < jobs.size();) {
    bool waited = false, came = false;
    for (size_t i = 0; i < jobs.size(); ++i) {
      if (ended[i]) continue;
      const std::optional<Job::Event> event = jobs[i]->next(waited ? 0ms : kLook);
      waited = true;
      if (!event) continue;
      came = true;
      if (const auto* piece = std::get_if<Piece>(&*event)) {
        if (!on_piece(i, *piece)) return false;
      } else {
        ended[i] = true, ++n_ended;
        if (!on_end(i, std::get<End>(*event))) return false;
      }
    }
    if (!came && !sink.is_writable()) return false;
  }
  return true;
}

bool send(httplib::DataSink& sink, const std::string& text) {
  return text.empty() || sink.write(text.data(), text.size());
}

}  // namespace

std::vector<JobPtr> submit_all(Scheduler& scheduler, std::vector<Task> tasks) {
  std::vector<JobPtr> jobs;
  try {
    for (Task& t : tasks) jobs.push_back(scheduler.submit(std::move(t)));
  } catch (...) {
    cancel_all(jobs);
    throw;
  }
  return jobs;
}

std::vector<JobPtr> submit(Scheduler& scheduler, Task task) {
  return {scheduler.submit(std::move(task))};
}

void respond_json(httplib::Response& response, const Json& json, int status) {
  response.status = status;
  response.set_content(json.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n", "application/json");
}

void respond(httplib::Response& response, std::vector<JobPtr> jobs,
             std::function<Json(const std::vector<Answer>&)> make) {
  const auto provider = [jobs, make = std::move(make)](size_t, httplib::DataSink& sink) {
    std::vector<Answer> answers(jobs.size());
    const auto on_piece = [&](size_t i, const Piece& piece) {
      answers[i].text += piece.text;
      answers[i].pieces.push_back(piece);
      return true;
    };
    const auto on_end = [&](size_t i, const End& end) {
      answers[i].end = end;
      if (end.finish == Finish::failed) log::warn("a request failed: {}", end.error);
      return end.finish != Finish::failed && end.finish != Finish::cancelled;
    };
    // The status is sent already: a text that failed is told by a connection that breaks.
    if (!follow(jobs, sink, on_piece, on_end)) return false;
    if (!send(sink, make(answers).dump(-1, ' ', false, Json::error_handler_t::replace) + "\n")) return false;
    sink.done();
    return true;
  };
  response.set_chunked_content_provider("application/json", provider, [jobs](bool) { cancel_all(jobs); });
}

void respond_stream(httplib::Response& response, const char* content_type, std::vector<JobPtr> jobs,
                    std::unique_ptr<StreamFormat> format) {
  const auto provider = [jobs, f = std::shared_ptr<StreamFormat>(std::move(format))](size_t, httplib::DataSink& sink) {
    std::vector<End> ends(jobs.size());
    if (!send(sink, f->begin())) return false;
    const auto on_piece = [&](size_t i, const Piece& piece) { return send(sink, f->piece(i, piece)); };
    const auto on_end = [&](size_t i, const End& end) {
      ends[i] = end;
      if (end.finish == Finish::failed) {
        log::warn("a request failed: {}", end.error);
        send(sink, f->error(end.error));
        return false;
      }
      return end.finish != Finish::cancelled && send(sink, f->end(i, end));
    };
    if (!follow(jobs, sink, on_piece, on_end) || !send(sink, f->finish(ends))) return false;
    sink.done();
    return true;
  };
  response.set_header("Cache-Control", "no-cache");
  response.set_chunked_content_provider(content_type, provider, [jobs](bool) { cancel_all(jobs); });
}

std::string server_sent(const Json& data) {
  return "data: " + data.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n\n";
}
std::string server_sent(const std::string& event, const Json& data) {
  return "event: " + event + "\n" + server_sent(data);
}

void respond_error(httplib::Response& response, Protocol protocol, const ApiError& e) {
  if (e.status == 503) response.set_header("Retry-After", "2");
  switch (protocol) {
    case Protocol::ollama:
      return respond_json(response, {{"error", e.what()}}, e.status);
    case Protocol::anthropic:
      return respond_json(response, {{"type", "error"}, {"error", {{"type", e.type}, {"message", e.what()}}}},
                          e.status);
    case Protocol::openai:
      break;
  }
  Json error = {{"message", e.what()}, {"type", e.type}, {"param", nullptr}, {"code", nullptr}};
  if (!e.param.empty()) error["param"] = e.param;
  if (e.status == 401) error["code"] = "invalid_api_key";
  if (e.status == 404 && e.param == "model") error["code"] = "model_not_found";
  respond_json(response, {{"error", error}}, e.status);
}

httplib::Server::Handler guarded(Protocol protocol, Handler handler) {
  return [protocol, handler = std::move(handler)](const httplib::Request& request, httplib::Response& response) {
    try {
      handler(request, response);
    } catch (const ApiError& e) {
      respond_error(response, protocol, e);
    } catch (const Busy& e) {
      respond_error(response, protocol,
                    ApiError(503, protocol == Protocol::anthropic ? "overloaded_error" : "server_error", e.what()));
    } catch (const Error& e) {
      respond_error(response, protocol, ApiError(400, "invalid_request_error", e.what()));
    } catch (const std::exception& e) {
      log::warn("a request met an unexpected failure: {}", e.what());
      respond_error(response, protocol, ApiError(500, "server_error", "an unexpected failure"));
    }
  };
}

}  // namespace hearth::serve
