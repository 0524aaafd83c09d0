// The timeline's parts: the ring under several threads and when it is full, the file after kill -9, the records of a
// tensor's phases.
#include "engine/timeline.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "base/steady_clock.h"
#include "base/types.h"
#include "check.h"
#include "engine/event_ring.h"
#include "engine/trace_file.h"
#include "engine/trace_text.h"

namespace ronde {
namespace {

using What = Event::What;

std::string scratch_path() {
  char path[] = "/tmp/ronde-timeline-test-XXXXXX";
  const int fd = mkstemp(path);
  CHECK(fd >= 0);
  close(fd);
  return path;
}

std::string text_of(const std::string& path) {
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

// The records of a file. Checks that each is one complete line. `may_lack_bracket`: the writer was killed.
std::vector<std::string> records_of(const std::string& text, bool may_lack_bracket = false) {
  std::string body = text;
  body.erase(body.find_last_not_of(" \n") + 1);
  CHECK(!body.empty() && body.front() == '[');
  if (body.size() > 1 && body.back() == ']') {
    body.pop_back();
  } else {
    CHECK(may_lack_bracket);
  }
  std::vector<std::string> records;
  std::istringstream lines(body.substr(1));
  for (std::string line; std::getline(lines, line);) {
    const size_t begin = line.find_first_not_of(" ,");
    if (begin == std::string::npos) continue;
    CHECK((line[begin - 1] == ',') == !records.empty());
    line = line.substr(begin, line.find_last_not_of(' ') + 1 - begin);
    CHECK(line.front() == '{' && line.back() == '}' && std::count(line.begin(), line.end(), '"') % 2 == 0);
    records.push_back(line);
  }
  return records;
}

void test_ring_of_several_threads() {
  constexpr uint64_t kEach = 20'000;
  EventRing ring(256);
  std::vector<std::thread> threads;
  for (uint32_t thread = 0; thread < 3; ++thread) {
    threads.emplace_back([&ring, thread] {
      for (uint64_t i = 0; i < kEach; ++i) {
        while (ring.push({0, i, thread, What::kTick, 0}) == 0) std::this_thread::yield();
      }
    });
  }
  uint64_t next[3] = {};
  for (uint64_t taken = 0; taken < 3 * kEach;) {
    Event event;
    if (!ring.pop(event)) {
      std::this_thread::yield();
      continue;
    }
    CHECK(event.value == next[event.track]++);
    ++taken;
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(ring.is_empty());
}

void test_full_ring_drops_and_counts() {
  EventRing ring(4);
  for (uint64_t i = 0; i < 4; ++i) CHECK(ring.push({0, i, 0, What::kTick, 0}) == i + 1);
  CHECK(ring.push({}) == 0 && ring.push({}) == 0);
  CHECK(ring.dropped() == 2);
  Event event;
  CHECK(ring.pop(event) && event.value == 0);
  CHECK(ring.push({}) == 5);
}

std::string record(size_t number, size_t length) {
  return "{\"n\":" + std::to_string(number) + ",\"x\":\"" + std::string(length, 'x') + "\"}";
}

void test_file_is_whole_after_every_flush() {
  const std::string path = scratch_path();
  size_t count = 0;
  {
    TraceFile file(path);
    CHECK(text_of(path).size() == TraceFile::kPage && records_of(text_of(path)).empty());
    for (size_t batch : {1, 2, 30, 1000, 0, 7}) {
      for (size_t i = 0; i < batch; ++i, ++count) file.add(record(count, count * 37 % 200));
      CHECK(file.flush());
      CHECK(records_of(text_of(path)).size() == count);
    }
    for (const size_t length : {4072u, 4060u, 4040u, 9000u}) {  // nearly a page; the last one is longer than a page
      file.add(record(count, length));
      CHECK(file.flush());
      count += length < 5000 ? 1 : 0;
      CHECK(records_of(text_of(path)).size() == count);
    }
    CHECK(file.close());
  }
  const std::string text = text_of(path);
  CHECK(text.back() == ']' && records_of(text).size() == count);
  for (size_t i = 0; i < count; ++i) CHECK(records_of(text)[i].starts_with("{\"n\":" + std::to_string(i) + ","));
  unlink(path.c_str());
}

void test_empty_file() {
  const std::string path = scratch_path();
  CHECK(TraceFile(path).close());
  CHECK(text_of(path) == "[]");
  unlink(path.c_str());
  CHECK_THROWS(TraceFile("/nonexistent/folder/file"), std::system_error);
}

// Another user may put such a link into a directory where all users may write.
void test_draft_is_not_written_through_a_link() {
  const std::string path = scratch_path(), ours = scratch_path(), draft = path + ".new";
  std::ofstream(ours) << "precious";
  CHECK(symlink(ours.c_str(), draft.c_str()) == 0);
  TraceFile file(path);
  CHECK(file.close());
  CHECK(text_of(ours) == "precious");
  CHECK(records_of(text_of(path)).empty());
  CHECK(access(draft.c_str(), F_OK) != 0);
  unlink(path.c_str());
  unlink(ours.c_str());
}

// Kills a process that only writes, repeatedly.
void test_kill_while_writing() {
  const std::string path = scratch_path();
  for (int attempt = 0; attempt < 60; ++attempt) {
    const pid_t writer = fork();
    CHECK(writer >= 0);
    if (writer == 0) {
      TraceFile file(path);
      for (size_t number = 0;; ++number) {
        file.add(record(number, number * 37 % 300));
        if (number % 100 == 0) file.flush();
      }
    }
    usleep(static_cast<useconds_t>(2000 + attempt * 331));
    CHECK(kill(writer, SIGKILL) == 0 && waitpid(writer, nullptr, 0) == writer);
    if (text_of(path).empty()) continue;  // killed before it began to write
    const std::vector<std::string> records = records_of(text_of(path), /*may_lack_bracket=*/true);
    for (size_t i = 0; i < records.size(); ++i) CHECK(records[i].starts_with("{\"n\":" + std::to_string(i) + ","));
  }
  unlink(path.c_str());
  unlink((path + ".new").c_str());
}

// The records of the events, without those that describe the rank and its tracks.
std::vector<std::string> records_for(const std::vector<Event>& events, int64_t open_before_ns = INT64_MIN) {
  const std::string path = scratch_path();
  TraceFile file(path);
  TraceText text({1, 2, "a \"host\"", 1000, 0}, file);
  text.add_track("engine");
  text.add_track("a\n\\b");
  text.add_track("c");
  for (const Event& event : events) text.add_event(event);
  text.open_long_phases(open_before_ns);
  CHECK(file.close());
  std::vector<std::string> records;
  for (const std::string& each : records_of(text_of(path))) {
    if (each.find("\"ph\":\"M\"") == std::string::npos) records.push_back(each);
  }
  CHECK(text_of(path).find(R"("name":"rank 1 on a \"host\"")") != std::string::npos);
  CHECK(text_of(path).find(R"("name":"a\u000a\\b")") != std::string::npos);
  unlink(path.c_str());
  return records;
}

constexpr auto kAllreduce = static_cast<uint8_t>(Kind::kAllreduce);

void test_phases_of_a_fused_pair() {
  const std::vector<std::string> records = records_for({
      {2000, 0, 1, What::kSubmitted, kAllreduce},
      {2500, 0, 2, What::kSubmitted, kAllreduce},
      {2100, 0, 1, What::kTick, 0},
      {3000, 7, 1, What::kDecided, 0},
      {2600, 0, 2, What::kTick, 0},
      {3000, 7, 2, What::kDecided, 0},
      {3500, 2, 0, What::kStarted, kAllreduce},
      {40, 0, 1, What::kMember, 0},
      {60, 0, 2, What::kMember, 0},
      {4000, 0, 0, What::kFused, 0},
      {5000, 0, 0, What::kRan, 0},
      {5001, 0, 0, What::kEnded, 0},
  });
  const std::vector<std::string> expected{
      R"({"ph":"i","pid":1,"tid":2,"ts":1.100,"name":"rank 0"})",
      R"({"ph":"i","pid":1,"tid":2,"ts":1.000,"name":"rank 1"})",
      R"({"ph":"X","pid":1,"tid":2,"ts":1.000,"dur":1.000,"name":"NEGOTIATE_ALLREDUCE","args":{"decision":7}})",
      R"({"ph":"X","pid":1,"tid":2,"ts":2.000,"dur":0.500,"name":"queue"})",
      R"({"ph":"X","pid":1,"tid":2,"ts":2.500,"dur":0.500,"name":"MEMCPY_IN_FUSION_BUFFER"})",
      R"({"ph":"X","pid":1,"tid":2,"ts":3.000,"dur":1.000,"name":"ALLREDUCE","args":{"kind":"allreduce","bytes":40,"tensors":2}})",
      R"({"ph":"X","pid":1,"tid":2,"ts":4.000,"dur":0.001,"name":"MEMCPY_OUT_FUSION_BUFFER"})",
      R"({"ph":"X","pid":1,"tid":1,"ts":3.000,"dur":1.000,"name":"ALLREDUCE","args":{"kind":"allreduce","bytes":100,"tensors":2}})",
  };
  for (const std::string& each : expected) {
    CHECK(std::find(records.begin(), records.end(), each) != records.end());
  }
  CHECK(records.size() == 4 + 2 * 5 + 3);
}

// A group of two tensors has one name, and a rank that has not submitted it has an old stamp.
void test_two_tensors_of_one_name() {
  const std::vector<std::string> records = records_for({{2000, 0, 1, What::kSubmitted, kAllreduce},
                                                        {2000, 1, 1, What::kDecided, 0},
                                                        {2000, 2, 0, What::kStarted, kAllreduce},
                                                        {40, 0, 1, What::kMember, 0},
                                                        {60, 0, 1, What::kMember, 0},
                                                        {2000, 0, 0, What::kFused, 0},
                                                        {3000, 0, 0, What::kRan, 0},
                                                        {3000, 0, 0, What::kEnded, 0},
                                                        {1500, 0, 1, What::kTick, 0}});
  CHECK(records.size() == 1 + 5 + 3);
  const char* const operation = R"("name":"ALLREDUCE","args":{"kind":"allreduce","bytes":100,"tensors":2}})";
  CHECK(std::count_if(records.begin(), records.end(), [&](const auto& each) { return each.ends_with(operation); }) ==
        2);
}

void test_a_long_phase_is_opened_and_closed() {
  std::vector<Event> events{{2000, 0, 1, What::kSubmitted, kAllreduce}, {9000, 0, 2, What::kSubmitted, kAllreduce}};
  CHECK(records_for(events).empty());
  const std::string opened = R"({"ph":"B","pid":1,"tid":2,"ts":1.000,"name":"NEGOTIATE_ALLREDUCE"})";
  CHECK(records_for(events, 5000) == std::vector<std::string>{opened});

  const std::string path = scratch_path();
  TraceFile file(path);
  TraceText text({0, 1, "host", 0, 0}, file);
  text.add_track("engine");
  text.add_track("a");
  text.add_event(events[0]);
  CHECK(!text.open_long_phases(1000) && text.open_long_phases(3000));
  text.add_event({4000, 3, 1, What::kDecided, 0});
  file.close();
  CHECK(text_of(path).find(
            R"({"ph":"E","pid":0,"tid":2,"ts":4.000,"name":"NEGOTIATE_ALLREDUCE","args":{"decision":3}})") !=
        std::string::npos);
  unlink(path.c_str());
}

// Lost events, or a timeline that begins in the middle, cause missing records but never wrong ones.
void test_lost_events() {
  CHECK(records_for({{2000, 0, 0, What::kFused, 0},
                     {2000, 0, 0, What::kRan, 0},
                     {2000, 0, 0, What::kEnded, 0},
                     {10, 0, 1, What::kMember, 0},
                     {10, 99, 1, What::kMember, 0},
                     {2000, 0, 99, What::kSubmitted, kAllreduce},
                     {2000, 0, 1, What::kRoundEnded, 0},
                     {500, 0, 1, What::kTick, 0}})
            .empty());
  // Submitted twice, because the events in between were lost.
  CHECK(records_for({{2000, 0, 1, What::kSubmitted, kAllreduce},
                     {3000, 0, 1, What::kSubmitted, kAllreduce},
                     {4000, 0, 1, What::kDecided, 0}})
            .size() == 2);
}

void test_start_and_stop() {
  Timeline timeline;
  CHECK(!timeline.is_on() && timeline.stop().empty());
  for (int round = 0; round < 3; ++round) {
    const std::string path = scratch_path();
    timeline.start({path, 0, 1, "host", false, 64});
    CHECK_THROWS(timeline.start({path, 0, 1, "host", false, 64}), UsageError);
    const uint32_t track = timeline.track("tensor");
    std::thread other([&] {
      for (int i = 0; i < 1000; ++i) timeline.push({steady_now_ns(), 5, track, What::kTick, 0});
    });
    other.join();
    CHECK(timeline.stop().empty());
    const std::string text = text_of(path);
    CHECK(records_of(text).size() > 4 + 10 && text.find("\"rank 5\"") != std::string::npos);
    unlink(path.c_str());
  }
  CHECK_THROWS(timeline.start({"/nonexistent/file", 0, 1, "host", false, 64}), std::system_error);
  CHECK(!timeline.is_on());
}

}  // namespace
}  // namespace ronde

int main() {
  ronde::test_ring_of_several_threads();
  ronde::test_full_ring_drops_and_counts();
  ronde::test_file_is_whole_after_every_flush();
  ronde::test_empty_file();
  ronde::test_draft_is_not_written_through_a_link();
  ronde::test_kill_while_writing();
  ronde::test_phases_of_a_fused_pair();
  ronde::test_two_tensors_of_one_name();
  ronde::test_a_long_phase_is_opened_and_closed();
  ronde::test_lost_events();
  ronde::test_start_and_stop();
}
