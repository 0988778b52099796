// Table of the algorithm for each product, for one GPU.
//
// The table is stored in a text file in the user's cache folder. The file name contains everything
// that decides whether an algorithm is valid and fast. A line is
//
//   <numbers of the product> <tile> <needs workspace> <8 words of the algorithm> <checksum>
//
// Processes share the file, such as the ranks of a training. Lines are only appended, each by one
// write. If there are several lines for a product, the first one counts, for all processes: a
// process that has searched appends its line, reads the file, and uses the first line. So it runs
// the algorithm that it would run after a restart. And a product that another process has searched
// meanwhile is not searched again.
//
// A line with a wrong checksum is skipped; its product is searched again and appended. If the file
// cannot be read or written, the table works without it.
#pragma once

#include <cublasLt.h>
#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <optional>
#include <sstream>
#include <string>

namespace lightseq {

// An algorithm of cuBLASLt, or (tile > 0) a tile shape of tiles.cu, numbered from 1.
struct Algorithm {
  cublasLtMatmulAlgo_t algo;
  bool needs_workspace;
  int tile = 0;
};

class AlgorithmTable {
 public:
  using Key = std::array<int64_t, 8>;

  explicit AlgorithmTable(const std::string& file) : path_(folder() / file) {}

  std::optional<Algorithm> find(const Key& key) {
    auto found = algorithms_.find(key);
    if (found == algorithms_.end()) {
      read_new_lines();
      found = algorithms_.find(key);
    }
    if (found == algorithms_.end()) return std::nullopt;
    return found->second;
  }

  // Adds the algorithm that this process has found, and returns the one to be used.
  Algorithm add(const Key& key, const Algorithm& algorithm) {
    const std::string line = line_of(key, algorithm);
    // If the file ended with half a line, the first append only completes that line.
    for (int attempt = 0; attempt < 2; ++attempt) {
      append(line);
      if (const auto found = find(key)) return *found;
    }
    algorithms_.emplace(key, algorithm);
    return algorithm;
  }

 private:
  static std::string line_of(const Key& key, const Algorithm& algorithm) {
    std::ostringstream text;
    for (const int64_t number : key) text << number << ' ';
    text << algorithm.tile << ' ' << algorithm.needs_workspace << std::hex;
    for (const uint64_t word : algorithm.algo.data) text << ' ' << word;
    const uint64_t sum = checksum(text.str());
    text << ' ' << sum << '\n';
    return text.str();
  }

  static std::filesystem::path folder() {
    const char* const cache = std::getenv("XDG_CACHE_HOME");
    const char* const home = std::getenv("HOME");
    const bool is_set = cache != nullptr && *cache == '/';
    const std::filesystem::path base =
        is_set ? std::filesystem::path(cache)
               : std::filesystem::path(home != nullptr ? home : "/") / ".cache";
    return base / "lightseq_fairseq";
  }

  static uint64_t checksum(const std::string& text) {  // FNV-1a
    uint64_t hash = 0xcbf29ce484222325u;
    for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
    return hash;
  }

  // Reads the lines that have been appended since the last call.
  void read_new_lines() {
    std::ifstream file(path_, std::ios::binary | std::ios::ate);
    if (file.tellg() < end_) end_ = 0;  // somebody has deleted or shortened the file
    file.seekg(end_);
    for (std::string line; std::getline(file, line) && !file.eof();) {  // eof: half a line
      read(line);
      end_ += static_cast<std::streamoff>(line.size()) + 1;
    }
  }

  void read(const std::string& line) {
    const size_t end = line.rfind(' ');
    if (end == std::string::npos) return;
    std::istringstream text(line);
    Key key;
    Algorithm algorithm;
    uint64_t sum = 0;
    for (int64_t& number : key) text >> number;
    text >> algorithm.tile >> algorithm.needs_workspace >> std::hex;
    for (uint64_t& word : algorithm.algo.data) text >> word;
    text >> sum;
    if (text && sum == checksum(line.substr(0, end))) algorithms_.emplace(key, algorithm);
  }

  void append(const std::string& line) const {
    std::error_code ignored;
    std::filesystem::create_directories(path_.parent_path(), ignored);
    const int file = open(path_.c_str(), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0644);
    if (file < 0) return;
    [[maybe_unused]] const ssize_t written = write(file, line.data(), line.size());
    close(file);
  }

  const std::filesystem::path path_;
  std::streamoff end_ = 0;  // bytes of the file that have been read
  std::map<Key, Algorithm> algorithms_;
};

}  // namespace lightseq
