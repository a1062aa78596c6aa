// A foreign function for XLA's CPU client: sleeps, and returns a copy of what it is given.

#include <chrono>
#include <cstring>
#include <thread>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

static ffi::Error Sleep(double milliseconds, ffi::AnyBuffer given, ffi::Result<ffi::AnyBuffer> copy) {
  std::this_thread::sleep_for(std::chrono::duration<double, std::milli>(milliseconds));
  std::memcpy(copy->untyped_data(), given.untyped_data(), given.size_bytes());
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    SleepHandler, Sleep,
    ffi::Ffi::Bind().Attr<double>("milliseconds").Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>());
