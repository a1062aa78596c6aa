// Custom operations in C++, by XLA's foreign function interface, for examples/custom_ops/train.py.
//
// A handler gets inputs and results as buffers, and attributes by name: PopTorch's floats are float, its
// integers std::int64_t, lists of them spans, strings std::string_view, and a list of strings a dictionary
// with the keys "0", "1", ...

#include <algorithm>
#include <cstdint>
#include <sstream>
#include <string>
#include <string_view>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

// x * x * x, and that plus a bias.
ffi::Error ComputeCube(ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::F32> bias,
                       ffi::ResultBuffer<ffi::F32> cube,
                       ffi::ResultBuffer<ffi::F32> shifted) {
  if (x.element_count() != bias.element_count()) {
    return ffi::Error::InvalidArgument("Cube: x and bias must have the same shape");
  }
  for (std::size_t i = 0; i < x.element_count(); ++i) {
    const float value = x.typed_data()[i];
    cube->typed_data()[i] = value * value * value;
    shifted->typed_data()[i] = value * value * value + bias.typed_data()[i];
  }
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(Cube, ComputeCube,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());

// x where it is positive, else alpha * x.
ffi::Error ComputeLeakyRelu(float alpha, ffi::Buffer<ffi::F32> x,
                            ffi::ResultBuffer<ffi::F32> y) {
  for (std::size_t i = 0; i < x.element_count(); ++i) {
    const float value = x.typed_data()[i];
    y->typed_data()[i] = value > 0 ? value : alpha * value;
  }
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(LeakyRelu, ComputeLeakyRelu,
                              ffi::Ffi::Bind()
                                  .Attr<float>("alpha")
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());

// Writes the attributes into the result, as text: what arrived, to look at.
ffi::Error DescribeAttributes(float one_float, ffi::Span<const float> floats,
                              std::int64_t one_int, ffi::Span<const std::int64_t> ints,
                              std::string_view text, ffi::Dictionary texts,
                              ffi::AnyBuffer x, ffi::ResultBuffer<ffi::U8> described) {
  (void)x;
  std::ostringstream out;
  out.precision(9);
  out << "float " << one_float << "\nfloats";
  for (const float value : floats) out << ' ' << value;
  out << "\nint " << one_int << "\nints";
  for (const std::int64_t value : ints) out << ' ' << value;
  out << "\nstring " << text << "\nstrings";
  for (std::size_t i = 0; i < texts.size(); ++i) {
    const auto one = texts.get<std::string_view>(std::to_string(i));
    if (one.has_error()) return one.error();
    out << ' ' << *one;
  }
  const std::string made = out.str();
  if (made.size() > described->element_count()) {
    return ffi::Error::InvalidArgument("ManyAttributeOp: the result is too small for the text");
  }
  std::fill_n(described->typed_data(), described->element_count(), std::uint8_t{0});
  std::copy(made.begin(), made.end(), described->typed_data());
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(ManyAttributeOp, DescribeAttributes,
                              ffi::Ffi::Bind()
                                  .Attr<float>("float_one")
                                  .Attr<ffi::Span<const float>>("float_many")
                                  .Attr<std::int64_t>("int_one")
                                  .Attr<ffi::Span<const std::int64_t>>("int_many")
                                  .Attr<std::string_view>("string_one")
                                  .Attr<ffi::Dictionary>("string_many")
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::Buffer<ffi::U8>>());
