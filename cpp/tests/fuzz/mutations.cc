// The parsers without libFuzzer: random mutations of the seeds. The same number gives the same input.
//
//   fuzz_parsers SECONDS [NUMBER]   fuzzes from NUMBER on; a fault prints the number that reproduces it
//   fuzz_parsers --seeds FOLDER     writes the seeds to FOLDER, as a corpus for libFuzzer
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <random>
#include <string>

#include "parsers.h"

namespace ronde::fuzz {
namespace {

using Input = std::vector<std::byte>;
using Random = std::mt19937_64;

constexpr size_t kLongest = 2048;
uint64_t current = 0;

// Numbers at the limits of comparisons.
uint64_t interesting(Random& random) {
  const uint64_t edges[] = {0, 1, 2, 63, 64, 99, 100, 101, 0x7fffffff, 0x80000000, 0xffffffff, UINT64_MAX, INT64_MAX};
  return edges[random() % std::size(edges)];
}

void mutate(Input& input, Random& random) {
  const size_t at = input.empty() ? 0 : random() % input.size();
  switch (random() % 6) {
    case 0:
      if (!input.empty()) input[at] ^= static_cast<std::byte>(1u << random() % 8);
      return;
    case 1:
      if (!input.empty()) input[at] = static_cast<std::byte>(random());
      return;
    case 2: {
      const uint64_t value = interesting(random);
      const size_t width = size_t{1} << random() % 4, place = 1 + at / width * width;
      if (place + width <= input.size()) std::memcpy(&input[place], &value, width);
      return;
    }
    case 3:
      input.resize(at);
      return;
    case 4:
      input.insert(input.end(), random() % 64, static_cast<std::byte>(random()));
      return;
    default:
      if (input.size() < kLongest) input.insert(input.end(), input.begin() + static_cast<ptrdiff_t>(at), input.end());
      return;
  }
}

void run_number(uint64_t number, const std::vector<Input>& all) {
  Random random(number);
  Input input = all[random() % all.size()];
  for (uint64_t left = random() % 8; left > 0; --left) mutate(input, random);
  // A block of exactly this size, so that AddressSanitizer detects a read behind its end.
  input.shrink_to_fit();
  run_one(input);
}

void name_the_number(int signal) {
  std::fprintf(stderr, "fuzz_parsers: a fault: run again with `fuzz_parsers 1 %llu`\n", (unsigned long long)current);
  std::signal(signal, SIG_DFL);
  std::raise(signal);
}

int write_seeds(const std::string& folder) {
  size_t number = 0;
  for (const Input& input : seeds()) {
    std::ofstream file(folder + "/seed-" + std::to_string(number++), std::ios::binary);
    file.write(reinterpret_cast<const char*>(input.data()), static_cast<std::streamsize>(input.size()));
    if (!file.flush()) return 1;
  }
  return 0;
}

int fuzz(double seconds, uint64_t first) {
  std::signal(SIGABRT, name_the_number);
  const std::vector<Input> all = seeds();
  for (const Input& input : all) run_one(input);
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  for (current = first; current % 1024 != 1023 || std::chrono::steady_clock::now() < end; ++current) {
    run_number(current, all);
  }
  std::printf("fuzz_parsers: %llu inputs\n", (unsigned long long)(current - first));
  return 0;
}

}  // namespace
}  // namespace ronde::fuzz

int main(int count, char** words) {
  if (count == 3 && std::strcmp(words[1], "--seeds") == 0) return ronde::fuzz::write_seeds(words[2]);
  if (count < 2) return std::fprintf(stderr, "usage: fuzz_parsers SECONDS [NUMBER] | --seeds FOLDER\n"), 2;
  return ronde::fuzz::fuzz(std::atof(words[1]), count > 2 ? std::strtoull(words[2], nullptr, 10) : 0);
}
