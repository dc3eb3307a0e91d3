// SPDX-License-Identifier: Apache-2.0
// Numbers of keys, integers in cells, and repeated edges; see module.cpp.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
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

// Calls function(rows) for rows of int32 or int64 that can hold the numbers of a table; what adds
// to it writes int64.
template <typename Table, typename Function>
void with_rows(const Table& table, const OutVector& rows, const Function& function) {
  with_id_type(rows.dtype(), [&](auto row) {
    using Row = decltype(row);
    require(table.size() <= std::numeric_limits<Row>::max(), "rows must hold the numbers of keys");
    function(static_cast<Row*>(rows.data()));
  });
}

void look_up_integers(SharedIntegers& self, const InVector& keys, const OutVector& rows,
                      bool inserts) {
  require(keys.shape(0) == rows.shape(0), "rows must have one entry per key");
  require_apart({rows}, {keys});
  const int64_t* from = data_of<int64_t>(keys);
  const int64_t count = rows_in(keys);
  if (inserts) {
    int64_t* to = data_of<int64_t>(rows);
    const nb::gil_scoped_release release;
    const std::unique_lock lock(self.mutex);
    self.table.insert(from, count, to);
  } else {
    const nb::gil_scoped_release release;
    const std::shared_lock lock(self.mutex);
    with_rows(self.table, rows, [&](auto* to) { self.table.find(from, count, to); });
  }
}

// At most so many times what is there: what is expected may never come.
constexpr int64_t kMostGrowth = 16;

template <typename Table>
void reserve(Shared<Table>& self, int64_t num_keys) {
  const nb::gil_scoped_release release;
  const std::unique_lock lock(self.mutex);
  self.table.reserve(std::min(num_keys, kMostGrowth * self.table.size()));
}

void copy_integers(const SharedIntegers& self, const OutVector& keys) {
  int64_t* to = data_of<int64_t>(keys);
  const nb::gil_scoped_release release;
  const std::shared_lock lock(self.mutex);
  require(rows_in(keys) == self.table.size(), "keys must have one entry per number");
  if (rows_in(keys) > 0) std::memcpy(to, self.table.keys(), keys.nbytes());
}

// Calls function(offsets, data) for strings of bytes as Arrow has them: int32 or int64 offsets that
// ascend from 0 or above to the end of data; without the interpreter's lock.
template <typename Function>
void with_strings(const InVector& offsets, const InVector& data, const Function& function) {
  require(offsets.shape(0) > 0, "offsets must have one entry more than there are strings");
  const uint8_t* text = data_of<uint8_t>(data);
  const int64_t num_bytes = rows_in(data);
  const int64_t count = rows_in(offsets) - 1;
  const auto checked = [&](const auto* begins) {
    const nb::gil_scoped_release release;
    bool ascends = begins[0] >= 0 && begins[count] <= num_bytes;
    for (int64_t i = 0; i < count; ++i) ascends &= begins[i] <= begins[i + 1];
    require(ascends, "offsets must ascend within data");
    function(begins, text);
  };
  if (offsets.dtype() == nb::dtype<int32_t>()) {
    checked(data_of<int32_t>(offsets));
  } else {
    checked(data_of<int64_t>(offsets));
  }
}

void look_up_bytes(SharedBytes& self, const InVector& offsets, const InVector& data,
                   const OutVector& rows, bool inserts) {
  require(offsets.shape(0) == rows.shape(0) + 1, "offsets must have one entry more than rows");
  require_apart({rows}, {offsets, data});
  int64_t* numbers = inserts ? data_of<int64_t>(rows) : nullptr;
  const int64_t count = rows_in(rows);
  with_strings(offsets, data, [&](const auto* begins, const uint8_t* text) {
    if (inserts) {
      const std::unique_lock lock(self.mutex);
      self.table.insert(begins, text, count, numbers);
    } else {
      const std::shared_lock lock(self.mutex);
      with_rows(self.table, rows, [&](auto* to) { self.table.find(begins, text, count, to); });
    }
  });
}

