// SPDX-License-Identifier: Apache-2.0
// Numbers of keys, integers in cells, and repeated edges; see module.cpp.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <cstring>
#include <limits>
#include <mutex>
#include <shared_mutex>

#include "bindings/arrays.h"
#include "tables/key_tables.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace graphshard {
namespace {

// A table that several threads may look into, or one may add to.
template <typename Table>
struct Shared {
  Table table;
  mutable std::shared_mutex mutex;
};
using SharedIntegers = Shared<IntegerTable>;
using SharedBytes = Shared<BytesTable>;

int64_t size_of_integers(const SharedIntegers& self) {
  const std::shared_lock lock(self.mutex);
  return self.table.size();
}

void look_up_integers(SharedIntegers& self, const InVector& keys, const OutVector& rows,
                      bool inserts) {
  require(keys.shape(0) == rows.shape(0), "rows must have one entry per key");
  require_apart({rows}, {keys});
  const int64_t* from = data_of<int64_t>(keys);
  int64_t* to = data_of<int64_t>(rows);
  const int64_t count = rows_in(keys);
  const nb::gil_scoped_release release;
  if (inserts) {
    const std::unique_lock lock(self.mutex);
    self.table.insert(from, count, to);
  } else {
    const std::shared_lock lock(self.mutex);
    self.table.find(from, count, to);
  }
}

void copy_integers(const SharedIntegers& self, const OutVector& keys) {
  int64_t* to = data_of<int64_t>(keys);
  const nb::gil_scoped_release release;
  const std::shared_lock lock(self.mutex);
  require(rows_in(keys) == self.table.size(), "keys must have one entry per number");
  if (rows_in(keys) > 0) std::memcpy(to, self.table.keys(), keys.nbytes());
}

// Strings of bytes: offsets must ascend from 0 or above to the end of data.
void require_strings(const int64_t* offsets, int64_t count, int64_t num_bytes) {
  bool ascends = offsets[0] >= 0 && offsets[count] <= num_bytes;
  for (int64_t i = 0; i < count; ++i) ascends &= offsets[i] <= offsets[i + 1];
  require(ascends, "offsets must ascend within data");
}

void look_up_bytes(SharedBytes& self, const InVector& offsets, const InVector& data,
                   const OutVector& rows, bool inserts) {
  require(offsets.shape(0) == rows.shape(0) + 1, "offsets must have one entry more than rows");
  require_apart({rows}, {offsets, data});
  const int64_t* begins = data_of<int64_t>(offsets);
  const uint8_t* text = data_of<uint8_t>(data);
  int64_t* to = data_of<int64_t>(rows);
  const int64_t count = rows_in(rows);
  const int64_t num_bytes = rows_in(data);
  const nb::gil_scoped_release release;
  require_strings(begins, count, num_bytes);
  if (inserts) {
    const std::unique_lock lock(self.mutex);
    self.table.insert(begins, text, count, to);
  } else {
    const std::shared_lock lock(self.mutex);
    self.table.find(begins, text, count, to);
  }
}

int64_t size_of_bytes(const SharedBytes& self) {
  const std::shared_lock lock(self.mutex);
  return self.table.size();
}

int64_t num_bytes(const SharedBytes& self) {
  const std::shared_lock lock(self.mutex);
  return static_cast<int64_t>(self.table.data().size());
}

void copy_bytes_of(const SharedBytes& self, const OutVector& offsets, const OutVector& data) {
  require_apart({offsets, data}, {});
  int64_t* begins = data_of<int64_t>(offsets);
  uint8_t* text = data_of<uint8_t>(data);
  const nb::gil_scoped_release release;
  const std::shared_lock lock(self.mutex);
  require(
      offsets.shape(0) == self.table.offsets().size() && data.shape(0) == self.table.data().size(),
      "offsets and data must have the sizes of the table");
  std::memcpy(begins, self.table.offsets().data(), offsets.nbytes());
  if (data.shape(0) > 0) std::memcpy(text, self.table.data().data(), data.nbytes());
}

// (all are integers, some are negative, some are above what int64 holds)
nb::tuple parse(const InVector& offsets, const InVector& data, const OutVector& out) {
  require(offsets.shape(0) == out.shape(0) + 1, "offsets must have one entry more than out");
  require_apart({out}, {offsets, data});
  const int64_t* begins = data_of<int64_t>(offsets);
  const uint8_t* text = data_of<uint8_t>(data);
  int64_t* to = data_of<int64_t>(out);
  ParsedIntegers parsed;
  {
    const nb::gil_scoped_release release;
    require_strings(begins, rows_in(out), rows_in(data));
    parsed = parse_integers(begins, text, rows_in(out), to);
  }
  return nb::make_tuple(parsed.are_integers, parsed.has_negative, parsed.has_large);
}

int64_t repeated(const InVector& src, const InVector& dst, int64_t num_dst, int num_threads) {
  require(src.shape(0) == dst.shape(0), "src and dst must have one length");
  require(num_dst >= 0 && num_dst <= std::numeric_limits<uint32_t>::max(),
          "num_dst must be below 2^32");
  const int64_t* from = data_of<int64_t>(src);
  const int64_t* to = data_of<int64_t>(dst);
  const nb::gil_scoped_release release;
  return count_repeated(from, to, rows_in(src), num_dst, num_threads);
}

}  // namespace

void bind_tables(nb::module_& m) {
  nb::class_<SharedIntegers> integers(m, "IntegerTable");
  integers.def(nb::init<>());
  integers.def("size", &size_of_integers);
  integers.def("look_up", &look_up_integers, "keys"_a.noconvert(), "rows"_a.noconvert(),
               "inserts"_a);
  integers.def("copy_keys", &copy_integers, "keys"_a.noconvert());
  nb::class_<SharedBytes> bytes(m, "BytesTable");
  bytes.def(nb::init<>());
  bytes.def("size", &size_of_bytes);
  bytes.def("num_bytes", &num_bytes);
  bytes.def("look_up", &look_up_bytes, "offsets"_a.noconvert(), "data"_a.noconvert(),
            "rows"_a.noconvert(), "inserts"_a);
  bytes.def("copy_keys", &copy_bytes_of, "offsets"_a.noconvert(), "data"_a.noconvert());
  m.def("parse_integers", &parse, "offsets"_a.noconvert(), "data"_a.noconvert(),
        "out"_a.noconvert());
  m.def("count_repeated", &repeated, "src"_a.noconvert(), "dst"_a.noconvert(), "num_dst"_a,
        "num_threads"_a);
}

}  // namespace graphshard
