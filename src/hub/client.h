#pragma once
// What the hub offers: a repository's files, and their bytes. Every request is repeated, after a pause that grows, while
// that may help (Settings).
#include <functional>
#include <string>
#include <vector>

#include "hub/choose.h"
#include "hub/http.h"
#include "hub/partial.h"
#include "hub/settings.h"

namespace hearth::hub {

// The hub said no: there is no such thing, or not for us. One line that says what to do.
class Refused : public Error {
 public:
  using Error::Error;
};

struct Listing {
  std::string commit;                 // 40 hexadecimal digits
  std::vector<RepositoryFile> files;  // with plain paths
};

class Client {
 public:
  explicit Client(const Settings& settings) : settings_(settings), http_(settings) {}

  // The files of the branch main. Not `patient`: asks once. Throws Refused, Unreachable, Error.
  Listing list(const std::string& repository, bool patient = true);
  // The etag and size of a file by its own headers, as huggingface_hub names blobs. Throws as above, and Error when they
  // contradict the listing.
  RepositoryFile facts(const std::string& repository, const std::string& commit, const RepositoryFile& listed);
  // Brings the rest of a file. `progress` is told what is there. Throws as above, and Error when the size is another.
  void download(const std::string& repository, const std::string& commit, const RepositoryFile& file, Partial& partial,
                const std::function<void(uint64_t have)>& progress);

 private:
  template <typename Attempt>
  auto persist(int attempts, const Attempt& attempt, const std::function<uint64_t()>& have);
  void pause(std::chrono::milliseconds time) const;
  // Throws unless the reply is what was asked for. `what` names it for messages.
  void check(const Reply& reply, const std::string& repository, const std::string& what) const;
  std::string file_url(const std::string& repository, const std::string& commit, const std::string& path) const;

  const Settings& settings_;
  Http http_;
};

}  // namespace hearth::hub
