// The functions that instrumented code calls before its accesses to memory, and memcpy with its relatives, which
// the compiler does not instrument. Not a word of ThreadSanitizer's run-time library takes part.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>

#include "traffic/cores.h"

using ronde::testing::count_read;
using ronde::testing::count_write;
using ronde::testing::host_of_thread;

#define ACCESSES(bytes)                                                            \
  void __tsan_read##bytes(void* address) { count_read(address, bytes); }           \
  void __tsan_write##bytes(void* address) { count_write(address, bytes); }         \
  void __tsan_unaligned_read##bytes(void* address) { count_read(address, bytes); } \
  void __tsan_unaligned_write##bytes(void* address) { count_write(address, bytes); }

#define CHANGE(bits, name, builtin)                                                              \
  uint##bits##_t __tsan_atomic##bits##_##name(uint##bits##_t* word, uint##bits##_t value, int) { \
    count_write(word, bits / 8);                                                                 \
    return builtin(word, value, __ATOMIC_SEQ_CST);                                               \
  }

#define ATOMICS(bits)                                                                                     \
  uint##bits##_t __tsan_atomic##bits##_load(const uint##bits##_t* word, int) {                            \
    count_read(word, bits / 8);                                                                           \
    return __atomic_load_n(word, __ATOMIC_SEQ_CST);                                                       \
  }                                                                                                       \
  void __tsan_atomic##bits##_store(uint##bits##_t* word, uint##bits##_t value, int) {                     \
    count_write(word, bits / 8);                                                                          \
    __atomic_store_n(word, value, __ATOMIC_SEQ_CST);                                                      \
  }                                                                                                       \
  CHANGE(bits, exchange, __atomic_exchange_n)                                                             \
  CHANGE(bits, fetch_add, __atomic_fetch_add)                                                             \
  CHANGE(bits, fetch_sub, __atomic_fetch_sub)                                                             \
  CHANGE(bits, fetch_or, __atomic_fetch_or)                                                               \
  CHANGE(bits, fetch_and, __atomic_fetch_and)                                                             \
  int __tsan_atomic##bits##_compare_exchange_strong(uint##bits##_t* word, uint##bits##_t* expected,       \
                                                    uint##bits##_t value, int, int) {                     \
    count_write(word, bits / 8);                                                                          \
    return __atomic_compare_exchange_n(word, expected, value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST); \
  }

extern "C" {
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
void __tsan_read_range(void* address, size_t bytes) { count_read(address, bytes); }
void __tsan_write_range(void* address, size_t bytes) { count_write(address, bytes); }
void __tsan_atomic_thread_fence(int) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
ACCESSES(1)
ACCESSES(2)
ACCESSES(4)
ACCESSES(8)
ACCESSES(16)
ATOMICS(8)
ATOMICS(16)
ATOMICS(32)
ATOMICS(64)

// The linker sends calls of memcpy to __wrap_memcpy.
void* __real_memcpy(void* to, const void* from, size_t bytes);
void* __real_memmove(void* to, const void* from, size_t bytes);
void* __real_memset(void* to, int value, size_t bytes);
void* __wrap_memcpy(void* to, const void* from, size_t bytes) {
  count_read(from, bytes);
  count_write(to, bytes);
  return __real_memcpy(to, from, bytes);
}
void* __wrap_memmove(void* to, const void* from, size_t bytes) {
  count_read(from, bytes);
  count_write(to, bytes);
  return __real_memmove(to, from, bytes);
}
void* __wrap_memset(void* to, int value, size_t bytes) {
  count_write(to, bytes);
  return __real_memset(to, value, bytes);
}
}

// Scratch memory is the only one with an alignment of its own. That of a rank is never freed: the test forgets all at
// once.
void* operator new(size_t bytes, std::align_val_t alignment) {
  if (ronde::testing::HostMemory* host = host_of_thread()) return host->allocate(bytes);
  return std::aligned_alloc(static_cast<size_t>(alignment), bytes);
}
void operator delete(void*, std::align_val_t) noexcept {}