int64_t size_of_bytes(const SharedBytes& self) {
  const std::shared_lock lock(self.mutex);
  return self.table.size();
}

int64_t num_bytes(const SharedBytes& self) {
  const std::shared_lock lock(self.mutex);
  return self.table.num_bytes();
}

void copy_bytes_of(const SharedBytes& self, const OutVector& offsets, const OutVector& data) {
  require_apart({offsets, data}, {});
  int64_t* begins = data_of<int64_t>(offsets);
  uint8_t* text = data_of<uint8_t>(data);
  const nb::gil_scoped_release release;
  const std::shared_lock lock(self.mutex);
  require(rows_in(offsets) == self.table.size() + 1 && rows_in(data) == self.table.num_bytes(),
          "offsets and data must have the sizes of the table");
  self.table.copy_keys(begins, text);
}

// (all are integers, some are negative, some are above what int64 holds)
nb::tuple parse(const InVector& offsets, const InVector& data, const OutVector& out) {
  require(offsets.shape(0) == out.shape(0) + 1, "offsets must have one entry more than out");
  require_apart({out}, {offsets, data});
  int64_t* to = data_of<int64_t>(out);
  ParsedIntegers parsed;
  with_strings(offsets, data, [&](const auto* begins, const uint8_t* text) {
    parsed = parse_integers(begins, text, rows_in(out), to);
  });
  return nb::make_tuple(parsed.are_integers, parsed.has_negative, parsed.has_large);
}

bool has_outer_blank(const InVector& offsets, const InVector& data) {
  bool has_one = false;
  with_strings(offsets, data, [&](const auto* begins, const uint8_t* text) {
    has_one = any_outer_blank(begins, text, rows_in(offsets) - 1);
  });
  return has_one;
}

int64_t repeated(const InVector& src, const InVector& dst, int64_t num_src, int64_t num_dst,
                 int num_threads) {
  require(src.shape(0) == dst.shape(0), "src and dst must have one length");
  require(num_src >= 0 && num_dst >= 0 &&
              (num_dst == 0 || num_src <= std::numeric_limits<int64_t>::max() / num_dst),
          "num_src times num_dst must be below 2^63");
  return with_id_type(src.dtype(), [&](auto id) {
    using Id = decltype(id);
    const Id* from = data_of<Id>(src);
    const Id* to = data_of<Id>(dst);
    const nb::gil_scoped_release release;
    return count_repeated(from, to, rows_in(src), num_src, num_dst, num_threads);
  });
}

}  // namespace

void bind_tables(nb::module_& m) {
  nb::class_<SharedIntegers> integers(m, "IntegerTable");
  integers.def(nb::init<>());
  integers.def("size", &size_of_integers);
  integers.def("look_up", &look_up_integers, "keys"_a.noconvert(), "rows"_a.noconvert(),
               "inserts"_a);
  integers.def("reserve", &reserve<IntegerTable>, "num_keys"_a);
  integers.def("copy_keys", &copy_integers, "keys"_a.noconvert());
  nb::class_<SharedBytes> bytes(m, "BytesTable");
  bytes.def(nb::init<>());
  bytes.def("size", &size_of_bytes);
  bytes.def("num_bytes", &num_bytes);
  bytes.def("look_up", &look_up_bytes, "offsets"_a.noconvert(), "data"_a.noconvert(),
            "rows"_a.noconvert(), "inserts"_a);
  bytes.def("reserve", &reserve<BytesTable>, "num_keys"_a);
  bytes.def("copy_keys", &copy_bytes_of, "offsets"_a.noconvert(), "data"_a.noconvert());
  m.def("parse_integers", &parse, "offsets"_a.noconvert(), "data"_a.noconvert(),
        "out"_a.noconvert());
  m.def("has_outer_blank", &has_outer_blank, "offsets"_a.noconvert(), "data"_a.noconvert());
  m.def("count_repeated", &repeated, "src"_a.noconvert(), "dst"_a.noconvert(), "num_src"_a,
        "num_dst"_a, "num_threads"_a);
}

}  // namespace graphshard
