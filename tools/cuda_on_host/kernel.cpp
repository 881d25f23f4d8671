// One kernel as a library. Its names are its own, so that the variables that a CTA's threads share
// all lie in one section.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "runtime.h"

namespace {
#include SOURCE
}

#define HIDDEN __attribute__((visibility("hidden")))
extern "C" HIDDEN __attribute__((weak)) char __start_shared_memory[], __stop_shared_memory[];
extern "C" HIDDEN char __ehdr_start[], _end[];
// Where the library lies, and its shared variables.
extern "C" void* const* library_on_host() {
    static void* const places[] = {__ehdr_start, _end, __start_shared_memory,
                                   __stop_shared_memory};
    return places;
}
template <typename P>
__attribute__((always_inline)) inline void call(void (*kernel)(P), const void* params) {
    kernel(*static_cast<const P*>(params));
}
extern "C" void kernel_on_host(const void* params) { call(KERNEL, params); }
