// SPDX-License-Identifier: Apache-2.0
// Hands blocks of memory over as DLPack tensors, which give them back by themselves, in whatever
// thread they end and without the interpreter's lock. And: reads what other processes share, and
// rows of files; leaves zeros out of messages.

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <limits>
#include <memory>
#include <new>
#include <optional>
#include <type_traits>
#include <vector>

#include "bindings/arrays.h"
#include "runtime/file_rows.h"
#include "runtime/large_blocks.h"
#include "runtime/nonzero_words.h"
#include "runtime/shared_blocks.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace graphshard {
namespace {

// As DLPack defines it: https://dmlc.github.io/dlpack/latest/c_api.html.
struct ManagedTensor {
  nb::dlpack::dltensor tensor;
  void* context;
  void (*deleter)(ManagedTensor*);
};

struct OwnedBlock {
  Block block;
  std::vector<int64_t> shape;
  std::vector<int64_t> strides;
  ManagedTensor managed;
};

void end_use(ManagedTensor* managed) {
  const std::unique_ptr<OwnedBlock> owned(static_cast<OwnedBlock*>(managed->context));
  return_block(owned->block);
}

// A capsule that a tensor was made of has another name; one that was not taken still owns the
// block.
void drop_capsule(PyObject* capsule) {
  if (PyCapsule_IsValid(capsule, "dltensor") == 0) return;
  auto* const managed = static_cast<ManagedTensor*>(PyCapsule_GetPointer(capsule, "dltensor"));
  managed->deleter(managed);
}

constexpr size_t kMostDimensions = 64;  // of a tensor

nb::object empty(const std::vector<int64_t>& shape, int code, int bits) {
  require(bits > 0 && bits <= 64 && bits % 8 == 0 && code >= 0 && code <= 255,
          "a block must have entries of one to eight whole bytes, and a type of DLPack's");
  require(shape.size() <= kMostDimensions, "a block must have at most 64 dimensions");
  int64_t entries = 1;
  const int64_t most = std::numeric_limits<int64_t>::max() / (bits / 8);
  for (const int64_t size : shape) {
    require(size > 0, "a block must have entries in each dimension");
    if (size > most / entries) throw std::bad_alloc();
    entries *= size;
  }
  auto owned = std::make_unique<OwnedBlock>();
  {
    const nb::gil_scoped_release release;
    owned->block = take_block(static_cast<size_t>(entries) * static_cast<size_t>(bits / 8));
  }
  if (owned->block.data == nullptr) throw std::bad_alloc();
  owned->shape = shape;
  owned->strides.resize(shape.size());
  int64_t step = 1;
  for (size_t axis = shape.size(); axis-- > 0;) {
    owned->strides[axis] = step;
    step *= shape[axis];
  }
  nb::dlpack::dltensor& tensor = owned->managed.tensor;
  tensor.data = owned->block.data;
  tensor.device = {static_cast<int32_t>(nb::device::cpu::value), 0};
  tensor.ndim = static_cast<int32_t>(shape.size());
  tensor.dtype = {static_cast<uint8_t>(code), static_cast<uint8_t>(bits), 1};
  tensor.shape = owned->shape.data();
  tensor.strides = owned->strides.data();
  tensor.byte_offset = 0;
  owned->managed.context = owned.get();
  owned->managed.deleter = end_use;
  PyObject* const capsule = PyCapsule_New(&owned->managed, "dltensor", drop_capsule);
  if (capsule == nullptr) {
    return_block(owned->block);
    throw nb::python_error();
  }
  owned.release();
  return nb::steal(capsule);
}

SharedPlace place_of(int process, int descriptor, uint64_t token, uint64_t use) {
  return {process, descriptor, token, use};
}

// A block's memory is a map, which Python holds; it begins with the header.
using Memory = OutVector;

void* header_of(const Memory& block) {
  require(block.shape(0) >= kSharedHeader && reinterpret_cast<uintptr_t>(block.data()) % 8 == 0,
          "a block must begin with a header, at a multiple of 8 bytes");
  return data_of<uint8_t>(block);
}

void bind_shared(nb::module_& m) {
  m.attr("shared_header") = kSharedHeader;
  m.attr("shared_readers") = kSharedReaders;
  m.def(
      "begin_use",
      [](const Memory& block, uint64_t token, uint64_t use) {
        begin_use(header_of(block), token, use);
      },
      "block"_a.noconvert(), "token"_a, "use"_a);
  m.def(
      "is_read",
      [](const Memory& block, uint64_t use, const std::vector<int64_t>& readers) {
        for (const int64_t reader : readers) {
          require(reader >= 0 && reader < static_cast<int64_t>(kSharedReaders),
                  "a reader must be in the header");
        }
        return is_read(header_of(block), use, readers.data(), readers.size());
      },
      "block"_a.noconvert(), "use"_a, "readers"_a);
  m.def(
      "mark_left", [](const Memory& block) { mark_left(header_of(block)); }, "block"_a.noconvert());
  m.def(
      "read_shared",
      [](int process, int descriptor, uint64_t token, uint64_t use, int reader, int64_t offset,
         const Memory& into) {
        require(reader >= 0 && reader < static_cast<int>(kSharedReaders),
                "a reader must be in the header");
        require(offset >= 0 && offset < int64_t{1} << 62, "an offset must not be negative");
        uint8_t* const to = data_of<uint8_t>(into);
        const nb::gil_scoped_release release;
        return read_shared(place_of(process, descriptor, token, use), reader,
                           static_cast<size_t>(offset), to, into.shape(0));
      },
      "process"_a, "descriptor"_a, "token"_a, "use"_a, "reader"_a, "offset"_a,
      "into"_a.noconvert());
  m.def(
      "has_left",
      [](int process, int descriptor, uint64_t token) {
        return has_left(place_of(process, descriptor, token, 0));
      },
      "process"_a, "descriptor"_a, "token"_a);
}

// Rows of bytes, from a file.
int read_bytes(int descriptor, int64_t offset, int64_t num_rows, const InVector& rows,
               const std::optional<InVector>& places, const OutMatrix& out) {
  const int64_t row_bytes = columns_in(out);
  const int64_t most = std::numeric_limits<int64_t>::max() / 2;
  require(offset >= 0 && offset < most, "an offset must not be negative");
  require(num_rows >= 0 && (row_bytes == 0 || num_rows <= (most - offset) / row_bytes),
          "a table in a file must have an end");
  require(!places || rows_in(*places) == rows_in(rows), "places and rows must have one length");
  require_apart({out}, {rows, places});
  char* const to = reinterpret_cast<char*>(data_of<uint8_t>(out));
  const Ids from = ids_of(rows);
  const Ids at = ids_of(places);
  const nb::gil_scoped_release release;
  return read_rows({descriptor, offset, num_rows, row_bytes}, from, at, rows_in(rows), to,
                   rows_in(out));
}

// Calls function(Word{}) for words of the size of an array's entries.
template <typename Function>
auto with_word_type(const nb::dlpack::dtype& dtype, const Function& function) {
  if (dtype == nb::dtype<uint8_t>()) return function(uint8_t{});
  if (dtype == nb::dtype<int16_t>()) return function(int16_t{});
  if (dtype == nb::dtype<int32_t>()) return function(int32_t{});
  throw nb::type_error("words must be uint8, int16 or int32");
}

int64_t pack(const InVector& words, const OutVector& packed, const OutVector& bits) {
  const int64_t num_words = rows_in(words);
  require(rows_in(packed) >= most_kept(num_words) + 64 && 8 * rows_in(bits) == bit_bytes(num_words),
          "there must be room for most words, and a bit for each");
  require_apart({packed, bits}, {words});
  auto* const bits_to = reinterpret_cast<uint64_t*>(data_of<int64_t>(bits));
  return with_word_type(words.dtype(), [&](auto zero) {
    using Signed = decltype(zero);
    using Word = std::make_unsigned_t<Signed>;
    const auto* const from = reinterpret_cast<const Word*>(data_of<Signed>(words));
    auto* const to = reinterpret_cast<Word*>(data_of<Signed>(packed));
    const nb::gil_scoped_release release;
    return pack_words(from, num_words, to, bits_to);
  });
}

bool unpack(const OutVector& words, int64_t count, const InVector& bits) {
  const int64_t num_words = rows_in(words);
  require(count >= 0 && count <= num_words && 8 * rows_in(bits) == bit_bytes(num_words),
          "there must be a place for each word that is kept, and a bit for each");
  require_apart({words}, {bits});
  const auto* const bits_from = reinterpret_cast<const uint64_t*>(data_of<int64_t>(bits));
  return with_word_type(words.dtype(), [&](auto zero) {
    using Word = std::make_unsigned_t<decltype(zero)>;
    auto* const to = reinterpret_cast<Word*>(data_of<decltype(zero)>(words));
    const nb::gil_scoped_release release;
    return unpack_words(to, num_words, count, bits_from);
  });
}

}  // namespace

void bind_memory(nb::module_& m) {
  m.def("empty", &empty, "shape"_a, "code"_a, "bits"_a);
  m.def("release_blocks", &release_blocks, nb::call_guard<nb::gil_scoped_release>());
  m.def("block_counts", [] {
    const BlockCounts counts = block_counts();
    return nb::make_tuple(counts.used, counts.waiting, counts.peak);
  });
  bind_shared(m);
  m.def("read_rows", read_bytes, "descriptor"_a, "offset"_a, "num_rows"_a, "rows"_a.noconvert(),
        "places"_a.noconvert().none(), "out"_a.noconvert());
  m.def("pack_words", &pack, "words"_a.noconvert(), "packed"_a.noconvert(), "bits"_a.noconvert());
  m.def("unpack_words", &unpack, "words"_a.noconvert(), "count"_a, "bits"_a.noconvert());
}

}  // namespace graphshard
